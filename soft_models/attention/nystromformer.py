"""Nyströmformer: softmax attention through landmarks, three small softmax matrices in the place of a large one."""

from typing import Any

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from soft_models.attention.pooling import MapPool
from soft_models.attention.tokens import autocast_off, head_width, island_dtype, merge_heads, split_heads
from soft_models.linear import Linear

__all__ = ["NystromformerAttention", "iterative_pinv", "nystrom_attention", "nystrom_factors"]


def iterative_pinv(matrix: Tensor, iters: int = 6) -> Tensor:
    """Moore-Penrose inverse of softmax matrices by the third-order iteration of the Nyströmformer paper.

    ``Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4`` from ``Z = A^T / (|A|_1 |A|_inf)`` (Xiong et al. 2021,
    arXiv:2102.03902). The norms are each matrix's own; the official code takes one maximum over the whole batch, by
    which the result for an image depends on those next to it.

    Args:
        matrix: A, ``(..., M, M)``, non-negative.
        iters: Number of steps.
    """
    eye = torch.eye(matrix.shape[-1], device=matrix.device, dtype=matrix.dtype)
    norms = matrix.sum(dim=-1).amax(dim=-1) * matrix.sum(dim=-2).amax(dim=-1)
    z = matrix.transpose(-2, -1) / norms[..., None, None]
    for _ in range(iters):
        az = matrix @ z
        z = 0.25 * z @ (13.0 * eye - az @ (15.0 * eye - az @ (7.0 * eye - az)))
    return z


def nystrom_factors(q: Tensor, k: Tensor, q_landmarks: Tensor, k_landmarks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three softmax matrices ``(..., N, M)``, ``(..., M, M)``, ``(..., M, N)`` of the Nyström approximation."""
    left = (q @ k_landmarks.transpose(-2, -1)).softmax(dim=-1)
    middle = (q_landmarks @ k_landmarks.transpose(-2, -1)).softmax(dim=-1)
    right = (q_landmarks @ k.transpose(-2, -1)).softmax(dim=-1)
    return left, middle, right


def nystrom_attention(
    q: Tensor, k: Tensor, v: Tensor, q_landmarks: Tensor, k_landmarks: Tensor, iters: int = 6
) -> Tensor:
    """Nyström approximation of softmax attention (Xiong et al. 2021, arXiv:2102.03902), O(N M d + M^3).

    ``softmax(q k~^T) softmax(q~ k~^T)^+ softmax(q~ k^T) v``, equal to softmax attention where the landmarks are all
    tokens.

    Args:
        q: Queries, ``(B, h, N, d)``, scaled by ``d ** -0.5``.
        k: Keys, ``(B, h, N, d)``.
        v: Values, ``(B, h, N, d)``.
        q_landmarks: q~, ``(B, h, M, d)``, scaled likewise.
        k_landmarks: k~, ``(B, h, M, d)``.
        iters: Steps of :func:`iterative_pinv`.

    Returns:
        ``(B, h, N, d)``.
    """
    left, middle, right = nystrom_factors(q, k, q_landmarks, k_landmarks)
    return left @ (iterative_pinv(middle, iters) @ (right @ v))


@register_notrace_module
class NystromformerAttention(nn.Module):
    """Nyströmformer attention (Xiong et al. 2021, arXiv:2102.03902) with 2-D average-pooled landmarks.

    The official code averages windows of the sequence; on a map the windows are 2-D, as in the comparison of the SOFT
    paper (arXiv:2110.11945). Softmax matrices and inverse are computed in float32 whatever autocast says;
    in scripts, traces and float64 as by :class:`SoftAttention`.

    Args:
        dim: Token width C.
        num_heads: Heads h; must divide ``dim``.
        qkv_bias: Bias of the query, key and value projections.
        proj_drop: Dropout rate after the output projection.
        landmark_grid: Landmarks along each side, clipped to the map; None for one per ``sr_ratio`` cell.
        sr_ratio: Pixels per landmark along each side of the map; read where ``landmark_grid`` is None.
        pinv_iters: Steps of the iterative inverse.

    Shape:
        ``(B, N, C)`` in and out. The last ``H * W`` tokens are the pixels, which are pooled; tokens before them are
        landmarks by themselves.

    Raises:
        ValueError: ``num_heads`` does not divide ``dim``, or the grid or ``pinv_iters`` is not positive.
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
        pinv_iters: int = 6,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        if pinv_iters < 1:
            raise ValueError(f"pinv_iters must be at least 1, got {pinv_iters}")
        self.num_heads = num_heads
        self.scale = head_width(dim, num_heads) ** -0.5
        self.pinv_iters = pinv_iters
        self.qkv = Linear(dim, 3 * dim, bias=qkv_bias, **dd)
        self.pool = MapPool(landmark_grid, sr_ratio)
        self.proj = Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        q, k, v = self.project(x)
        if torch.jit.is_scripting():
            out = self.attend(q, k, v, feat_size)
        else:
            with autocast_off(x):
                out = self.attend(q, k, v, feat_size)
        return self.proj_drop(self.proj(merge_heads(out).to(x.dtype)))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ``(B, N, C)`` each."""
        qkv = self.qkv(x)
        q, k, v = qkv.to(island_dtype(qkv)).chunk(3, dim=-1)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, feat_size: tuple[int, int]) -> Tensor:
        q, q_landmarks = self.with_landmarks(q * self.scale, feat_size)
        k, k_landmarks = self.with_landmarks(k, feat_size)
        return nystrom_attention(q, k, split_heads(v, self.num_heads), q_landmarks, k_landmarks, self.pinv_iters)

    def with_landmarks(self, x: Tensor, feat_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Tokens ``(B, N, C)`` and their landmarks, both by heads."""
        return split_heads(x, self.num_heads), split_heads(self.pool(x, feat_size), self.num_heads)

    @torch.jit.ignore
    def attention_matrix(self, x: Tensor, feat_size: tuple[int, int], rows: Tensor | None = None) -> Tensor:
        """Approximate weights ``(B, h, N, N)``, or the chosen ``rows`` of them; they may be negative."""
        q, k, _ = self.project(x)
        with autocast_off(x):
            q, q_landmarks = self.with_landmarks(q * self.scale, feat_size)
            k, k_landmarks = self.with_landmarks(k, feat_size)
            left, middle, right = nystrom_factors(q if rows is None else q[:, :, rows], k, q_landmarks, k_landmarks)
            return left @ (iterative_pinv(middle, self.pinv_iters) @ right)
