"""Checkpoints into our models."""

from typing import Any

from timm.layers import resample_abs_pos_embed_nhwc
from torch import Tensor, nn

__all__ = ["checkpoint_filter_fn"]


def checkpoint_filter_fn(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Make a state dict of any image size fit ``model``: its position tables are resized to the model's grids."""
    own = model.state_dict()
    return {
        k: resample_abs_pos_embed_nhwc(v, list(own[k].shape[1:3]), "bilinear", antialias=False)
        if k.endswith("pos_embed") and k in own
        else v
        for k, v in state_dict.items()
    }
