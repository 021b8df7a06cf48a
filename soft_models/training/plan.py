"""What is settled before a model is built: options, data and checkpoint, checked against each other."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from timm.optim import list_optimizers

from soft_models.checkpoints.files import require_file
from soft_models.errors import UsageError, some_of, suggestion

from .config import TrainConfig, check_least
from .data import check_batch_size
from .learner import global_rate
from .models import check_model_name
from .resume import check_resume, find_resume, log_changes
from .runtime import Runtime
from .sources import Split, open_train_splits
from .weights import Checkpoint

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """All that is settled, and checked, before the model is built."""

    cfg: TrainConfig
    runtime: Runtime
    train: Split
    val: Split | None
    resume: tuple[Path, Checkpoint] | None


def make_plan(cfg: TrainConfig, runtime: Runtime) -> Plan:
    """Check the configuration against names, data and checkpoint.

    Raises:
        UsageError: Something does not fit.
        CheckpointError: There is no such checkpoint, or it cannot be read.
    """
    check_model_name(cfg.model)
    check_optimizer(cfg)
    check_least(cfg, 1, "epochs", "grad_accum_steps", "checkpoint_hist", "val_interval", "log_interval")
    check_least(cfg, 1, "batch_size", "validation_batch_size")
    check_least(cfg, 0, "workers", "lr")
    found = find_resume(cfg, Path(cfg.output) / cfg.experiment if cfg.experiment else None)
    for path in (cfg.pretrained_path, cfg.initial_checkpoint):
        if path and not found:
            require_file(path)
    splits = open_train_splits(cfg)
    check_batch_size(len(splits[0].source), cfg.batch_size, runtime.world_size, splits[0].name)
    cfg = replace(cfg, num_classes=head_classes(cfg, splits[0].classes), lr=global_rate(cfg, runtime.world_size))
    if found:
        check_resume(found[1], cfg, splits[0].classes, found[0])
        log_changes(found[1], cfg)
    if cfg.warmup_epochs >= cfg.epochs and not cfg.warmup_prefix and cfg.sched not in ("none", "plateau"):
        _logger.warning(
            "--warmup-epochs %d fills all %d epochs: the learning rate only rises",
            cfg.warmup_epochs,
            cfg.epochs,
        )
    return Plan(cfg, runtime, *splits, found)


def check_optimizer(cfg: TrainConfig) -> None:
    """Refuse an optimizer that timm does not know, and a decay by layers that nothing applies.

    Raises:
        UsageError: One is asked for.
    """
    known = [*list_optimizers(), *(f"lookahead_{name}" for name in list_optimizers())]
    if cfg.opt.lower() not in known:
        hint = suggestion(cfg.opt, known) or "; timm.optim.list_optimizers() lists them"
        raise UsageError(f"unknown --opt {cfg.opt!r}{hint}")
    if cfg.layer_decay is not None and cfg.sched == "none":
        raise UsageError(
            "--layer-decay is applied by the schedule, so --sched none leaves it without effect; use cosine"
        )


def head_classes(cfg: TrainConfig, classes: tuple[str, ...] | None) -> int | None:
    """Classes of the head: as given, else those of the data.

    Raises:
        UsageError: Fewer than the data have, or neither tells.
    """
    if classes is None:
        if cfg.num_classes is None:
            raise UsageError(f"dataset {cfg.dataset!r} does not tell its classes: give --num-classes")
        return cfg.num_classes
    if cfg.num_classes is None:
        _logger.info("--num-classes not given: %d, as in the data: %s", len(classes), some_of(classes, 10))
        return len(classes)
    if cfg.num_classes < len(classes):
        raise UsageError(f"--num-classes {cfg.num_classes} is too small: the data have {len(classes)} classes")
    if cfg.num_classes > len(classes):
        _logger.warning("--num-classes %d is more than the data have: %d", cfg.num_classes, len(classes))
    return cfg.num_classes
