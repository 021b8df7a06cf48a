"""Backbones for detection and segmentation: maps of a named model, a feature pyramid, a segmenter on the same maps."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.layers import ConvNormAct, LayerNorm2d, freeze_batch_norm_2d, get_norm_act_layer
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool, LastLevelP6P7

from soft_models.checkpoints import find_weights, read_checkpoint
from soft_models.checkpoints.convert import native_weights
from soft_models.checkpoints.vit import LAYER_SCALE
from soft_models.registry import is_ours, registered_names, require_model

__all__ = ["FPNBackbone", "MapBackbone", "SimplePyramid", "UPerNet"]

STRIDES = (4, 8, 16, 32)  # pixels of the image per pixel of the map, stage by stage
DIVISOR = 32  # pixels: images padded to multiples of it have maps that double exactly
_logger = logging.getLogger(__name__)


class MapBackbone(nn.Module):
    """Maps of the chosen stages of a registered model, normalised as dense heads expect them.

    A pyramid gives its own maps. A ViT, whose maps all have one stride, gives those of :class:`SimplePyramid`.

    Args:
        name: A registered name of ours.
        out_indices: Stages to return, numbers from 0 in ascending order; stages behind the last are not built.
        norm: LayerNorm over the channels of every map, with weights of its own.
        frozen_stages: This many first stages, and the stem with them, stay as they are: no gradient, no statistics, no
            dropout; 0 freezes nothing.
        frozen_bn: Every batch normalisation of the model stays as it is, for batches too small for statistics.
        checkpoint: A classifier's file, of ``train.py`` or official; what is loaded and what dropped is logged. Without
            ``img_size`` a pyramid's position tables keep the grids they have there, so each tensor arrives bit by bit.
        **kwargs: Constructor arguments of the model, such as ``drop_path_rate``; not ``device`` and ``dtype``.

    Shape:
        ``(B, in_chans, H, W)`` to a list of ``(B, channels[i], ceil(H / strides[i]), ceil(W / strides[i]))``. Of a ViT,
        for sides that 16 divides; others are padded first.

    Raises:
        ValueError: Unknown ``name``; ``out_indices`` or ``frozen_stages`` out of range; ``device`` or ``dtype``.
        CheckpointError: The file cannot be read, or does not fit.
    """

    def __init__(
        self,
        name: str,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        norm: bool = True,
        frozen_stages: int = 0,
        frozen_bn: bool = False,
        checkpoint: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if not kwargs.keys().isdisjoint(("device", "dtype")):  # which the modules behind the model would not have
            raise ValueError("a backbone is built on the CPU in float32: leave device and dtype to .to(...)")
        stages = check_stages(out_indices)
        is_vit = "_vit_" in check_name(name)
        choices = (0,) if is_vit else tuple(range(len(STRIDES) + 1))
        if frozen_stages not in choices:
            raise ValueError(f"frozen_stages of {name} must be one of {choices}, got {frozen_stages}")
        self.model = create_features(name, (-1,) if is_vit else stages, checkpoint, **kwargs)
        self.channels: list[int] = self.model.feature_info.channels()
        self.strides = [STRIDES[stage] for stage in stages]
        self.simple_pyramid: nn.Module = nn.Identity()
        if is_vit:
            self.simple_pyramid = SimplePyramid(self.channels[0], stages)
            self.channels = self.simple_pyramid.channels
        self.norms = nn.ModuleList(LayerNorm2d(dim) if norm else nn.Identity() for dim in self.channels)
        if frozen_bn:
            self.model = freeze_batch_norm_2d(self.model)
        self.frozen_stages = frozen_stages
        for module in self.frozen_modules():
            module.requires_grad_(False)
        self.train()

    def frozen_modules(self) -> list[nn.Module]:
        """Stem and stages that do not change."""
        model = self.model.model
        return [model.patch_embed, *model.stages[: self.frozen_stages]] if self.frozen_stages else []

    def train(self, mode: bool = True) -> "MapBackbone":
        """As torch's, but what is frozen stays in evaluation mode."""
        super().train(mode)
        for module in self.frozen_modules():
            module.eval()
        return self

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = self.simple_pyramid(self.model(x))
        return [norm(y) for norm, y in zip(self.norms, maps, strict=True)]


class SimplePyramid(nn.Module):
    """Maps of strides 4 to 32 out of one of stride 16, as in ViTDet (Li et al. 2022, arXiv:2203.16527).

    Two transposed convolutions, one, none, or a max-pool; channels halve with each doubling of the map.

    Args:
        dim: Channels C of the map.
        stages: Which of the four to build.

    Shape:
        A list of one ``(B, C, H, W)`` to maps ``(B, channels[i], ...)`` that are 4, 2, 1 and 1/2 times as large.
    """

    def __init__(self, dim: int, stages: Sequence[int]) -> None:
        super().__init__()
        double = partial(nn.ConvTranspose2d, kernel_size=2, stride=2)
        levels = (
            nn.Sequential(double(dim, dim // 2), LayerNorm2d(dim // 2), nn.GELU(), double(dim // 2, dim // 4)),
            double(dim, dim // 2),
            nn.Identity(),
            nn.MaxPool2d(2, ceil_mode=True),
        )
        self.levels = nn.ModuleList(levels[stage] for stage in stages)
        self.channels = [(dim // 4, dim // 2, dim, dim)[stage] for stage in stages]

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        return [level(maps[-1]) for level in self.levels]


class FPNBackbone(nn.Module):
    """Feature pyramid network (Lin et al. 2017, arXiv:1612.03144) on a registered model, for torchvision's detectors.

    ``MaskRCNN(FPNBackbone("soft_tiny"), num_classes)`` and ``FasterRCNN`` take the defaults; ``RetinaNet`` and ``FCOS``
    expect ``FPNBackbone(name, out_indices=(1, 2, 3), extra="p6p7")``, strides 8 to 128.

    Args:
        name: A registered name of ours.
        out_channels: Channels of every map.
        extra: Levels behind the last stage: ``"pool"`` for one, a max-pool, ``"p6p7"`` for two by strided convolutions,
            ``""`` for none.
        **kwargs: As for :class:`MapBackbone`.

    Shape:
        ``(B, in_chans, H, W)`` to maps ``(B, out_channels, ...)`` by name: ``"0"``, ``"1"``, ..., then ``extra``'s.

    Raises:
        ValueError: Unknown ``extra``, ``out_channels`` below 1; or as :class:`MapBackbone`.
    """

    def __init__(self, name: str, out_channels: int = 256, extra: str = "pool", **kwargs: Any) -> None:
        super().__init__()
        if extra not in EXTRA_LEVELS:
            raise ValueError(f"unknown extra {extra!r}; choose one of {tuple(EXTRA_LEVELS)}")
        check_positive(out_channels=out_channels)
        self.body = MapBackbone(name, **kwargs)
        self.fpn = FeaturePyramidNetwork(self.body.channels, out_channels, EXTRA_LEVELS[extra](out_channels))
        self.out_channels = out_channels

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps: dict[str, Tensor] = self.fpn(OrderedDict((str(i), y) for i, y in enumerate(self.body(x))))
        return maps


EXTRA_LEVELS: dict[str, Callable[[int], ExtraFPNBlock | None]] = {
    "pool": lambda _: LastLevelMaxPool(),
    "p6p7": lambda width: LastLevelP6P7(width, width),
    "": lambda _: None,
}


class UPerNet(nn.Module):
    """Semantic segmentation by UPerNet (Xiao et al. 2018, arXiv:1807.10221) on a registered model.

    Pyramid pooling on the last map, a top-down path over the others, all of them fused at the finest: the head of that
    paper for one task. Images are padded to multiples of 32 and logits cropped, so any sizes work.

    Args:
        name: A registered name of ours.
        num_classes: Classes, background included.
        channels: Width of the head.
        pool_sizes: Sides of the grids that the last map is pooled to.
        drop_rate: Dropout rate of whole channels before the classifier.
        norm_layer: Normalisation of the head's maps, timm's name or a class. Batch normalisation, the paper's, needs
            batches of two or more in training, since the coarsest pool has one pixel.
        **kwargs: As for :class:`MapBackbone`.

    Shape:
        ``(B, in_chans, H, W)`` to logits ``(B, num_classes, H, W)``; a list of images ``(in_chans, H, W)`` of their own
        sizes to a list of logits.

    Raises:
        ValueError: A number below 1, no pool, or timm knows no such ``norm_layer``; or as :class:`MapBackbone`.
    """

    def __init__(
        self,
        name: str,
        num_classes: int,
        channels: int = 512,
        pool_sizes: Sequence[int] = (1, 2, 3, 6),
        drop_rate: float = 0.1,
        norm_layer: str | type[nn.Module] = "batchnorm2d",
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if not isinstance(pool_sizes, Sequence) or not pool_sizes:
            raise ValueError(f"pool_sizes must be a sequence of sides of grids, got {pool_sizes}")
        check_positive(num_classes=num_classes, channels=channels, **{"the least of pool_sizes": min(pool_sizes)})
        self.body = MapBackbone(name, **kwargs)
        try:
            get_norm_act_layer(norm_layer, nn.ReLU)
        except (KeyError, AssertionError):
            raise ValueError(
                f"unknown norm_layer {norm_layer!r}; choose a name of timm's, such as 'batchnorm2d'"
            ) from None
        conv = partial(ConvNormAct, norm_layer=norm_layer, act_layer=nn.ReLU)
        *finer, last = self.body.channels
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(size), conv(last, channels, 1)) for size in pool_sizes
        )
        self.pooled = conv(last + len(pool_sizes) * channels, channels, 3)
        self.laterals = nn.ModuleList(conv(dim, channels, 1) for dim in finer)
        self.smooths = nn.ModuleList(conv(channels, channels, 3) for _ in finer)
        self.fuse = conv(len(self.body.channels) * channels, channels, 3)
        self.drop = nn.Dropout2d(drop_rate)
        self.classifier = nn.Conv2d(channels, num_classes, 1)

    def forward_head(self, maps: list[Tensor]) -> Tensor:
        """Logits at the size of the finest map."""
        *finer, x = maps
        x = self.pooled(torch.cat([x, *(resize(pool(x), x) for pool in self.pools)], dim=1))
        path = [x]
        for y, lateral in zip(reversed(finer), reversed(self.laterals), strict=True):
            y = lateral(y)
            path.append(y + resize(path[-1], y))
        smooth = [path[0], *(conv(y) for conv, y in zip(self.smooths, path[1:], strict=True))]
        return self.classifier(self.drop(self.fuse(torch.cat([resize(y, path[-1]) for y in smooth], dim=1))))

    def forward(self, images: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
        sizes = [image.shape[-2:] for image in images]
        height, width = (-(-max(sides) // DIVISOR) * DIVISOR for sides in zip(*sizes, strict=True))
        pads = [(0, width - W, 0, height - H) for H, W in sizes]
        batch = torch.stack([F.pad(image, pad) for image, pad in zip(images, pads, strict=True)])
        logits = resize(self.forward_head(self.body(batch)), batch)
        if isinstance(images, Tensor):
            return logits[..., : sizes[0][0], : sizes[0][1]]
        return [y[:, :H, :W] for y, (H, W) in zip(logits, sizes, strict=True)]


def resize(x: Tensor, like: Tensor) -> Tensor:
    """``x`` at the height and width of ``like``, bilinearly."""
    return F.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=False)


def create_features(name: str, out_indices: tuple[int, ...], checkpoint: str | Path | None, **kwargs: Any) -> Any:
    """timm's ``features_only`` model, with a classifier's weights if ``checkpoint`` names a file."""
    options = {"features_only": True, "out_indices": out_indices, **kwargs}
    if checkpoint is None:
        return timm.create_model(name, **options)
    features = timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"file": str(checkpoint)}, **options)
    weights = native_weights(find_weights(read_checkpoint(checkpoint))[1])
    own = features.model.state_dict()
    # LayerScale is no loss: it went into the projections.
    dropped = [key for key in weights if key not in own and not LAYER_SCALE.match(key)]
    equal = [key for key in weights if key in own and torch.equal(weights[key], own[key])]
    _logger.info(
        "%s: %d of its %d tensors are those of the backbone now, %d are adapted to it; dropped: %s",
        checkpoint, len(equal), len(weights), len(weights) - len(equal) - len(dropped), ", ".join(dropped) or "none",
    )  # fmt: skip
    return features


def check_name(name: str) -> str:
    """``name``, or a ValueError if it is none of ours, or has a tag of weights that there are not."""
    if not is_ours(name):
        raise ValueError(f"unknown name {name!r}; choose one of {', '.join(registered_names())}")
    require_model(name)
    return name


def check_stages(out_indices: Sequence[int]) -> tuple[int, ...]:
    """``out_indices`` as a tuple, or a ValueError if they are not ascending numbers of stages."""
    stages = tuple(out_indices) if isinstance(out_indices, Sequence) else ()
    if not stages or not set(stages) <= set(range(len(STRIDES))) or list(stages) != sorted(set(stages)):
        raise ValueError(f"out_indices must be ascending numbers from 0 to {len(STRIDES) - 1}, got {out_indices}")
    return stages


def check_positive(**values: int) -> None:
    """Refuse what is below 1."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
