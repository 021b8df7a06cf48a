"""What happens to a batch on its way into the model: normalising, mixing and erasing on the device."""

from typing import Any

import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from soft_models.errors import UsageError

from .config import TrainConfig
from .data import Batch


class BatchTransform:
    """Bring a batch to the device in the form that the model takes.

    Random draws come from the global generators, which the training loop seeds before every batch.

    Args:
        device: Where the model is.
        data_config: Its ``mean``, ``std`` and ``input_size`` are read.
        channels_last: Memory format of the images that result.
        mixup: Applied after normalising, with which it commutes.
        erasing: Applied last.
    """

    def __init__(
        self,
        device: torch.device,
        data_config: dict[str, Any],
        channels_last: bool = False,
        mixup: Mixup | None = None,
        erasing: RandomErasing | None = None,
    ) -> None:
        self.device = device
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.mixup, self.erasing = mixup, erasing
        self.mean, self.std = (
            255 * torch.tensor(data_config[name], device=device).view(1, -1, 1, 1) for name in ("mean", "std")
        )

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Images and targets; targets are soft where images are mixed."""
        images = batch.images.to(self.device, non_blocking=True).to(torch.float32)
        targets = batch.targets.to(self.device, non_blocking=True)
        images = images.sub_(self.mean).div_(self.std)
        if self.mixup is not None:
            count = len(images)
            if count % 2:  # mixing pairs images, and a broken one has left an odd number: the last is there twice
                images, targets = torch.cat([images, images[-1:]]), torch.cat([targets, targets[-1:]])
            images, targets = (mixed[:count] for mixed in self.mixup(images, targets))
        if self.erasing is not None:
            images = self.erasing(images)
        return images.to(memory_format=self.memory_format), targets


def build_mixup(cfg: TrainConfig, num_classes: int) -> Mixup | None:
    """timm's mixup and cutmix, where one of them is on.

    Raises:
        UsageError: The batch cannot be paired.
    """
    if not (cfg.mixup > 0 or cfg.cutmix > 0 or cfg.cutmix_minmax):
        return None
    if cfg.batch_size % 2:
        raise UsageError(f"mixup and cutmix pair images: --batch-size must be even, got {cfg.batch_size}")
    return Mixup(
        mixup_alpha=cfg.mixup, cutmix_alpha=cfg.cutmix, cutmix_minmax=cfg.cutmix_minmax, prob=cfg.mixup_prob,
        switch_prob=cfg.mixup_switch_prob, mode=cfg.mixup_mode, label_smoothing=cfg.smoothing, num_classes=num_classes,
    )  # fmt: skip


def build_train_transform(
    cfg: TrainConfig, device: torch.device, data_config: dict[str, Any], num_classes: int
) -> BatchTransform:
    """The batch transform of training, with mixing and erasing as configured."""
    erasing = None
    if cfg.reprob > 0 and not cfg.no_aug:
        erasing = RandomErasing(cfg.reprob, mode=cfg.remode, max_count=cfg.recount, device=device)
    return BatchTransform(
        device, data_config, channels_last=cfg.channels_last, mixup=build_mixup(cfg, num_classes), erasing=erasing
    )
