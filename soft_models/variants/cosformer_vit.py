"""cosFormer-ViT, plain vision transformers with cosFormer attention: architectures, configurations, entry points."""

from functools import partial
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import generate_default_cfgs, register_model

from soft_models.checkpoints.vit import source_name, vit_filter_fn
from soft_models.variants.build import build_variant
from soft_models.vit import MapVisionTransformer

# Widths, depths and heads of DeiT's table, arXiv:2012.12877, so that timm's checkpoints of the same size fit.
# fmt: off
VARIANTS: dict[str, dict[str, Any]] = {
    "cosformer_vit_tiny_patch16_224":  {"embed_dim": 192, "depth": 12, "num_heads":  3},
    "cosformer_vit_small_patch16_224": {"embed_dim": 384, "depth": 12, "num_heads":  6},
    "cosformer_vit_base_patch16_224":  {"embed_dim": 768, "depth": 12, "num_heads": 12},
}
# fmt: on
VARIANTS |= {
    name.replace("cosformer_", "cosformer2d_"): row | {"attention": "cosformer2d"} for name, row in VARIANTS.items()
}


CFG: dict[str, Any] = {
    "input_size": (3, 224, 224),
    "min_input_size": (3, 32, 32),
    "pool_size": None,
    "crop_pct": 0.9,
    "interpolation": "bicubic",
    "mean": IMAGENET_DEFAULT_MEAN,
    "std": IMAGENET_DEFAULT_STD,
    "first_conv": "patch_embed.proj",
    "classifier": "head",
    "paper_ids": "arXiv:2202.08791",
    "origin_url": "https://github.com/OpenNLPLab/cosFormer",
}

default_cfgs = generate_default_cfgs(dict.fromkeys(VARIANTS, CFG))


def _create_cosformer_vit(variant: str, pretrained: bool = False, **kwargs: Any) -> MapVisionTransformer:
    return build_variant(
        MapVisionTransformer,
        variant,
        pretrained,
        VARIANTS[variant],
        filter_for=lambda overlay: partial(vit_filter_fn, source=source_name(overlay), chosen=frozenset(overlay)),
        **({"out_indices": 3} | kwargs),
    )


@register_model
def cosformer_vit_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> MapVisionTransformer:
    """ViT-Tiny/16 with cosFormer attention over the raster order: 5.7M parameters."""
    return _create_cosformer_vit("cosformer_vit_tiny_patch16_224", pretrained, **kwargs)


@register_model
def cosformer_vit_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> MapVisionTransformer:
    """ViT-Small/16 with cosFormer attention over the raster order: 22M parameters."""
    return _create_cosformer_vit("cosformer_vit_small_patch16_224", pretrained, **kwargs)


@register_model
def cosformer_vit_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> MapVisionTransformer:
    """ViT-Base/16 with cosFormer attention over the raster order: 87M parameters."""
    return _create_cosformer_vit("cosformer_vit_base_patch16_224", pretrained, **kwargs)


@register_model
def cosformer2d_vit_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> MapVisionTransformer:
    """ViT-Tiny/16 with cosFormer attention re-weighted by row and column distance: 5.7M parameters."""
    return _create_cosformer_vit("cosformer2d_vit_tiny_patch16_224", pretrained, **kwargs)


@register_model
def cosformer2d_vit_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> MapVisionTransformer:
    """ViT-Small/16 with cosFormer attention re-weighted by row and column distance: 22M parameters."""
    return _create_cosformer_vit("cosformer2d_vit_small_patch16_224", pretrained, **kwargs)


@register_model
def cosformer2d_vit_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> MapVisionTransformer:
    """ViT-Base/16 with cosFormer attention re-weighted by row and column distance: 87M parameters."""
    return _create_cosformer_vit("cosformer2d_vit_base_patch16_224", pretrained, **kwargs)
