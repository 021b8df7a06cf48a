"""The two loops: one epoch of training, one pass of evaluation."""

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from soft_models.commands.progress import Progress
from soft_models.errors import RunStopped

from .augment import BatchTransform
from .config import Metric
from .data import Batch, ImageReport
from .learner import Learner
from .runtime import Runtime
from .sampling import derive_seed, seed_all

_logger = logging.getLogger(__name__)


@dataclass
class Position:
    """Where a run is: the next step to take, and the sums of the epoch so far, of this process."""

    epoch: int = 0
    step: int = 0  # of the epoch
    updates: int = 0  # of the run
    loss_sum: float = 0.0
    samples: float = 0.0
    nonfinite: int = 0  # updates in a row that were left out

    def next_epoch(self) -> None:
        """Move to the start of the epoch that follows."""
        self.epoch, self.step, self.loss_sum, self.samples = self.epoch + 1, 0, 0.0, 0.0


@dataclass(frozen=True)
class EvalResult:
    """Averages over the images of a split; accuracies in percent."""

    loss: float = math.nan
    top1: float = math.nan
    top5: float = math.nan
    samples: int = 0
    skipped: int = 0

    def metrics(self) -> dict[str, float]:
        """What can rank a checkpoint."""
        return {name: value for name, value in asdict(self).items() if name in get_args(Metric)}


@dataclass
class TrainSetup:
    """What the training loop works with: data and options."""

    loader: DataLoader[Any]
    transform: BatchTransform
    runtime: Runtime
    report: ImageReport
    seed: int
    accumulate: int
    skip_nonfinite: int
    log_interval: int


def train_one_epoch(
    learner: Learner, setup: TrainSetup, position: Position, after_update: Callable[[Position], bool]
) -> float | None:
    """Train from ``position`` to the end of its epoch.

    Args:
        learner: What is trained.
        setup: Data and options.
        position: Moved along.
        after_update: Called after every optimizer update but the epoch's last; true ends the epoch early.

    Returns:
        Images per second over all processes, or None if the epoch ended early.

    Raises:
        RunStopped: More non-finite updates in a row than allowed.
    """
    learner.module.train()
    steps = len(setup.loader)
    update_batches: list[Batch] = []
    saved: list[Tensor] = []
    progress = Progress(f"epoch {position.epoch}", steps, setup.log_interval, setup.runtime.is_primary)
    statistics = _batch_statistics(learner.model) if setup.skip_nonfinite or learner.scaler.is_enabled() else []
    for batch in setup.loader:
        setup.report.add(batch)
        if not update_batches:
            saved = [tensor.clone() for tensor in statistics]
        update_batches.append(batch)
        is_last = (position.step + 1) % setup.accumulate == 0 or position.step + 1 == steps
        loss = _train_step(learner, setup, position, batch, is_last)
        position.step += 1
        if not is_last:
            continue
        position.updates += 1
        images = sum(len(batch.indices) for batch in update_batches)
        # Without an image there are no gradients, which a loss scale does not take.
        norm = learner.update(position.updates) if images else 0.0
        if not _check_finite(norm, loss, learner, setup, position, update_batches):
            for tensor, before in zip(statistics, saved, strict=True):
                tensor.copy_(before)
        update_batches = []
        if learner.scheduler is not None:
            learner.scheduler.step_update(position.updates)
        progress.show(position.step, images * setup.runtime.world_size, loss=loss, lr=learner.lr, norm=norm)
        if position.step < steps and after_update(position):
            progress.close()
            return None
    progress.close()
    return progress.rate


def _train_step(learner: Learner, setup: TrainSetup, position: Position, batch: Batch, is_last: bool) -> float:
    """Gradients of one batch; returns its loss. Its random draws depend on nothing but the position."""
    seed_all(derive_seed(setup.seed, "step", position.epoch, position.step, setup.runtime.rank))
    if not batch.indices:
        if setup.runtime.world_size > 1:
            names = ", ".join(item.name for item in batch.broken)
            raise RunStopped(f"no image of a batch can be read, and the other processes wait for it: {names}")
        return math.nan
    images, targets = setup.transform(batch)
    group_start = position.step - position.step % setup.accumulate
    share = 1 / min(setup.accumulate, len(setup.loader) - group_start)
    try:
        loss = learner.backward(images, targets, share, is_last).item()
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise RunStopped(f"batch norm needs a larger --batch-size or --img-size to train: {error}") from None
    if math.isfinite(loss):
        position.loss_sum += loss * len(images)
        position.samples += len(images)
    return loss


def _check_finite(
    norm: float, loss: float, learner: Learner, setup: TrainSetup, position: Position, batches: list[Batch]
) -> bool:
    """Whether the update was finite; count those that were not, and stop the run at too many in a row."""
    if math.isfinite(norm):
        position.nonfinite = 0
        return True
    # A loss scale that is still too high overflows gradients of finite losses, and is lowered by that.
    overflow = learner.scaler.is_enabled() and learner.scaler.get_scale() >= 1
    if overflow and not setup.runtime.any_rank(not math.isfinite(loss)):
        return False
    position.nonfinite += 1
    names = [setup.report.source.name(index) for batch in batches for index in batch.indices]
    _logger.warning("loss %s, gradient norm %s at update %d: left out", loss, norm, position.updates)
    if position.nonfinite > setup.skip_nonfinite:
        raise RunStopped(
            f"loss {loss} and gradient norm {norm} in epoch {position.epoch}, step {position.step}, with "
            f"{position.nonfinite} such updates in a row and --skip-nonfinite {setup.skip_nonfinite}; lower the "
            f"learning rate, clip gradients, or look at these images: {', '.join(names)}"
        )
    return False


def _batch_statistics(model: nn.Module) -> list[Tensor]:
    """Buffers that a forward pass changes and that an infinite batch would spoil for good."""
    return [tensor for tensor in model.buffers() if tensor.is_floating_point()]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: DataLoader[Any],
    transform: BatchTransform,
    runtime: Runtime,
    autocast: AbstractContextManager[object],
    report: ImageReport,
    title: str,
    log_interval: int,
) -> EvalResult:
    """Mean cross-entropy and accuracies of ``model``, which must not be wrapped: ranks may see unequal batches.

    Args:
        model: In eval mode from here on.
        loader: Every image of the split once, over all processes.
        transform: To the device.
        runtime: This process.
        autocast: Precision.
        report: Takes note of unreadable images, which count nowhere but in ``skipped``.
        title: For the progress bar.
        log_interval: Steps between log lines.
    """
    model.eval()
    sums: list[Tensor] = []
    samples = skipped = 0
    progress = Progress(title, len(loader), log_interval, runtime.is_primary)
    with autocast:  # once, as it keeps the weights that it has converted until it is left
        for step, batch in enumerate(loader, start=1):
            report.add(batch)
            skipped += len(batch.broken)
            if batch.indices:
                images, targets = transform(batch)
                sums.append(_batch_sums(model(images).float(), targets))
                samples += len(targets)
            progress.show(step, len(batch.indices) * runtime.world_size)
    progress.close()
    local = torch.stack(sums).cpu().double().sum(0).tolist() if sums else [0.0] * 3
    loss, top1, top5, count, left_out = runtime.gather([*local, samples, skipped]).double().sum(0).tolist()
    if count == 0:
        return EvalResult(skipped=int(left_out))
    return EvalResult(loss / count, 100 * top1 / count, 100 * top5 / count, int(count), int(left_out))


def _batch_sums(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of losses, and how many targets are the first and among the first five guesses."""
    guesses = logits.topk(min(5, logits.shape[1]), dim=1).indices
    hits = guesses.eq(targets[:, None])
    return torch.stack([F.cross_entropy(logits, targets, reduction="sum"), hits[:, :1].sum(), hits.sum()])
