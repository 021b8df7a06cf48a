"""Each formula as loops or N x N matrices, written from the papers, without regard to speed."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# cosFormer and vicinity attention, tokens first: (N, d) for one head, written from the papers' definitions.


def cosine(distance: float, length: int) -> float:
    return math.cos(math.pi * distance / (2 * length))


def naive_cosformer(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, max_len: int | None = None) -> Tensor:
    """cosFormer attention of one head, every weight by itself: ``(N, d)``, ``(N_k, d)``, ``(N_k, d_v)``."""
    length = max(len(q), len(k)) if max_len is None else max_len
    q, k = q.clamp(min=0), k.clamp(min=0)
    factors = torch.tensor([[cosine(i - j, length) for j in range(len(k))] for i in range(len(q))], dtype=q.dtype)
    weights = (q @ k.T) * factors
    if causal:
        weights = weights * torch.ones_like(weights).tril()
    return weights @ v / weights.sum(dim=1, keepdim=True).clamp(min=1e-6)


def vicinity_factors(feat_size: tuple[int, int], dtype: torch.dtype, num_prefix: int = 0) -> Tensor:
    """Sum of row and column cosines for every pair of tokens, prefix tokens at the centre of the map."""
    height, width = feat_size
    places = [((height - 1) / 2, (width - 1) / 2)] * num_prefix
    places += [(float(row), float(column)) for row in range(height) for column in range(width)]
    return torch.tensor(
        [[cosine(r - s, height) + cosine(c - t, width) for s, t in places] for r, c in places], dtype=dtype
    )


def naive_cosformer2d(q: Tensor, k: Tensor, v: Tensor, feat_size: tuple[int, int]) -> Tensor:
    """cosFormer attention with 2-D re-weighting, one head."""
    factors = vicinity_factors(feat_size, q.dtype, len(q) - feat_size[0] * feat_size[1])
    weights = (q.clamp(min=0) @ k.clamp(min=0).T) * factors
    return weights @ v / weights.sum(dim=1, keepdim=True).clamp(min=1e-6)


def naive_vicinity(q: Tensor, k: Tensor, v: Tensor, feat_size: tuple[int, int], clamp: bool) -> Tensor:
    """Vicinity attention of one head; the released clamps need the key-value product, so that is explicit too."""
    q, k = q.clamp(min=0), k.clamp(min=0)
    if not clamp:
        weights = (q @ k.T) * vicinity_factors(feat_size, q.dtype, len(q) - feat_size[0] * feat_size[1])
        return weights @ v / (weights.sum(dim=1, keepdim=True) + 1e-4)
    height, width = feat_size
    wide_q, wide_k = [], []
    for i, (row, column) in enumerate((r, c) for r in range(height) for c in range(width)):
        angles = (math.pi * row / (2 * height), math.pi * column / (2 * width))
        factors = [f(angle) for angle in angles for f in (math.cos, math.sin)]
        wide_q.append(torch.cat([q[i] * f for f in factors]))
        wide_k.append(torch.cat([k[i] * f for f in factors]))
    wide_q, wide_k = torch.stack(wide_q), torch.stack(wide_k)
    product = naive_clamp(sum(torch.outer(a, b) for a, b in zip(wide_k, v, strict=True)))
    rows = []
    for query in wide_q:
        inverse = naive_clamp(1 / (query @ wide_k.sum(dim=0) + 1e-4))
        rows.append(naive_clamp(naive_clamp(query @ product) * inverse))
    return torch.stack(rows)


def per_head(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
    """A function of one head over batch and heads, ``(B, h, N, d)``."""
    return torch.stack(
        [torch.stack([function(q[b, i], k[b, i], v[b, i], *args) for i in range(q.shape[1])]) for b in range(len(q))]
    )


def naive_clamp(x: Tensor) -> Tensor:
    """Magnitude between 1e-4 and 1e4, zeros untouched."""
    limited = x.abs().clamp(1e-4, 1e4)
    return torch.where(x > 0, limited, torch.where(x < 0, -limited, x))


# SOFT attention, one head: (N, d) queries that are keys too, written from the paper and the released code.


def naive_gaussian(q: Tensor, k: Tensor) -> Tensor:
    """``exp(-|q_i - k_j|^2 / 2)``, every entry by itself."""
    return torch.stack([torch.stack([torch.exp(-((a - b) ** 2).sum() / 2) for b in k]) for a in q])


def naive_soft(q: Tensor, v: Tensor, landmarks: Tensor, normalize: bool = False, ridge: float = 0.0) -> Tensor:
    """The N x N attention ``P^T A^-1 P`` times the values, with the exact inverse of ``A + ridge I``."""
    p, a = naive_gaussian(landmarks, q), naive_gaussian(landmarks, landmarks)
    inverse = torch.linalg.inv(a + ridge * torch.eye(len(a), dtype=a.dtype))
    if normalize:
        degrees = torch.diag(a.sum(dim=1) ** -0.5)
        inverse = degrees @ inverse @ degrees
    return (p.T @ inverse @ p) @ v


def naive_average_pool(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """``(H, W, C)`` averaged over ``grid`` windows that cover the map, from floor to ceil."""
    height, width, _ = x.shape
    rows = [(i * height // grid[0], -(-(i + 1) * height // grid[0])) for i in range(grid[0])]
    columns = [(j * width // grid[1], -(-(j + 1) * width // grid[1])) for j in range(grid[1])]
    return torch.stack([torch.stack([x[a:b, c:d].mean(dim=(0, 1)) for c, d in columns]) for a, b in rows])


def naive_released_newton(a: Tensor) -> Tensor:
    """The released inverse of the normalised form for one sample ``(h, M, M)``, its halving loop included."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype)
    alpha = 2 / a.sum(dim=-1).max() ** 2
    for _ in range(10):
        if (eye - a @ (alpha * a)).abs().sum(dim=-2).max() <= 1.01:
            break
        alpha = alpha / 2
    x = alpha * a
    for _ in range(20):
        x = 2 * x - x @ a @ x
    return x
