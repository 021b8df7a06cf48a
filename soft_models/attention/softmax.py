"""Exact scaled dot-product attention, the quadratic yardstick."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from soft_models.attention.tokens import head_width, merge_heads, split_heads
from soft_models.linear import Linear

__all__ = ["SoftmaxAttention"]


@register_notrace_module
class SoftmaxAttention(nn.Module):
    """Multi-head softmax attention (Vaswani et al. 2017, arXiv:1706.03762).

    Cost O(N^2 C) in time; memory O(N C) where torch has a fused kernel.

    Args:
        dim: Token width C.
        num_heads: Heads h; must divide ``dim``.
        qkv_bias: Bias of the query, key and value projections.
        proj_drop: Dropout rate after the output projection.

    Shape:
        ``(B, N, C)`` in and out; the map size is not used.

    Raises:
        ValueError: ``num_heads`` does not divide ``dim``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        head_width(dim, num_heads)  # refuses what does not divide
        self.num_heads = num_heads
        self.qkv = Linear(dim, 3 * dim, bias=qkv_bias, **dd)
        self.proj = Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = split_heads(q, self.num_heads), split_heads(k, self.num_heads), split_heads(v, self.num_heads)
        x = merge_heads(F.scaled_dot_product_attention(q, k, v))
        return self.proj_drop(self.proj(x))

    @torch.jit.ignore
    def attention_matrix(self, x: Tensor, feat_size: tuple[int, int], rows: Tensor | None = None) -> Tensor:
        """Explicit weights ``(B, h, N, N)``, or the chosen ``rows`` of them; each row sums to 1."""
        q, k, _ = self.qkv(x).chunk(3, dim=-1)
        q, k = split_heads(q, self.num_heads), split_heads(k, self.num_heads)
        if rows is not None:
            q = q[:, :, rows]
        return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1)
