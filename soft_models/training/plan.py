"""What is settled before a model is built: options, data and checkpoint, checked against each other."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
    check_ranges(cfg)
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


LEAST_1 = (
    "epochs", "grad_accum_steps", "checkpoint_hist", "val_interval", "log_interval", "batch_size",
    "validation_batch_size", "lr_base_size", "lr_cycle_limit", "recount",
)  # fmt: skip
LEAST_0 = (
    "workers", "start_epoch", "lr", "lr_base", "warmup_lr", "min_lr", "warmup_epochs", "cooldown_epochs",
    "patience_epochs", "aug_repeats", "color_jitter", "mixup", "cutmix", "mixup_off_epoch", "recovery_interval",
    "skip_nonfinite",
)  # fmt: skip
FRACTIONS = (
    "hflip", "vflip", "color_jitter_prob", "grayscale_prob", "gaussian_blur_prob", "reprob", "mixup_prob",
    "mixup_switch_prob", "model_ema_decay",
)  # fmt: skip
RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (FRACTIONS, lambda value: 0 <= value <= 1, "must lie in 0 to 1"),
    (("smoothing",), lambda value: 0 <= value < 1, "must be at least 0 and below 1"),
    (("decay_epochs",), lambda value: value > 0, "must be above 0"),
    (("clip_grad",), lambda value: value > 0, "must be above 0, or none"),
    (("scale", "ratio"), lambda pair: 0 < pair[0] <= pair[1], "takes the smaller number first, both above 0"),
    (("cutmix_minmax",), lambda pair: 0 < pair[0] < pair[1] <= 1, "takes two fractions, the smaller first"),
)


def check_ranges(cfg: TrainConfig) -> None:
    """Refuse numbers that mean nothing, or the opposite of what they look like.

    Raises:
        UsageError: One does.
    """
    check_least(cfg, 1, *LEAST_1)
    check_least(cfg, 0, *LEAST_0)
    for names, holds, rule in RULES:
        for name in names:
            value = getattr(cfg, name)
            if value is not None and not holds(value):
                raise UsageError(f"--{name.replace('_', '-')} {rule}, got {value}")


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
