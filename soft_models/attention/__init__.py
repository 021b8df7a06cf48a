"""Attention mechanisms by name.

Each is built as ``cls(dim, num_heads, qkv_bias, proj_drop, ...)`` with keywords of its own, is called as
``attn(x, feat_size)`` with ``(B, N, C)`` in and out (prefix tokens first, then the ``H * W`` pixels in row-major order)
and has ``attention_matrix(x, feat_size, rows=None)``, the explicit weights.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from soft_models.attention.cosformer import Cosformer2dAttention, CosformerAttention
from soft_models.attention.linformer import LinformerAttention
from soft_models.attention.nystromformer import NystromformerAttention
from soft_models.attention.performer import PerformerAttention
from soft_models.attention.soft import SoftAttention
from soft_models.attention.softmax import SoftmaxAttention
from soft_models.attention.vicinity import VicinityAttention

__all__ = ["ATTENTIONS", "attention_options", "create_attention"]

ATTENTIONS: dict[str, Callable[..., nn.Module]] = {
    "cosformer": CosformerAttention,
    "cosformer2d": Cosformer2dAttention,
    "linformer": LinformerAttention,
    "nystromformer": NystromformerAttention,
    "performer": PerformerAttention,
    "soft": SoftAttention,
    "soft_norm": partial(SoftAttention, normalize=True),
    "softmax": SoftmaxAttention,
    "vicinity": VicinityAttention,
}


def check_attention(name: str) -> Callable[..., nn.Module]:
    if name not in ATTENTIONS:
        raise ValueError(f"unknown attention {name!r}; choose one of {sorted(ATTENTIONS)}")
    return ATTENTIONS[name]


def attention_options(name: str) -> set[str]:
    """Names of the keywords that the attention ``name`` understands."""
    return set(inspect.signature(check_attention(name)).parameters)


def create_attention(name: str, dim: int, **kwargs: Any) -> nn.Module:
    """Attention ``name`` of width ``dim``.

    Raises:
        ValueError: ``name`` is not in ``ATTENTIONS``.
    """
    return check_attention(name)(dim, **kwargs)
