"""A training run: its parts put together, and its epochs trained, validated, logged and saved."""

import logging
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from timm.utils import distribute_bn
from torch import nn
from torch.utils.data import DataLoader

from soft_models.checkpoints.extras import EXTRAS_KEY, FORMAT
from soft_models.errors import RunStopped

from .augment import BatchTransform, build_train_transform
from .config import plain_dict, plain_values
from .data import ImageReport, ImageSamples, build_loader, eval_transform, train_transform
from .engine import EvalResult, Position, TrainSetup, evaluate, train_one_epoch
from .learner import Learner, build_learner, wrap
from .plan import Plan
from .resume import restore
from .runtime import StopRequest
from .sampling import EvalBatches, TrainBatches
from .saver import CheckpointSaver
from .scalars import ScalarLog

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A model to train: with the arguments that build it again, and the preprocessing and PIL mode of its images."""

    model: nn.Module
    arguments: dict[str, Any]
    data_config: dict[str, Any]
    image_mode: str


@dataclass
class Run:
    """A run in progress."""

    plan: Plan
    folder: Path
    learner: Learner
    setup: TrainSetup
    batches: TrainBatches
    val_loader: DataLoader[Any] | None
    val_report: ImageReport | None
    val_transform: BatchTransform
    position: Position
    saver: CheckpointSaver
    extras: dict[str, Any]
    stop: StopRequest
    scalars: ScalarLog | None = None


def build_run(plan: Plan, prepared: Prepared, folder: Path, stop: StopRequest) -> Run:
    """Loaders, learner and saver, at the position to start from."""
    cfg, runtime, model, data_config = plan.cfg, plan.runtime, prepared.model, prepared.data_config
    device, mode = runtime.device, prepared.image_mode
    samples = ImageSamples(plan.train.source, train_transform(cfg, data_config), mode)
    batches = TrainBatches(
        len(samples), cfg.batch_size, cfg.seed, runtime.rank, runtime.world_size, repeats=cfg.aug_repeats
    )
    num_classes = getattr(model, "num_classes", None)
    transform = build_train_transform(cfg, device, data_config, num_classes or 0)
    updates_per_epoch = batches.updates(cfg.grad_accum_steps)
    learner = build_learner(cfg, model, transform.mixup is not None, runtime, updates_per_epoch)
    saver = CheckpointSaver(folder, cfg.decreasing_metric, cfg.checkpoint_hist)
    position = Position(epoch=cfg.start_epoch or 0, updates=(cfg.start_epoch or 0) * updates_per_epoch)
    if plan.resume:
        path, checkpoint = plan.resume
        position = restore(learner, checkpoint, cfg, runtime, path, batches)
    else:
        learner.set_rate(position.epoch, position.updates)
    wrap(learner, runtime)
    setup = TrainSetup(
        loader=build_loader(samples, batches, cfg, device),
        transform=transform,
        runtime=runtime,
        report=ImageReport(plan.train.source, plan.train.name, num_classes),
        seed=cfg.seed,
        accumulate=cfg.grad_accum_steps,
        skip_nonfinite=cfg.skip_nonfinite,
        log_interval=cfg.log_interval,
    )
    extras = {
        "format": FORMAT,
        "classes": list(plan.train.classes) if plan.train.classes else None,
        "data_config": plain_values(data_config),
        "input_img_mode": mode,
        "model_args": prepared.arguments,
        "ranked": "state_dict_ema" if cfg.model_ema else "state_dict",
        "metrics": {},
        "versions": {"torch": str(torch.__version__), "timm": str(timm.__version__)},
    }
    return Run(
        plan=plan,
        folder=folder,
        learner=learner,
        setup=setup,
        batches=batches,
        val_loader=build_val_loader(plan, data_config, mode),
        val_report=ImageReport(plan.val.source, plan.val.name, num_classes) if plan.val else None,
        val_transform=BatchTransform(device, data_config, channels_last=cfg.channels_last),
        position=position,
        saver=saver,
        extras=extras,
        stop=stop,
    )


def build_val_loader(plan: Plan, data_config: dict[str, Any], mode: str) -> DataLoader[Any] | None:
    """Loader of this process's share of the validation split, if there is one."""
    if plan.val is None:
        return None
    cfg, runtime = plan.cfg, plan.runtime
    samples = ImageSamples(plan.val.source, eval_transform(data_config), mode)
    size = cfg.batch_size if cfg.validation_batch_size is None else cfg.validation_batch_size
    batches = EvalBatches(len(samples), size, runtime.rank, runtime.world_size)
    return build_loader(samples, batches, cfg, runtime.device)


def run_epochs(run: Run) -> int:
    """Train, validate and save, epoch by epoch; see ``train`` for what is returned."""
    runtime, position, learner = run.plan.runtime, run.position, run.learner
    while position.epoch < learner.num_epochs:
        if runtime.any_rank(bool(run.stop.number)):  # asked for while the epoch before was validated
            return stop_run(run)
        run.batches.set_position(position.epoch, position.step)
        if run.setup.transform.mixup is not None and run.plan.cfg.mixup_off_epoch:
            run.setup.transform.mixup.mixup_enabled = position.epoch < run.plan.cfg.mixup_off_epoch
        rate = train_one_epoch(learner, run.setup, position, lambda _: after_update(run))
        if rate is not None and runtime.world_size > 1 and run.plan.cfg.dist_bn:
            distribute_bn(learner.model, runtime.world_size, run.plan.cfg.dist_bn == "reduce")
        if rate is None or runtime.any_rank(bool(run.stop.number)):
            return stop_run(run)
        finish_epoch(run, rate)
    return 0


def after_update(run: Run) -> bool:
    """Save a recovery checkpoint where one is due; whether the run has to stop."""
    interval = run.plan.cfg.recovery_interval
    if interval and run.position.updates % interval == 0:
        save_recovery(run)
    return run.plan.runtime.any_rank(bool(run.stop.number))


def stop_run(run: Run) -> int:
    """Save the position and return the exit code of the signal."""
    path = save_recovery(run)
    _logger.warning(
        "stopped in epoch %d; the same command with --experiment %s --resume auto goes on from %s",
        run.position.epoch, run.plan.cfg.experiment or run.folder.name, path,
    )  # fmt: skip
    return 128 + (run.stop.number or int(signal.SIGTERM))


def save_recovery(run: Run) -> Path | None:
    """Save the position within the epoch; all processes must call."""
    state = checkpoint_state(run)
    if not run.plan.runtime.is_primary:
        return None
    return run.saver.save_recovery(state, run.position.epoch, run.position.step)


def checkpoint_state(run: Run) -> dict[str, Any]:
    """Content of a checkpoint: timm's keys, and ours under one of our own; all processes must call."""
    cfg, position = run.plan.cfg, run.position
    sums = run.plan.runtime.gather([position.loss_sum, position.samples]).tolist()
    where = {"epoch": position.epoch, "step": position.step, "steps": len(run.batches), "sums": sums}
    return {
        "arch": cfg.model,
        "args": plain_dict(cfg),
        "version": 2,
        **run.learner.state_dict(),
        EXTRAS_KEY: {
            **run.extras,
            "position": {**where, "nonfinite": position.nonfinite},
            "scheduler": run.learner.scheduler_state(),
        },
    }


def finish_epoch(run: Run, rate: float) -> None:
    """Validate, log and save the epoch that was trained, and move on to the next.

    Raises:
        RunStopped: It had no image, or a file cannot be written.
    """
    position, learner, plan = run.position, run.learner, run.plan
    epoch = position.epoch
    loss_sum, samples = plan.runtime.gather([position.loss_sum, position.samples]).double().sum(0).tolist()
    if not samples:
        raise RunStopped(
            f"epoch {epoch} trained on nothing: no image of {plan.train.name} could be read, or no loss was finite"
        )
    train_loss = loss_sum / samples
    run.setup.report.log(plan.runtime)
    row: dict[str, Any] = {"epoch": epoch, "train_loss": train_loss}
    results = validate_epoch(run)
    for prefix, result in results.items():
        row.update({f"{prefix}_{name}": value for name, value in result.metrics().items()})
    row["lr"] = learner.lr
    metric = train_loss if plan.val is None else row.get(f"eval_{plan.cfg.eval_metric}")
    if learner.scheduler is not None:
        learner.scheduler.step(epoch + 1, metric)
    position.next_epoch()
    run.extras["metrics"] = {name: value for name, value in row.items() if name.startswith("eval_")}
    state = checkpoint_state(run)
    if not plan.runtime.is_primary:
        return
    if run.scalars is not None:
        scalars = {name: value for name, value in row.items() if name != "epoch"}
        run.scalars.add(epoch, scalars | ({"images_per_second": rate} if rate else {}))
    run.saver.save_epoch(state, epoch, metric, row)
    values = ", ".join(f"{name} {value:.4g}" for name, value in row.items() if name != "epoch")
    _logger.info("epoch %d: %s%s", epoch, values, f", {rate:.0f} img/s" if rate else "")


def validate_epoch(run: Run) -> dict[str, EvalResult]:
    """Results by column prefix: ``eval`` is what ranks, the averaged weights where there are any."""
    cfg, learner, runtime = run.plan.cfg, run.learner, run.plan.runtime
    is_due = (run.position.epoch + 1) % cfg.val_interval == 0 or run.position.epoch + 1 == learner.num_epochs
    if run.val_loader is None or run.val_report is None or not is_due:
        return {}
    models = {"eval": learner.model}
    if learner.ema is not None:
        if runtime.world_size > 1 and cfg.dist_bn:
            distribute_bn(learner.ema.module, runtime.world_size, False)
        models = {"eval": learner.ema.module, "eval_raw": learner.model}
    results = {}
    for prefix, model in models.items():
        results[prefix] = evaluate(
            model,
            run.val_loader,
            run.val_transform,
            runtime,
            learner.autocast,
            run.val_report,
            prefix,
            cfg.log_interval,
        )
    run.val_report.log(runtime)
    return results
