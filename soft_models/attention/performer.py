"""Performer: softmax attention estimated without bias by positive orthogonal random features (FAVOR+)."""

from typing import Any

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from soft_models.attention.tokens import autocast_off, head_width, island_dtype, merge_heads, split_heads
from soft_models.linear import Linear

__all__ = ["PerformerAttention", "orthogonal_directions", "performer_attention", "positive_features"]

EPS = 1e-6  # added to the features, so that no normaliser vanishes


def orthogonal_directions(num_features: int, dim: int, **dd: Any) -> Tensor:
    """Random directions, orthogonal in blocks of ``dim``, with the lengths of Gaussian vectors.

    Returns:
        ``(num_features, dim)``.
    """
    blocks = [torch.linalg.qr(torch.randn(dim, dim, **dd))[0] for _ in range(-(-num_features // dim))]
    lengths = torch.randn(num_features, dim, **dd).norm(dim=1, keepdim=True)
    return torch.cat(blocks)[:num_features] * lengths


def positive_features(x: Tensor, directions: Tensor, is_query: bool, eps: float = EPS) -> Tensor:
    """Random features whose products estimate ``exp(q . k)``, up to a factor that normalising cancels.

    ``exp(w . x - |x|^2 / 2) / sqrt(R)`` (Choromanski et al. 2021, arXiv:2009.14794), divided by its largest value: over
    the features of one query, over all features of the keys.

    Args:
        x: Queries or keys, ``(B, h, N, d)``, scaled by ``d ** -0.25``.
        directions: w, ``(R, d)``.
        is_query: Which of the two.
        eps: Added to the features.

    Returns:
        ``(B, h, N, R)``.
    """
    exponent = x @ directions.transpose(0, 1) - 0.5 * x.square().sum(dim=-1, keepdim=True)
    largest = exponent.detach().amax(dim=-1, keepdim=True)
    if not is_query:
        largest = largest.amax(dim=-2, keepdim=True)
    return ((exponent - largest).exp() + eps) * directions.shape[0] ** -0.5


def performer_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention of features: ``q (k^T v)``, normalised; O(N R d).

    Args:
        q: Features of the queries, ``(B, h, N, R)``.
        k: Features of the keys, ``(B, h, N, R)``.
        v: Values, ``(B, h, N, d)``.
    """
    return (q @ (k.transpose(-2, -1) @ v)) / (q @ k.sum(dim=-2).unsqueeze(-1))


@register_notrace_module
class PerformerAttention(nn.Module):
    """Performer attention, FAVOR+ (Choromanski et al. 2021, arXiv:2009.14794).

    The directions are drawn once and are part of the checkpoint. Features and sums are computed in float32 whatever
    autocast says; in scripts, traces and float64 as by :class:`SoftAttention`.

    Args:
        dim: Token width C.
        num_heads: Heads h; must divide ``dim``.
        qkv_bias: Bias of the query, key and value projections.
        proj_drop: Dropout rate after the output projection.
        num_features: Random features R per head; None for ``2 d`` of heads of width d.

    Shape:
        ``(B, N, C)`` in and out; the map size is not used.

    Raises:
        ValueError: ``num_heads`` does not divide ``dim``, or ``num_features`` is below 1.
    """

    directions: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        *,
        num_features: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        if num_features is not None and num_features < 1:
            raise ValueError(f"num_features must be at least 1, got {num_features}")
        head_dim = head_width(dim, num_heads)
        self.num_heads = num_heads
        self.scale = head_dim**-0.25  # of queries and keys alike, together d ** -0.5
        self.qkv = Linear(dim, 3 * dim, bias=qkv_bias, **dd)
        self.register_buffer("directions", torch.empty(num_features or 2 * head_dim, head_dim, **dd))
        self.proj = Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the directions anew."""
        if not self.directions.is_meta:
            dd: dict[str, Any] = {"device": self.directions.device, "dtype": torch.float32}  # QR knows no half type
            self.directions.copy_(orthogonal_directions(*self.directions.shape, **dd))

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        qkv = self.project(x)
        if torch.jit.is_scripting():
            out = self.attend(qkv)
        else:
            with autocast_off(x):
                out = self.attend(qkv)
        return self.proj_drop(self.proj(merge_heads(out).to(x.dtype)))

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values side by side, ``(B, N, 3 C)``."""
        qkv = self.qkv(x)
        return qkv.to(island_dtype(qkv))

    def attend(self, qkv: Tensor) -> Tensor:
        q, k = self.features(qkv)
        return performer_attention(q, k, split_heads(qkv.chunk(3, dim=-1)[2], self.num_heads))

    def features(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Features of queries and keys, ``(B, h, N, R)`` each."""
        q, k, _ = (qkv * self.scale).chunk(3, dim=-1)
        directions = self.directions.to(qkv.dtype)
        q, k = split_heads(q, self.num_heads), split_heads(k, self.num_heads)
        return positive_features(q, directions, True), positive_features(k, directions, False)

    @torch.jit.ignore
    def attention_matrix(self, x: Tensor, feat_size: tuple[int, int], rows: Tensor | None = None) -> Tensor:
        """Explicit weights ``(B, h, N, N)``, or the chosen ``rows`` of them; each row sums to 1."""
        qkv = self.project(x)
        with autocast_off(x):
            q, k = self.features(qkv)
            weights = (q if rows is None else q[:, :, rows]) @ k.transpose(-2, -1)
            return weights / weights.sum(dim=-1, keepdim=True)
