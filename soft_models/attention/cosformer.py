"""cosFormer: ReLU features re-weighted by the cosine of the distance, along the raster order or over the 2-D map."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from soft_models.attention.tokens import autocast_off, head_width, island_dtype, merge_heads, split_heads
from soft_models.graphs import is_open
from soft_models.linear import Linear

__all__ = [
    "Cosformer2dAttention",
    "CosformerAttention",
    "cosformer2d_attention",
    "cosformer_attention",
    "map_table",
    "raster_table",
]

EPS = 1e-6  # lower bound of the normaliser, as in the official code
CHUNK = 128  # tokens of one causal chunk, within which the weights are explicit


def cos_sin(positions: Tensor, length: int) -> Tensor:
    """Cosine and sine of the angles ``pi p / (2 length)``, ``(n,)`` to ``(n, 2)``."""
    angles = positions * (0.5 * math.pi / length)
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


def raster_table(n: int, max_len: int, like: Tensor) -> Tensor:
    """Factors of the 1-D re-weighting: ``table @ table.T`` holds ``cos(pi (i - j) / (2 max_len))``.

    Args:
        n: Number of positions.
        max_len: M, in positions; weights are non-negative as long as no two positions are further apart.
        like: Tensor whose device and dtype are taken.

    Returns:
        ``(n, 2)``.
    """
    return cos_sin(torch.arange(n, device=like.device, dtype=like.dtype), max_len)


def map_table(n: int, feat_size: tuple[int, int], like: Tensor) -> Tensor:
    """Factors of the 2-D re-weighting: ``table @ table.T`` holds the cosines of row and column distance, summed.

    The angles are ``pi row / (2 H)`` and ``pi column / (2 W)``. Tokens in front of the ``H * W`` pixels have no place
    on the map and are put at its centre.

    Args:
        n: Number of tokens, at least ``H * W``.
        feat_size: ``(H, W)``.
        like: Tensor whose device and dtype are taken.

    Returns:
        ``(n, 4)``.
    """
    H, W = feat_size[0], feat_size[1]
    rows, columns = raster_table(H, H, like), raster_table(W, W, like)
    table = torch.cat([rows[:, None].expand(H, W, 2), columns[None].expand(H, W, 2)], dim=-1).flatten(0, 1)
    num_prefix = n - H * W
    if num_prefix > 0:
        zero = torch.zeros(1, device=like.device, dtype=like.dtype)
        centre = torch.cat([cos_sin(zero + 0.5 * (H - 1), H), cos_sin(zero + 0.5 * (W - 1), W)], dim=-1)
        table = torch.cat([centre.expand(num_prefix, 4), table])
    return table


def reweight(x: Tensor, table: Tensor) -> Tensor:
    """Every feature times every factor of its position, ``(B, h, N, d)`` and ``(N, r)`` to ``(B, h, N, r * d)``."""
    return (x.unsqueeze(-2) * table.unsqueeze(-1)).flatten(-2)


def normaliser(q: Tensor, k: Tensor, table_q: Tensor, table_k: Tensor) -> Tensor:
    """Sum over the keys of ``q_i . k_j (table_q_i . table_k_j)``, ``(B, h, N, 1)``, in O(N d r)."""
    key_sums = table_k.transpose(0, 1) @ k  # (B, h, r, d)
    return ((q @ key_sums.transpose(-2, -1)) * table_q).sum(dim=-1, keepdim=True)


def reweighted_attention(
    q: Tensor, k: Tensor, v: Tensor, table_q: Tensor, table_k: Tensor, eps: float = EPS, plus: float = 0.0
) -> Tensor:
    """Attention with the weights ``q_i . k_j (table_q_i . table_k_j)``, normalised over j.

    Keys and values are summed first, O(N r d^2) per head. Where there are so few tokens that the weights themselves are
    smaller than the re-weighted features, they are formed instead: the same sums in another order.

    Args:
        q: Non-negative features, ``(B, h, N, d)``, float32 or float64.
        k: Likewise, ``(B, h, N_k, d)``.
        v: ``(B, h, N_k, d_v)``.
        table_q: Factors of the query positions, ``(N, r)``.
        table_k: Factors of the key positions, ``(N_k, r)``.
        eps: Lower bound of the normaliser.
        plus: Added to the normaliser beforehand.

    Returns:
        ``(B, h, N, d_v)``.
    """
    if few_tokens(q.shape[-2], k.shape[-2], q.shape[-1] * table_q.shape[-1]):
        weights = (q @ k.transpose(-2, -1)).mul_(table_q @ table_k.transpose(0, 1))
        return (weights @ v) / (weights.sum(dim=-1, keepdim=True) + plus).clamp(min=eps)
    total = (normaliser(q, k, table_q, table_k) + plus).clamp(min=eps)
    # One factor after the other: features of r times the width would only be written to be read once.
    out = factor_sums(q, k * table_k[:, :1], v) * table_q[:, :1]
    for r in range(1, table_q.shape[1]):
        out = out.addcmul(factor_sums(q, k * table_k[:, r : r + 1], v), table_q[:, r : r + 1])
    return out / total


def factor_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``q (k^T v)``, ``(B, h, N, d)``."""
    return q @ (k.transpose(-2, -1) @ v)


def few_tokens(n: int, n_k: int, width: int) -> bool:
    """Whether the ``n * n_k`` weights take fewer multiplications than features of ``width`` do."""
    if not torch.jit.is_scripting():  # alone, or TorchScript would compile the body
        if is_open(n) or is_open(n_k):  # such a size must not decide anything
            return False
    return 2 * n * n_k < (n + n_k) * width


def causal_linear_attention(q: Tensor, k: Tensor, v: Tensor, eps: float = EPS, chunk: int = CHUNK) -> Tensor:
    """Attention with the weights ``q_i . k_j``, normalised over the keys up to the query's own position.

    Weights within a chunk of tokens are explicit, everything before it enters as one ``D x d`` state. Memory is
    O(N (chunk + d)) and one state per chunk.

    Args:
        q: ``(B, h, N, D)``.
        k: ``(B, h, N, D)``.
        v: ``(B, h, N, d)``.
        eps: Lower bound of the normaliser.
        chunk: Tokens per chunk.

    Returns:
        ``(B, h, N, d)``.
    """
    N = q.shape[-2]
    chunk = min(chunk, N)
    pad = (chunk - N % chunk) % chunk
    shape = (q.shape[0], q.shape[1], (N + pad) // chunk, chunk, -1)
    q = F.pad(q, (0, 0, 0, pad)).reshape(shape)  # (B, h, chunks, chunk, D)
    k = F.pad(k, (0, 0, 0, pad)).reshape(shape)
    v = F.pad(v, (0, 0, 0, pad)).reshape(shape)
    state = (k.transpose(-2, -1) @ v).cumsum(dim=2)  # (B, h, chunks, D, d)
    state = F.pad(state[:, :, :-1], (0, 0, 0, 0, 1, 0))
    key_sum = F.pad(k.sum(dim=-2).cumsum(dim=2)[:, :, :-1], (0, 0, 1, 0))  # (B, h, chunks, D)
    weights = (q @ k.transpose(-2, -1)).tril()  # (B, h, chunks, chunk, chunk)
    normaliser = weights.sum(dim=-1, keepdim=True) + (q * key_sum.unsqueeze(-2)).sum(dim=-1, keepdim=True)
    out = (weights @ v + q @ state) / normaliser.clamp(min=eps)
    return out.flatten(2, 3)[:, :, :N]


def cosformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    max_len: int | None = None,
) -> Tensor:
    """cosFormer attention over a sequence (Qin et al. 2022, arXiv:2202.08791).

    The weight of key j for query i is::

        w_ij = relu(q_i) . relu(k_j) cos(pi (i - j) / (2 M))      M >= number of positions

    normalised over j. ``cos(a - b) = cos a cos b + sin a sin b`` splits it into features of twice the width, so that
    keys and values can be summed first: O(N d^2) per head, nothing N x N.

    Args:
        q: Queries, ``(B, h, N, d)``, any floating dtype; half types are computed in float32.
        k: Keys, ``(B, h, N_k, d)``; ``N_k`` may differ from ``N`` unless ``causal``.
        v: Values, ``(B, h, N_k, d_v)``.
        causal: Each query sees the keys up to its own position only.
        key_padding_mask: ``(B, N_k)``, True for keys to leave out.
        max_len: M. None for the longer of the two lengths, as released; the weights of old positions then change as a
            sequence grows, which a fixed M avoids.

    Returns:
        ``(B, h, N, d_v)`` in the dtype of ``v``.

    Raises:
        ValueError: ``causal`` with two lengths, or a sequence longer than ``max_len``.
    """
    return attend_raster(features(q), features(k), dense(v), causal, key_padding_mask, max_len).to(v.dtype)


def attend_raster(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    key_padding_mask: Tensor | None,
    max_len: int | None,
) -> Tensor:
    """:func:`cosformer_attention` of features and values that are in their final precision."""
    N, N_k = q.shape[-2], k.shape[-2]
    if causal and N != N_k:
        raise ValueError(f"causal attention needs as many queries as keys, got {N} and {N_k}")
    length = angle_length(max(N, N_k), max_len)
    if key_padding_mask is not None:
        k = k.masked_fill(key_padding_mask[:, None, :, None], 0.0)
        v = v.masked_fill(key_padding_mask[:, None, :, None], 0.0)
    table_q, table_k = raster_table(N, length, q), raster_table(N_k, length, k)
    if causal:
        return causal_linear_attention(reweight(q, table_q), reweight(k, table_k), v)
    return reweighted_attention(q, k, v, table_q, table_k)


def angle_length(n: int, max_len: int | None) -> int:
    """M for the longer sequence's length.

    Raises:
        ValueError: It is longer than ``max_len``.
    """
    if max_len is None:
        return n
    if n > max_len:
        raise ValueError(f"a sequence must not be longer than max_len, got {n} tokens and max_len={max_len}")
    return max_len


def cosformer2d_attention(q: Tensor, k: Tensor, v: Tensor, feat_size: tuple[int, int]) -> Tensor:
    """cosFormer attention over a map: the cosines of row and column distance, summed.

    The weight of key j for query i is::

        w_ij = relu(q_i) . relu(k_j) [cos(pi (r_i - r_j) / (2 H)) + cos(pi (c_i - c_j) / (2 W))]

    normalised over j, the sum form of the vicinity weights of Sun et al. 2022, arXiv:2206.10552, with cosFormer's
    normaliser. The features are four times as wide; O(N d^2) per head.

    Args:
        q: Queries, ``(B, h, N, d)``, any floating dtype; half types are computed in float32. The last ``H * W`` tokens
            are the pixels, row by row; any before them are placed at the map's centre.
        k: Keys, ``(B, h, N, d)``.
        v: Values, ``(B, h, N, d_v)``.
        feat_size: ``(H, W)``.

    Returns:
        ``(B, h, N, d_v)`` in the dtype of ``v``.
    """
    return attend_map(features(q), features(k), dense(v), feat_size).to(v.dtype)


def attend_map(q: Tensor, k: Tensor, v: Tensor, feat_size: tuple[int, int]) -> Tensor:
    """:func:`cosformer2d_attention` of features and values that are in their final precision."""
    table = map_table(q.shape[-2], feat_size, q)
    return reweighted_attention(q, k, v, table, table)


def dense(x: Tensor) -> Tensor:
    """A contiguous copy of ``island_dtype``: what the batched products would make of it anyway."""
    return x.to(island_dtype(x), copy=True, memory_format=torch.contiguous_format)


def features(x: Tensor) -> Tensor:
    return F.relu(dense(x), inplace=True)


def project_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features of queries and keys, and values, each ``(B, h, N, d)``, from a joint projection ``(B, N, 3 h d)``.

    A function of its own so that the projection is freed on return: the allocations behind it then reuse its memory.
    """
    q, k, v = qkv.chunk(3, dim=-1)
    return features(split_heads(q, num_heads)), features(split_heads(k, num_heads)), dense(split_heads(v, num_heads))


def explicit_weights(q: Tensor, k: Tensor, table: Tensor, rows: Tensor | None, causal: bool = False) -> Tensor:
    """Weights ``(B, h, N, N)`` before they are normalised, or the chosen ``rows`` of them, from features."""
    table_q = table
    index = torch.arange(q.shape[-2], device=q.device)
    if rows is not None:
        q, table_q, index = q[:, :, rows], table[rows], index[rows]
    weights = (q @ k.transpose(-2, -1)) * (table_q @ table.transpose(0, 1))
    if causal:
        weights = weights.masked_fill(torch.arange(k.shape[-2], device=k.device) > index[:, None], 0.0)
    return weights


def normalized_rows(weights: Tensor) -> Tensor:
    """``weights`` over the sums of their rows, as :func:`reweighted_attention` normalises."""
    return weights / weights.sum(dim=-1, keepdim=True).clamp(min=EPS)


@register_notrace_module
class CosformerAttention(nn.Module):
    """cosFormer attention over the raster order (Qin et al. 2022, arXiv:2202.08791), see :func:`cosformer_attention`.

    Cost O(N C d) for heads of width d. Key sums, normaliser and angles are in float32 whatever autocast says; in
    scripts, traces and float64 as by :class:`SoftAttention`. As in the official code there is no ``1 / sqrt(d)``, and
    the normaliser is at least 1e-6.

    Args:
        dim: Token width C.
        num_heads: Heads h; must divide ``dim``.
        qkv_bias: Bias of the query, key and value projections.
        proj_drop: Dropout rate after the output projection.
        causal: Each token sees itself and the tokens before it only.
        max_len: M, in tokens; None for the length of the input.

    Shape:
        ``(B, N, C)`` in and out; the map size is not used.

    Raises:
        ValueError: ``num_heads`` does not divide ``dim``, or ``max_len`` is below 1 or below the length of an input.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        *,
        causal: bool = False,
        max_len: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        head_width(dim, num_heads)  # refuses what does not divide
        if max_len is not None and max_len < 1:
            raise ValueError(f"max_len must be at least 1, got {max_len}")
        self.num_heads = num_heads
        self.causal = causal
        self.max_len = max_len
        self.qkv = Linear(dim, 3 * dim, bias=qkv_bias, **dd)
        self.proj = Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, feat_size: tuple[int, int], key_padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = project_heads(self.qkv(x), self.num_heads)
        if torch.jit.is_scripting():
            out = attend_raster(q, k, v, self.causal, key_padding_mask, self.max_len)
        else:
            with autocast_off(x):
                out = attend_raster(q, k, v, self.causal, key_padding_mask, self.max_len)
        return self.proj_drop(self.proj(merge_heads(out).to(x.dtype)))

    @torch.jit.ignore
    def attention_matrix(self, x: Tensor, feat_size: tuple[int, int], rows: Tensor | None = None) -> Tensor:
        """Explicit weights ``(B, h, N, N)``, or the chosen ``rows`` of them; each row sums to 1 or, unused, to 0."""
        q, k, _ = project_heads(self.qkv(x), self.num_heads)
        N = x.shape[1]
        with autocast_off(x):
            table = raster_table(N, angle_length(N, self.max_len), q)
            return normalized_rows(explicit_weights(q, k, table, rows, self.causal))


@register_notrace_module
class Cosformer2dAttention(nn.Module):
    """cosFormer attention with the row and column cosines summed, see :func:`cosformer2d_attention`.

    The ReLU features and the normaliser are cosFormer's (Qin et al. 2022, arXiv:2202.08791), the re-weighting is that
    of Sun et al. 2022, arXiv:2206.10552: neighbours in a column are as near as neighbours in a row, while the raster
    order puts them W tokens apart. Cost O(N C d) for heads of width d. Precision as in :class:`CosformerAttention`.

    Args:
        dim: Token width C.
        num_heads: Heads h; must divide ``dim``.
        qkv_bias: Bias of the query, key and value projections.
        proj_drop: Dropout rate after the output projection.

    Shape:
        ``(B, N, C)`` in and out. The last ``H * W`` tokens are the pixels; any before them sit at the map's centre.

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
        q, k, v = project_heads(self.qkv(x), self.num_heads)
        if torch.jit.is_scripting():
            out = attend_map(q, k, v, feat_size)
        else:
            with autocast_off(x):
                out = attend_map(q, k, v, feat_size)
        return self.proj_drop(self.proj(merge_heads(out).to(x.dtype)))

    @torch.jit.ignore
    def attention_matrix(self, x: Tensor, feat_size: tuple[int, int], rows: Tensor | None = None) -> Tensor:
        """Explicit weights ``(B, h, N, N)``, or the chosen ``rows`` of them; each row sums to 1 or, unused, to 0."""
        q, k, _ = project_heads(self.qkv(x), self.num_heads)
        with autocast_off(x):
            return normalized_rows(explicit_weights(q, k, map_table(x.shape[1], feat_size, q), rows))
