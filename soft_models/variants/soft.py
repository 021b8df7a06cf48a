"""SOFT and its normalised form: architectures, timm configurations and entry points."""

from typing import Any

from timm.models import generate_default_cfgs, register_model

from soft_models.pyramid import PyramidTransformer
from soft_models.variants.build import build_variant

# Architecture table of arXiv:2110.11945 (Huge: the official code's). Stages 1 to 3 use SOFT, stage 4 exact attention.
# fmt: off
VARIANTS: dict[str, dict[str, Any]] = {
    "soft_tiny":   {"depths": (1, 2,  3, 2), "embed_dims": (64, 128, 320, 512), "num_heads": (2, 4, 10, 16)},
    "soft_small":  {"depths": (1, 3,  7, 4), "embed_dims": (64, 128, 320, 512), "num_heads": (2, 4, 10, 16)},
    "soft_medium": {"depths": (1, 3, 29, 5), "embed_dims": (64, 128, 288, 512), "num_heads": (2, 4,  9, 16)},
    "soft_large":  {"depths": (1, 3, 40, 5), "embed_dims": (64, 128, 320, 512), "num_heads": (2, 4, 10, 16)},
    "soft_huge":   {"depths": (1, 5, 49, 5), "embed_dims": (64, 128, 352, 512), "num_heads": (2, 4, 11, 16)},
}
# fmt: on
# The official code: landmarks by convolution, their number tied to the image. Its "small" is the table's base.
CONV = {"landmarks": "conv", "landmark_grid": None}
VARIANTS |= {name.replace("soft_", "soft_conv_"): row | CONV for name, row in VARIANTS.items()}
VARIANTS["soft_conv_base"] = VARIANTS["soft_conv_small"] | {"depths": (1, 3, 20, 4)}
VARIANTS |= {name.replace("soft_", "soft_norm_"): row | {"attention": "soft_norm"} for name, row in VARIANTS.items()}


# timm configuration of a model with SOFT's body.
SOFT_CFG: dict[str, Any] = {
    "input_size": (3, 224, 224),
    "pool_size": (7, 7),
    "crop_pct": 0.875,  # 224 of 256, as the paper evaluates
    "interpolation": "bicubic",
    "first_conv": "patch_embed.0.0",
    "classifier": "head",
    "paper_ids": "arXiv:2110.11945",
    "origin_url": "https://github.com/fudan-zvg/SOFT",
}

default_cfgs = generate_default_cfgs(dict.fromkeys(VARIANTS, SOFT_CFG))


def _create_soft(variant: str, pretrained: bool, **kwargs: Any) -> PyramidTransformer:
    return build_variant(PyramidTransformer, variant, pretrained, VARIANTS[variant], **kwargs)


@register_model
def soft_tiny(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Tiny: 13M parameters, 79.3 % ImageNet-1K top-1 at 224 px as published."""
    return _create_soft("soft_tiny", pretrained, **kwargs)


@register_model
def soft_small(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Small: 24M parameters, 82.2 % ImageNet-1K top-1 at 224 px as published.

    The paper's depths 1, 3, 7, 4; the official code's ``soft_small`` is another, unpublished size.
    """
    return _create_soft("soft_small", pretrained, **kwargs)


@register_model
def soft_medium(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Medium: 46M parameters, 82.9 % ImageNet-1K top-1 at 224 px as published."""
    return _create_soft("soft_medium", pretrained, **kwargs)


@register_model
def soft_large(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Large: 64M parameters, 83.1 % ImageNet-1K top-1 at 224 px as published."""
    return _create_soft("soft_large", pretrained, **kwargs)


@register_model
def soft_huge(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Huge: 87M parameters, 83.3 % ImageNet-1K top-1 at 224 px as published."""
    return _create_soft("soft_huge", pretrained, **kwargs)


@register_model
def soft_norm_tiny(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Tiny with symmetric normalisation: 79.4 % ImageNet-1K top-1 at 224 px as published with the code."""
    return _create_soft("soft_norm_tiny", pretrained, **kwargs)


@register_model
def soft_norm_small(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Small with symmetric normalisation: 82.4 % ImageNet-1K top-1 at 224 px as published with the code."""
    return _create_soft("soft_norm_small", pretrained, **kwargs)


@register_model
def soft_norm_medium(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Medium with symmetric normalisation: 83.1 % ImageNet-1K top-1 at 224 px as published with the code."""
    return _create_soft("soft_norm_medium", pretrained, **kwargs)


@register_model
def soft_norm_large(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Large with symmetric normalisation: 83.3 % ImageNet-1K top-1 at 224 px as published with the code."""
    return _create_soft("soft_norm_large", pretrained, **kwargs)


@register_model
def soft_norm_huge(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Huge with symmetric normalisation: 83.4 % ImageNet-1K top-1 at 224 px as published with the code."""
    return _create_soft("soft_norm_huge", pretrained, **kwargs)


@register_model
def soft_conv_tiny(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Tiny in the official code's form; 79.3 % ImageNet-1K top-1 as published."""
    return _create_soft("soft_conv_tiny", pretrained, **kwargs)


@register_model
def soft_conv_small(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Small in the official code's form; 82.2 % ImageNet-1K top-1 as published."""
    return _create_soft("soft_conv_small", pretrained, **kwargs)


@register_model
def soft_conv_base(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """The official code's ``soft_small``, depths 1, 3, 20, 4: not the paper's, and without published top-1."""
    return _create_soft("soft_conv_base", pretrained, **kwargs)


@register_model
def soft_conv_medium(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Medium in the official code's form; 82.9 % ImageNet-1K top-1 as published."""
    return _create_soft("soft_conv_medium", pretrained, **kwargs)


@register_model
def soft_conv_large(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Large in the official code's form; 83.1 % ImageNet-1K top-1 as published."""
    return _create_soft("soft_conv_large", pretrained, **kwargs)


@register_model
def soft_conv_huge(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Huge in the official code's form; 83.3 % ImageNet-1K top-1 as published."""
    return _create_soft("soft_conv_huge", pretrained, **kwargs)


@register_model
def soft_norm_conv_tiny(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Tiny in the official code's normalised form; 79.4 % ImageNet-1K top-1 as published."""
    return _create_soft("soft_norm_conv_tiny", pretrained, **kwargs)


@register_model
def soft_norm_conv_small(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Small in the official code's normalised form; 82.4 % ImageNet-1K top-1 as published."""
    return _create_soft("soft_norm_conv_small", pretrained, **kwargs)


@register_model
def soft_norm_conv_base(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """The official code's normalised ``soft_small``, depths 1, 3, 20, 4, without published top-1."""
    return _create_soft("soft_norm_conv_base", pretrained, **kwargs)


@register_model
def soft_norm_conv_medium(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Medium in the official code's normalised form; 83.1 % ImageNet-1K top-1 as published."""
    return _create_soft("soft_norm_conv_medium", pretrained, **kwargs)


@register_model
def soft_norm_conv_large(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Large in the official code's normalised form; 83.3 % ImageNet-1K top-1 as published."""
    return _create_soft("soft_norm_conv_large", pretrained, **kwargs)


@register_model
def soft_norm_conv_huge(pretrained: bool = False, **kwargs: Any) -> PyramidTransformer:
    """SOFT-Huge in the official code's normalised form; 83.4 % ImageNet-1K top-1 as published."""
    return _create_soft("soft_norm_conv_huge", pretrained, **kwargs)
