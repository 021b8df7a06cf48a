"""The model in training, with everything that changes along: optimizer, schedule, loss scale and averaged weights."""

import math
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models import model_parameters
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3, dispatch_clip_grad
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from soft_models.errors import UsageError

from .config import TrainConfig
from .runtime import Runtime, build_autocast, compile_model

# What the options of the run decide, whatever a checkpoint's optimizer says.
GROUP_OPTIONS = ("lr", "initial_lr", "lr_scale", "weight_decay", "momentum", "betas", "eps")


@dataclass
class Learner:
    """What a training step reads and changes; ``module`` is the model itself or its distributed wrapper."""

    model: nn.Module
    module: nn.Module
    criterion: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast: AbstractContextManager[object]
    cfg: TrainConfig
    num_epochs: int
    scheduler: Scheduler | None = None
    ema: ModelEmaV3 | None = None

    def backward(self, images: Tensor, targets: Tensor, share: float, is_last: bool) -> Tensor:
        """Add the gradients of one step's loss, times ``share``; ranks exchange gradients in an update's last step."""
        with self._hold_gradients(is_last):
            with self.autocast:
                loss = self.criterion(self.module(images), targets)
            self.scaler.scale(loss * share).backward()
        return loss.detach()

    def _hold_gradients(self, is_last: bool) -> AbstractContextManager[object]:
        if isinstance(self.module, DistributedDataParallel) and not is_last:
            return self.module.no_sync()
        return nullcontext()

    def update(self, number: int) -> float:
        """Optimizer step, skipped where a gradient is not finite; returns the gradient's norm before clipping.

        Gradients are the same on every rank, so all ranks skip or none.
        """
        self.scaler.unscale_(self.optimizer)
        clip, mode = self.cfg.clip_grad, self.cfg.clip_mode
        limit = clip if clip is not None and mode == "norm" else math.inf
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit).item()
        if clip is not None and mode != "norm":
            dispatch_clip_grad(model_parameters(self.model, exclude_head=mode == "agc"), clip, mode=mode)
        if math.isfinite(norm) or self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if math.isfinite(norm) and self.ema is not None:
            self.ema.update(self.model, step=number)
        return norm

    @property
    def lr(self) -> float:
        """Learning rate before layer decay, that of the head."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def set_rate(self, epoch: int, updates: int) -> None:
        """Learning rate of a position in the run."""
        # timm's plateau would take its warm-up rate at a step to epoch 0, and keep it without warm-up.
        if self.scheduler is not None and (epoch > 0 or self.cfg.sched != "plateau"):
            self.scheduler.step(epoch)
            self.scheduler.step_update(updates)

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes in training, under timm's checkpoint keys."""
        state: dict[str, Any] = {"state_dict": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.ema is not None:
            state["state_dict_ema"] = self.ema.module.state_dict()
        if self.scaler.is_enabled():
            state["amp_scaler"] = self.scaler.state_dict()
        return state

    def scheduler_state(self) -> dict[str, Any]:
        """What a schedule that follows the metric has to remember; others are functions of the position."""
        scheduler: Any = self.scheduler
        if not hasattr(scheduler, "lr_scheduler"):
            return {}
        return {**scheduler.lr_scheduler.state_dict(), "restore_lr": scheduler.restore_lr}  # the rates before noise

    def load_optimizer(self, state: Mapping[str, Any], path: str) -> None:
        """Restore the optimizer, but keep the options of this run.

        Raises:
            UsageError: The state is of another optimizer or of other parameter groups.
        """
        options = [{key: group[key] for key in GROUP_OPTIONS if key in group} for group in self.optimizer.param_groups]
        try:
            self.optimizer.load_state_dict(dict(state))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"the optimizer in {path} is not this run's ({error}); give the same --opt, --weight-decay and "
                "--layer-decay, or --no-resume-opt"
            ) from None
        for group, kept in zip(self.optimizer.param_groups, options, strict=True):
            follows_metric = self.cfg.sched == "plateau"
            group.update({key: value for key, value in kept.items() if not (follows_metric and key == "lr")})

    def load_scheduler(self, state: Mapping[str, Any]) -> None:
        """Restore a schedule that follows the metric."""
        scheduler: Any = self.scheduler
        if hasattr(scheduler, "lr_scheduler") and state:
            scheduler.restore_lr = state.get("restore_lr")
            scheduler.lr_scheduler.load_state_dict({key: value for key, value in state.items() if key != "restore_lr"})


def build_learner(cfg: TrainConfig, model: nn.Module, mixes: bool, runtime: Runtime, updates_per_epoch: int) -> Learner:
    """Put a model into training on this process's device; ``wrap`` it after its state is loaded.

    Raises:
        UsageError: The optimizer or schedule does not take its options, or the machine does not do what is asked for.
    """
    model.to(runtime.device)
    if cfg.channels_last:
        model.to(memory_format=torch.channels_last)
    if cfg.sync_bn and runtime.world_size > 1:
        if runtime.device.type != "cuda":
            raise UsageError(f"--sync-bn needs GPUs, the processes are on {runtime.device.type}; leave it out")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    try:
        optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=cfg), **cfg.opt_kwargs)
    except (TypeError, ValueError, AssertionError, IndexError) as error:
        betas = f" with --opt-betas {list(cfg.opt_betas)}" if cfg.opt_betas else ""
        raise UsageError(f"cannot create optimizer {cfg.opt}{betas}: {error}") from error
    if getattr(optimizer, "is_second_order", False):
        raise UsageError(f"--opt {cfg.opt} needs second derivatives, which this training does not compute; use adamw")
    scheduler, num_epochs = _build_scheduler(cfg, optimizer, updates_per_epoch)
    fp16 = cfg.amp and cfg.amp_dtype == "float16"
    return Learner(
        model=model, module=model, criterion=build_criterion(cfg, mixes).to(runtime.device), optimizer=optimizer,
        scaler=torch.amp.GradScaler(runtime.device.type, enabled=fp16), autocast=build_autocast(cfg, runtime.device),
        cfg=cfg, num_epochs=num_epochs, scheduler=scheduler,
        ema=ModelEmaV3(model, decay=cfg.model_ema_decay, use_warmup=cfg.model_ema_warmup) if cfg.model_ema else None,
    )  # fmt: skip


def wrap(learner: Learner, runtime: Runtime) -> None:
    """Compile and distribute the model, in this order."""
    compile_model(learner.cfg, learner.model, runtime.device)
    if learner.ema is not None:
        compile_model(learner.cfg, learner.ema.module, runtime.device)
    if runtime.world_size > 1:
        ids = [runtime.device] if runtime.device.type == "cuda" else None
        learner.module = DistributedDataParallel(learner.model, device_ids=ids)


def global_rate(cfg: TrainConfig, world_size: int) -> float:
    """``lr``, or ``lr_base`` grown with the images per update as ``lr_base_scale`` says; by default as in timm."""
    if cfg.lr is not None:
        return cfg.lr
    adaptive = any(name in cfg.opt.lower() for name in ("ada", "lamb"))
    ratio = cfg.batch_size * world_size * cfg.grad_accum_steps / cfg.lr_base_size
    by_root = cfg.lr_base_scale == "sqrt" or (not cfg.lr_base_scale and adaptive)
    return cfg.lr_base * (math.sqrt(ratio) if by_root else ratio)


def _build_scheduler(
    cfg: TrainConfig, optimizer: torch.optim.Optimizer, updates_per_epoch: int
) -> tuple[Scheduler | None, int]:
    options = scheduler_kwargs(cfg, decreasing_metric=cfg.decreasing_metric)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # plateau forgets its state in timm; ours is in the checkpoint
        try:
            scheduler, num_epochs = create_scheduler_v2(optimizer, **options, updates_per_epoch=updates_per_epoch)
        except (ValueError, AssertionError) as error:
            raise UsageError(f"cannot create schedule {cfg.sched}: {error}") from error
    if scheduler is None and cfg.sched != "none":
        raise UsageError(f"this timm has no --sched {cfg.sched}; update it, or use cosine")
    return scheduler, num_epochs


def build_criterion(cfg: TrainConfig, mixes: bool) -> nn.Module:
    """Training loss; where images are mixed, targets come smoothed."""
    if cfg.bce_loss:
        smoothing = 0.0 if mixes else cfg.smoothing
        return BinaryCrossEntropy(smoothing, target_threshold=cfg.bce_target_thresh, sum_classes=cfg.bce_sum)
    if mixes:
        return SoftTargetCrossEntropy()
    return LabelSmoothingCrossEntropy(cfg.smoothing) if cfg.smoothing else nn.CrossEntropyLoss()


FEW_UPDATES = 500


def few_note(total_updates: int) -> str:
    """What to know about a run of few updates; empty for others."""
    if total_updates >= FEW_UPDATES:
        return ""
    little = f"{total_updates} updates in all, in which a model may learn little"
    return f"{little}: raise --epochs or --lr, or lower --batch-size"


def ema_note(cfg: TrainConfig, total_updates: int) -> str:
    """What to know about averaged weights in a short run; empty where there is nothing to say."""
    if not cfg.model_ema or cfg.model_ema_warmup:
        return ""
    kept = cfg.model_ema_decay**total_updates
    if kept < 0.05:
        return ""
    return (
        f"after all {total_updates} updates the averaged weights are still {100 * kept:.0f} % those of the start, as "
        f"--model-ema-decay is {cfg.model_ema_decay}; add --model-ema-warmup, or lower it"
    )
