"""Linformer as used on images: keys and values average-pooled to a small grid, softmax over it."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from soft_models.attention.pooling import MapPool
from soft_models.attention.tokens import head_width, merge_heads, split_heads
from soft_models.linear import Linear

__all__ = ["LinformerAttention"]


@register_notrace_module
class LinformerAttention(nn.Module):
    """Softmax attention over M pooled keys and values (Wang et al. 2020, arXiv:2006.04768).

    Linformer's learned ``M x N`` projections are bound to one N. The comparison of the SOFT paper (arXiv:2110.11945)
    puts a spatial reduction in their place, here a 2-D average pool, which has no parameters and takes any map.
    Cost O(N M C).

    Args:
        dim: Token width C.
        num_heads: Heads h; must divide ``dim``.
        qkv_bias: Bias of the query, key and value projections.
        proj_drop: Dropout rate after the output projection.
        landmark_grid: Pooled keys along each side, clipped to the map; None for one per ``sr_ratio`` cell.
        sr_ratio: Pixels per pooled key along each side of the map; read where ``landmark_grid`` is None.

    Shape:
        ``(B, N, C)`` in and out. The last ``H * W`` tokens are the pixels, which are pooled; tokens before them are
        keys by themselves.

    Raises:
        ValueError: ``num_heads`` does not divide ``dim``, or the grid is not positive.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        *,
        landmark_grid: int | tuple[int, int] | None = 7,
        sr_ratio: int = 8,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        head_width(dim, num_heads)  # refuses what does not divide
        self.num_heads = num_heads
        self.q = Linear(dim, dim, bias=qkv_bias, **dd)
        self.pool = MapPool(landmark_grid, sr_ratio)
        self.kv = Linear(dim, 2 * dim, bias=qkv_bias, **dd)
        self.proj = Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        q = split_heads(self.q(x), self.num_heads)
        k, v = self.kv(self.pool(x, feat_size)).chunk(2, dim=-1)  # pooled first: the projection commutes with a mean
        k, v = split_heads(k, self.num_heads), split_heads(v, self.num_heads)  # (B, h, M, d)
        return self.proj_drop(self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v))))

    @torch.jit.ignore
    def attention_matrix(self, x: Tensor, feat_size: tuple[int, int], rows: Tensor | None = None) -> Tensor:
        """Weights of the tokens' own values, ``(B, h, N, N)`` or the chosen ``rows`` of them; each row sums to 1.

        A pooled key's weight is shared out to the tokens in its pool.
        """
        q = split_heads(self.q(x), self.num_heads)
        if rows is not None:
            q = q[:, :, rows]
        k, _ = self.kv(self.pool(x, feat_size)).chunk(2, dim=-1)
        weights = (q @ split_heads(k, self.num_heads).transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1)
        B, h, P, M = weights.shape
        # Pooling is a matrix, and the adjoint of what it does to tokens multiplies by it from the right.
        tokens = torch.zeros(1, x.shape[1], B * h * P, device=x.device, dtype=weights.dtype)
        pull_back: Any = torch.func.vjp(lambda tokens: self.pool(tokens, feat_size), tokens)[1]
        (shared,) = pull_back(weights.reshape(1, B * h * P, M).transpose(1, 2))
        return shared.transpose(1, 2).reshape(B, h, P, -1)
