"""Vicinity attention (VVT): 2-D vicinity weights with feature reduction and a gated residual."""

from typing import Any

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from soft_models.attention.cosformer import (
    dense,
    explicit_weights,
    features,
    map_table,
    normaliser,
    project_heads,
    reweight,
    reweighted_attention,
)
from soft_models.attention.tokens import autocast_off, merge_heads
from soft_models.linear import Linear

__all__ = ["VicinityAttention", "clamp_magnitude", "vicinity_attention"]

EPS = 1e-4  # added to the normaliser, as released
MIN_MAGNITUDE, MAX_MAGNITUDE = 1e-4, 1e4  # of the released clamps


def clamp_magnitude(x: Tensor, low: float = MIN_MAGNITUDE, high: float = MAX_MAGNITUDE) -> Tensor:
    """Magnitude limited to [low, high], sign and exact zeros kept; no gradient where the limit is active."""
    return x.abs().clamp_(low, high).mul_(x.detach().sign())


def vicinity_attention(q: Tensor, k: Tensor, v: Tensor, feat_size: tuple[int, int], clamp: bool = True) -> Tensor:
    """Vicinity attention (Sun et al. 2022, arXiv:2206.10552), linear in the number of tokens.

    The weight of key j for query i is::

        w_ij = relu(q_i) . relu(k_j) [cos(pi (r_i - r_j) / (2 H)) + cos(pi (c_i - c_j) / (2 W))]

    divided by its sum over j plus 1e-4. The official code limits the magnitude of the key-value product, of the
    inverse normaliser, of the output before and of the output behind the normaliser. These limits are part of the
    released models: they bind at ordinary activations, and the more so the more tokens there are.

    Args:
        q: Queries, ``(B, h, N, d)``, any floating dtype; half types are computed in float32. The last ``H * W`` tokens
            are the pixels, row by row; any before them are placed at the map's centre.
        k: Keys, ``(B, h, N, d)``.
        v: Values, ``(B, h, N, d)``.
        feat_size: ``(H, W)``.
        clamp: Apply the four limits.

    Returns:
        ``(B, h, N, d)`` in the dtype of ``v``.
    """
    return attend_vicinity(features(q), features(k), dense(v), feat_size, clamp).to(v.dtype)


def attend_vicinity(
    q: Tensor, k: Tensor, v: Tensor, feat_size: tuple[int, int], clamp: bool, eps: float = EPS
) -> Tensor:
    """:func:`vicinity_attention` of features and values that are in their final precision."""
    table = map_table(q.shape[-2], feat_size, q)
    if not clamp:
        return reweighted_attention(q, k, v, table, table, plus=eps)
    total = normaliser(q, k, table, table) + eps
    state = clamp_magnitude(reweight(k, table).transpose(-2, -1) @ v)  # (B, h, 4 d, d)
    out = clamp_magnitude(reweight(q, table) @ state)
    return clamp_magnitude(out * clamp_magnitude(1.0 / total))


@register_notrace_module
class VicinityAttention(nn.Module):
    """Vicinity attention with feature reduction and feature preserving connection (Sun et al. 2022, arXiv:2206.10552).

    Queries, keys and values have ``dim / feature_reduction`` channels; the output projection goes back to ``dim``. A
    squeeze-and-excitation gate, computed from the mean of the input tokens, adds a gated copy of the output to it.
    Cost O(N C d) for heads of (reduced) width d. Key sums and normaliser are in float32 whatever autocast says; in
    scripts, traces and float64 as by :class:`SoftAttention`.

    Args:
        dim: Token width C.
        num_heads: Heads h; must divide the reduced width.
        qkv_bias: Bias of the query, key and value projections.
        proj_drop: Dropout rate after the output.
        feature_reduction: ``dim`` over the width of queries, keys and values.
        gate_reduction: ``dim`` over the hidden width of the gate.
        clamp: The released operator, which limits six intermediate results to magnitudes in [1e-4, 1e4]; False for the
            plain one.

    Shape:
        ``(B, N, C)`` in and out. The last ``H * W`` tokens are the pixels; any before them sit at the map's centre.

    Raises:
        ValueError: A reduction does not divide ``dim``, or ``num_heads`` does not divide the reduced width.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        *,
        feature_reduction: int = 2,
        gate_reduction: int = 1,
        clamp: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        if feature_reduction < 1 or num_heads < 1 or dim % (feature_reduction * num_heads):
            raise ValueError(
                "dim must be divisible by feature_reduction * num_heads, "
                f"got dim={dim}, feature_reduction={feature_reduction}, num_heads={num_heads}"
            )
        if gate_reduction < 1 or dim % gate_reduction:
            raise ValueError(f"dim must be divisible by gate_reduction, got dim={dim}, gate_reduction={gate_reduction}")
        self.num_heads = num_heads
        self.clamp = clamp
        self.max_magnitude = MAX_MAGNITUDE  # TorchScript reads no module globals
        self.qkv = Linear(dim, 3 * (dim // feature_reduction), bias=qkv_bias, **dd)
        self.proj = Linear(dim // feature_reduction, dim, **dd)
        self.gate = nn.Sequential(
            nn.Linear(dim, dim // gate_reduction, bias=False, **dd),
            nn.ReLU(inplace=True),
            nn.Linear(dim // gate_reduction, dim, bias=False, **dd),
            nn.Sigmoid(),
        )
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        q, k, v = project_heads(self.qkv(x), self.num_heads)
        if torch.jit.is_scripting():
            out = attend_vicinity(q, k, v, feat_size, self.clamp)
        else:
            with autocast_off(x):
                out = attend_vicinity(q, k, v, feat_size, self.clamp)
        out = self.proj(merge_heads(out).to(x.dtype))
        gate = self.gate(x.mean(dim=1, keepdim=True))  # (B, 1, C)
        if self.clamp:
            # The gate only adds, so that of the limits behind it the lower one is met already.
            out = (clamp_magnitude(out) * (1.0 + gate)).clamp(-self.max_magnitude, self.max_magnitude)
        else:
            out = out * (1.0 + gate)
        return self.proj_drop(out)

    @torch.jit.ignore
    def attention_matrix(self, x: Tensor, feat_size: tuple[int, int], rows: Tensor | None = None) -> Tensor:
        """Explicit weights ``(B, h, N, N)``, or the chosen ``rows`` of them, without the limits of ``clamp``."""
        q, k, _ = project_heads(self.qkv(x), self.num_heads)
        with autocast_off(x):
            weights = explicit_weights(q, k, map_table(x.shape[1], feat_size, q), rows)
            return weights / (weights.sum(dim=-1, keepdim=True) + EPS)
