"""Continuing a run: which checkpoint, whether it fits, and putting everything back in its place."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soft_models.checkpoints import read_checkpoint
from soft_models.checkpoints.extras import PREPROCESSING, stored_extras, stored_options
from soft_models.checkpoints.files import EMA_KEYS
from soft_models.errors import UsageError, some_of

from .config import TrainConfig, plain_dict
from .engine import Position
from .learner import Learner
from .runtime import Runtime
from .sampling import TrainBatches
from .saver import BEST, LAST, CheckpointSaver, recovery_files
from .weights import Checkpoint, check_architecture, choose_weights, load_exactly

_logger = logging.getLogger(__name__)

# Options that may change from one start of a run to the next without being worth a word.
FREE = ("config", "resume", "output", "experiment", "data_dir", "device", "workers", "pin_mem", "log_interval")


def find_resume(cfg: TrainConfig, folder: Path | None) -> tuple[Path, Checkpoint] | None:
    """The checkpoint to continue from, read; with ``auto`` the newest in ``folder``, if there is one.

    Raises:
        UsageError: An experiment's folder is about to be overwritten, or ``auto`` is given without an experiment.
        CheckpointError: The checkpoint cannot be read.
    """
    if not cfg.resume:
        if folder is not None and ((folder / LAST).exists() or recovery_files(folder)):
            raise UsageError(
                f"{folder} holds an earlier run: continue it with --resume auto, or give --experiment another name"
            )
        return None
    if cfg.resume != "auto":
        return Path(cfg.resume), read_checkpoint(cfg.resume)
    if folder is None:
        raise UsageError("--resume auto needs --experiment, which names the folder to look in")
    paths = [path for path, _ in recovery_files(folder)[:1]] + [folder / LAST]
    found = [(path, read_checkpoint(path)) for path in paths if path.exists()]
    if not found:
        _logger.info("nothing to resume in %s yet: starting", folder)
        return None
    return max(found, key=lambda item: rank(item[1], cfg))


def rank(checkpoint: Checkpoint, cfg: TrainConfig) -> tuple[bool, int, int]:
    """What the newest checkpoint has most of: first of all, it is of the run that began at ``start_epoch``."""
    position = stored_position(checkpoint)
    return began_alike(checkpoint, cfg), position.epoch, position.step


def began_alike(checkpoint: Checkpoint, cfg: TrainConfig) -> bool:
    """Whether a checkpoint's run was given the same ``start_epoch``."""
    return stored_options(checkpoint).get("start_epoch") == cfg.start_epoch


def check_resume(checkpoint: Checkpoint, cfg: TrainConfig, classes: tuple[str, ...] | None, path: Path) -> None:
    """Refuse a checkpoint without weights, or of another model, optimizer, classes or, in its own folder, ranking.

    Raises:
        UsageError: It is one.
    """
    check_architecture(checkpoint, cfg.model, path)
    choose_weights(checkpoint, False, path)
    stored = stored_options(checkpoint)
    opt = str(stored.get("opt", cfg.opt))
    if opt.lower() != cfg.opt.lower() and not cfg.no_resume_opt:
        raise UsageError(f"{path} has the state of --opt {opt}, not of {cfg.opt}; give the same, or --no-resume-opt")
    ranking = ranked_by(str(stored.get("eval_metric", cfg.eval_metric)), stored.get("val_split", cfg.val_split))
    if path.resolve().parent == (Path(cfg.output) / cfg.experiment).resolve():
        own = ranked_by(cfg.eval_metric, cfg.val_split)
        if ranking != own:
            raise UsageError(
                f"{path.parent} ranks its checkpoints by {ranking}, this run by {own}; give the same --eval-metric and "
                f"--val-split, or another --experiment and --resume {path}"
            )
    known = stored_extras(checkpoint).get("classes")
    if known and classes and list(known) != list(classes):
        differing = [name for name in (*known, *classes) if name not in known or name not in classes]
        raise UsageError(f"{path} was trained on other classes; not in both: {some_of(differing) or 'another order'}")


# Options that are taken from the checkpoint where they are not given.
INHERITED = ("img_size", "input_size", "in_chans", "gp", "model_kwargs", "input_img_mode", *PREPROCESSING)


def log_changes(checkpoint: Checkpoint, cfg: TrainConfig) -> None:
    """Say which options a run goes on with that it did not begin with."""
    before, now = stored_options(checkpoint), plain_dict(cfg)
    differing = [key for key in before if key in now and before[key] != now[key]]
    changed = [f"{key} {before[key]} to {now[key]}" for key in differing if now[key] or key not in INHERITED]
    if changed := [text for text in changed if text.split()[0] not in FREE]:
        _logger.warning("options that change on resume: %s", some_of(changed, 8))


def ranked_by(metric: str, val_split: str) -> str:
    return f"validation {metric}" if val_split else "training loss"


def stored_position(checkpoint: Checkpoint) -> Position:
    """Where a checkpoint's run is; that of timm's files is the epoch after theirs."""
    stored = stored_extras(checkpoint).get("position")
    if stored is None:
        epoch = checkpoint.get("epoch", -1)
        return Position(epoch=epoch + 1 if checkpoint.get("version", 1) > 1 else max(epoch, 0))
    return Position(**{key: value for key, value in stored.items() if key not in ("sums", "steps")})


def restore(
    learner: Learner, checkpoint: Checkpoint, cfg: TrainConfig, runtime: Runtime, path: Path, batches: TrainBatches
) -> Position:
    """Put a checkpoint's state into ``learner`` and return the position to go on from.

    Raises:
        UsageError: It does not fit.
    """
    _, weights = choose_weights(checkpoint, False, path)
    load_exactly(learner.model, weights, path, advice="resume needs the same head; --pretrained-path adapts it")
    _restore_ema(learner, checkpoint, path)
    extras = stored_extras(checkpoint)
    if not cfg.no_resume_opt and "optimizer" in checkpoint:
        learner.load_optimizer(checkpoint["optimizer"], str(path))
        rate = checkpoint["optimizer"]["param_groups"][0].get("lr")
        learner.load_scheduler(extras.get("scheduler") or {})
        if learner.scaler.is_enabled() and checkpoint.get("amp_scaler"):
            learner.scaler.load_state_dict(checkpoint["amp_scaler"])
    else:
        rate = None
    position = stored_position(checkpoint)
    # The same command with --resume auto goes on where its run stopped.
    again = cfg.resume == "auto" and began_alike(checkpoint, cfg)
    if cfg.start_epoch is not None and not again:
        position = Position(epoch=cfg.start_epoch)
    if position.step:
        _restore_sums(position, extras, runtime, path, len(batches))
    position.updates = position.epoch * batches.updates(cfg.grad_accum_steps)
    position.updates += -(-position.step // cfg.grad_accum_steps)
    learner.set_rate(position.epoch, position.updates)
    new_rate = learner.optimizer.param_groups[0]["lr"]
    if rate is not None and abs(new_rate - rate) > 1e-9 * max(abs(rate), abs(new_rate)):
        _logger.warning("learning rate changes on resume from %.6g to %.6g: schedule options differ", rate, new_rate)
    _logger.info("resumed %s: epoch %d, step %d", path, position.epoch, position.step)
    return position


def _restore_ema(learner: Learner, checkpoint: Checkpoint, path: Path) -> None:
    if learner.ema is None:
        return
    if all(checkpoint.get(key) is None for key in EMA_KEYS):
        learner.ema.set(learner.model)
        _logger.warning("%s has no averaged weights: the average starts from its weights", path)
        return
    load_exactly(learner.ema.module, choose_weights(checkpoint, True, path)[1], path)


def _restore_sums(position: Position, extras: Mapping[str, Any], runtime: Runtime, path: Path, steps: int) -> None:
    sums, stored_steps = extras["position"]["sums"], extras["position"]["steps"]
    if stored_steps != steps:
        raise UsageError(
            f"{path} lies within an epoch of {stored_steps} steps, an epoch is now {steps}; give the same data and "
            f"--batch-size, or resume from {LAST}"
        )
    if len(sums) != runtime.world_size:
        raise UsageError(
            f"{path} lies within an epoch of {len(sums)} processes, this run has {runtime.world_size}; start as many, "
            f"or resume from {LAST}"
        )
    position.loss_sum, position.samples = sums[runtime.rank]


def restore_saver(saver: CheckpointSaver, checkpoint: Checkpoint, path: Path, runtime: Runtime) -> None:
    """Go on with the bookkeeping, and finish what a killed process had begun in the same folder."""
    same_folder = path.resolve().parent == saver.folder.resolve()
    state = checkpoint.get("saver") or {}
    saver.load_state_dict(state, same_folder)
    if not (same_folder and runtime.is_primary):
        return
    if (saver.folder / BEST).exists():
        saver.keep_better(read_checkpoint(saver.folder / BEST).get("metric"))
    epoch, _ = state.get("pending") or (None, None)
    if epoch is not None and path.name == LAST:
        saver.reconcile(epoch)
