"""SOFT-Tiny's body with other attentions, the comparison of arXiv:2110.11945: its rows are ``soft_tiny`` and these."""

from typing import Any

from timm.models import generate_default_cfgs, register_model

from soft_models.pyramid import PyramidTransformer
from soft_models.variants.build import build_variant
from soft_models.variants.soft import SOFT_CFG
from soft_models.variants.soft import VARIANTS as SOFT_VARIANTS

OTHERS = ("softmax", "linformer", "performer", "nystromformer", "cosformer", "cosformer2d", "vicinity")
VARIANTS: dict[str, dict[str, Any]] = {
    f"pyramid_tiny_{attention}": SOFT_VARIANTS["soft_tiny"] | {"attention": attention} for attention in OTHERS
}

default_cfgs = generate_default_cfgs(dict.fromkeys(VARIANTS, SOFT_CFG))


def _create_pyramid(variant: str, pretrained: bool, **kwargs: Any) -> PyramidTransformer:
    return build_variant(PyramidTransformer, variant, pretrained, VARIANTS[variant], **kwargs)


@register_model
def pyramid_tiny_softmax(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Tiny's body with exact attention: 79.1 % ImageNet-1K top-1 at 224 px as published."""
    return _create_pyramid("pyramid_tiny_softmax", pretrained, **kwargs)


@register_model
def pyramid_tiny_linformer(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Tiny's body with pooled keys and values: 78.2 % ImageNet-1K top-1 at 224 px as published."""
    return _create_pyramid("pyramid_tiny_linformer", pretrained, **kwargs)


@register_model
def pyramid_tiny_performer(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Tiny's body with random features: 76.1 % ImageNet-1K top-1 at 224 px as published."""
    return _create_pyramid("pyramid_tiny_performer", pretrained, **kwargs)


@register_model
def pyramid_tiny_nystromformer(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Tiny's body with the Nyström approximation: 78.6 % ImageNet-1K top-1 at 224 px as published."""
    return _create_pyramid("pyramid_tiny_nystromformer", pretrained, **kwargs)


@register_model
def pyramid_tiny_cosformer(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Tiny's body with cosFormer attention over the raster order."""
    return _create_pyramid("pyramid_tiny_cosformer", pretrained, **kwargs)


@register_model
def pyramid_tiny_cosformer2d(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Tiny's body with cosFormer attention re-weighted by row and column distance."""
    return _create_pyramid("pyramid_tiny_cosformer2d", pretrained, **kwargs)


@register_model
def pyramid_tiny_vicinity(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Tiny's body with the Vicinity Vision Transformer's attention."""
    return _create_pyramid("pyramid_tiny_vicinity", pretrained, **kwargs)
