"""Vicinity Vision Transformer: architectures, timm configurations and entry points."""

from typing import Any

from timm.models import generate_default_cfgs, register_model

from soft_models.variants.build import build_variant
from soft_models.vvt import VicinityVisionTransformer

# Architectures of the official code, arXiv:2206.10552.
# fmt: off
VARIANTS: dict[str, dict[str, Any]] = {
    "vvt_tiny":   {"depths": (2, 2,  2, 2), "mlp_ratios": (8, 8, 4, 4)},
    "vvt_small":  {"depths": (3, 3,  9, 3), "mlp_ratios": (8, 8, 4, 4)},
    "vvt_medium": {"depths": (3, 3, 27, 3), "mlp_ratios": (8, 8, 4, 4)},
    "vvt_large":  {"depths": (4, 4, 36, 4), "mlp_ratios": (4, 4, 4, 4)},
}
# fmt: on


CFG: dict[str, Any] = {
    "input_size": (3, 224, 224),
    "pool_size": (7, 7),
    "crop_pct": 0.875,  # 224 of 256, as the official code evaluates
    "interpolation": "bicubic",
    "first_conv": "patch_embed.proj",
    "classifier": "head",
    "paper_ids": "arXiv:2206.10552",
    "origin_url": "https://github.com/OpenNLPLab/Vicinity-Vision-Transformer",
}

default_cfgs = generate_default_cfgs(dict.fromkeys(VARIANTS, CFG))


def _create_vvt(variant: str, pretrained: bool, **kwargs: Any) -> VicinityVisionTransformer:
    return build_variant(VicinityVisionTransformer, variant, pretrained, VARIANTS[variant], **kwargs)


@register_model
def vvt_tiny(pretrained: bool = False, **kwargs: Any) -> VicinityVisionTransformer:
    """VVT-Tiny: 12.9M parameters, 79.2 % ImageNet-1K top-1 at 224 px as published."""
    return _create_vvt("vvt_tiny", pretrained, **kwargs)


@register_model
def vvt_small(pretrained: bool = False, **kwargs: Any) -> VicinityVisionTransformer:
    """VVT-Small: 25.5M parameters, 82.6 % ImageNet-1K top-1 at 224 px as published."""
    return _create_vvt("vvt_small", pretrained, **kwargs)


@register_model
def vvt_medium(pretrained: bool = False, **kwargs: Any) -> VicinityVisionTransformer:
    """VVT-Medium: 47.9M parameters, 83.8 % ImageNet-1K top-1 at 224 px as published."""
    return _create_vvt("vvt_medium", pretrained, **kwargs)


@register_model
def vvt_large(pretrained: bool = False, **kwargs: Any) -> VicinityVisionTransformer:
    """VVT-Large: 61.8M parameters, 84.1 % ImageNet-1K top-1 at 224 px as published."""
    return _create_vvt("vvt_large", pretrained, **kwargs)
