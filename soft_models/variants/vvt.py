"""Vicinity Vision Transformer: architectures, timm configurations, official names and entry points."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from timm.models import generate_default_cfgs, register_model
from torch import Tensor

from soft_models.checkpoints.convert import check_fit, free_names, strip_prefixes
from soft_models.checkpoints.files import find_weights
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

# How the official files call what the model holds. Each row is (pattern, replacement): the pattern matches the start of
# an official name, the rest of the name is kept. {stage} is the official stage number less one. A replacement that ends
# in [0], [1], [2] is that part of a tensor which the official code keeps in pieces, put together along the first axis.
_BLOCK = r"block(?P<stage>[1-4])\.(?P<block>\d+)\."
_OURS = "stages.{stage}.blocks.{block}."
RENAMES = [
    (r"patch_embed1\.",                 "patch_embed."),
    (r"patch_embed(?P<stage>[2-4])\.",  "stages.{stage}.downsample."),
    (r"norm(?P<stage>[1-4])\.",         "stages.{stage}.norm."),
    (_BLOCK + r"attn\.q_proj\.",        _OURS + "attn.qkv.[0]"),
    (_BLOCK + r"attn\.k_proj\.",        _OURS + "attn.qkv.[1]"),
    (_BLOCK + r"attn\.v_proj\.",        _OURS + "attn.qkv.[2]"),
    (_BLOCK + r"attn\.out_proj\.",      _OURS + "attn.proj."),
    (_BLOCK + r"attn\.se_fc\.",         _OURS + "attn.gate."),
    (_BLOCK + r"mlp\.dwconv\.dwconv\.", _OURS + "mlp.dwconv."),
    (_BLOCK,                            _OURS),
]
# fmt: on


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "input_size": (3, 224, 224),
        "min_input_size": (3, 32, 32),
        "pool_size": (7, 7),
        "crop_pct": 0.875,  # 224 of 256, as the official code evaluates
        "interpolation": "bicubic",
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        "paper_ids": "arXiv:2206.10552",
        "origin_url": "https://github.com/OpenNLPLab/Vicinity-Vision-Transformer",
        **kwargs,
    }


default_cfgs = generate_default_cfgs({name: _cfg() for name in VARIANTS})


def rename_official(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Official names as ours, the three projections of an attention in one; other names stay as they are."""
    out: dict[str, Tensor] = {}
    pieces: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        for pattern, replacement in RENAMES:
            if match := re.match(pattern, name):
                groups = match.groupdict()
                if "stage" in groups:
                    groups["stage"] = str(int(groups["stage"]) - 1)
                name = replacement.format(**groups) + name[match.end() :]
                break
        if piece := re.search(r"\[(\d)\]", name):
            pieces.setdefault(name.replace(piece[0], ""), {})[piece[1]] = tensor
        else:
            out[name] = tensor
    return out | {name: torch.cat([found[i] for i in sorted(found)]) for name, found in pieces.items()}


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: VicinityVisionTransformer) -> dict[str, Tensor]:
    """Make a checkpoint of the official code or of this model fit ``model``.

    Raises:
        CheckpointError: The weights do not fit, apart from head and input channels.
    """
    weights = rename_official(strip_prefixes(find_weights(state_dict)[1]))
    check_fit(weights, model, free_names(model))
    cfg: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    cfg["num_classes"] = len(weights["head.weight"]) if "head.weight" in weights else -1  # -1 equals none
    return weights


def _create_vvt(variant: str, pretrained: bool = False, **kwargs: Any) -> VicinityVisionTransformer:
    return build_variant(
        VicinityVisionTransformer, variant, pretrained, VARIANTS[variant], filter_fn=checkpoint_filter_fn, **kwargs
    )


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
