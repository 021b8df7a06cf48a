"""Tokens apart by heads and together again, tokens as maps, and the float32 islands of kernels and sums."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from soft_models.graphs import is_traced

__all__ = [
    "autocast_off",
    "fold_heads",
    "head_width",
    "island_dtype",
    "merge_heads",
    "split_heads",
    "tokens_to_map",
    "unfold_heads",
]


def head_width(dim: int, num_heads: int) -> int:
    """Width d of one head.

    Raises:
        ValueError: ``num_heads`` does not divide ``dim``, or one of them is below 1.
    """
    if num_heads < 1 or dim < 1 or dim % num_heads:
        raise ValueError(f"dim must be divisible by num_heads, got dim={dim}, num_heads={num_heads}")
    return dim // num_heads


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """``(B, N, C)`` to ``(B, h, N, d)``."""
    B, N, C = x.shape
    return x.view(B, N, num_heads, C // num_heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """``(B, h, N, d)`` to ``(B, N, C)``."""
    return x.transpose(1, 2).flatten(2)


def fold_heads(x: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """``(B, N, C)`` to ``(B * h, N, d)``, contiguous and of that dtype."""
    x = split_heads(x, num_heads)
    if x.device.type == "cpu":
        x = x.contiguous()  # by itself: CPUs convert what lies apart number by number
    return x.to(dtype, memory_format=torch.contiguous_format).flatten(0, 1)


def unfold_heads(x: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """``(B * h, N, d)`` to ``(B, N, C)``, contiguous and of that dtype in one pass."""
    x = x.view(-1, num_heads, x.shape[1], x.shape[2])
    return x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format).flatten(2)


def tokens_to_map(x: Tensor, feat_size: tuple[int, int]) -> Tensor:
    """``(B, H * W, C)`` to ``(B, C, H, W)``; of contiguous tokens a view, in channels-last memory."""
    B, _, C = x.shape
    # Not transposed and then reshaped: that gives a batch of one strides which torch does not take for channels-last.
    return x.reshape(B, feat_size[0], feat_size[1], C).permute(0, 3, 1, 2)


def island_dtype(x: Tensor) -> torch.dtype:
    """Type of sums and kernels that half precision cannot hold: float32, of float64 input float64.

    A script or trace cannot switch autocast off, which leaves float64 alone: that of half types in a script, and of all
    in a trace, which may run under autocast later. MPS has no float64.
    """
    if torch.jit.is_scripting():
        wide = x.dtype != torch.float32
    else:
        wide = x.dtype == torch.float64 or is_traced()
    return torch.float64 if wide and x.device.type != "mps" else torch.float32


def autocast_off(x: Tensor) -> AbstractContextManager:
    """Context in which autocast leaves dtypes alone, on the device of ``x``."""
    device = x.device.type
    # Entered only where needed: an exported graph then holds no autocast region.
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
