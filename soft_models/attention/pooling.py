"""Maps averaged to fewer tokens, by a grid or by cells, also in graphs that leave their size open."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soft_models.attention.tokens import tokens_to_map
from soft_models.graphs import is_open

__all__ = ["MapPool", "check_cell", "check_grid", "pool_map"]


def check_grid(grid: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """A pooling grid as (height, width), or None.

    Raises:
        ValueError: It is no pair, or a side is below 1.
    """
    if grid is None:
        return None
    sides = (grid, grid) if isinstance(grid, int) else tuple(grid)
    if len(sides) != 2 or min(sides) < 1:
        raise ValueError(f"landmark_grid must be a positive number or (height, width) of such, got {grid}")
    return int(sides[0]), int(sides[1])


def check_cell(sr_ratio: int) -> int:
    """``sr_ratio``, the pixels of a cell along each side.

    Raises:
        ValueError: It is below 1.
    """
    if sr_ratio < 1:
        raise ValueError(f"sr_ratio must be at least 1, got {sr_ratio}")
    return sr_ratio


def pool_map(x: Tensor, grid: tuple[int, int] | None, cell: int) -> Tensor:
    """Average-pool ``(B, C, H, W)`` to ``grid``, clipped to the map; without a grid by squares of ``cell`` pixels."""
    H, W = x.shape[-2], x.shape[-1]
    if grid is None:
        return F.avg_pool2d(x, (min(cell, H), min(cell, W)))
    if not torch.jit.is_scripting():  # alone, or TorchScript would compile the body
        if is_open(H) or is_open(W):
            return pool_open_map(x, grid)
    return F.adaptive_avg_pool2d(x, (min(grid[0], H), min(grid[1], W)))


def pool_open_map(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Adaptive average pool of a map whose size an exported graph leaves open, as two matrix products.

    ``F.adaptive_avg_pool2d`` would be exported as the fixed windows that fit the size it was traced with.
    """
    return pool_matrix(x, grid[0], x.shape[-2]) @ x @ pool_matrix(x, grid[1], x.shape[-1]).transpose(0, 1)


def pool_matrix(x: Tensor, cells: Any, size: Any) -> Tensor:
    """``(min(cells, size), size)``: row i averages from ``floor(i size / cells)`` to ``ceil((i + 1) size / cells)``."""
    cells = torch.sym_min(cells, size)
    cell = torch.arange(cells, device=x.device)[:, None]
    place = torch.arange(size, device=x.device)[None]
    inside = (place >= cell * size // cells) & (place < ((cell + 1) * size + cells - 1) // cells)
    weights = inside.to(x.dtype)
    return weights / weights.sum(dim=1, keepdim=True)


class MapPool(nn.Module):
    """Average-pool the pixels among tokens, see :func:`pool_map`; tokens before them stay as they are.

    Shape:
        ``(B, P + H * W, C)`` to ``(B, P + M, C)``.
    """

    def __init__(self, grid: int | tuple[int, int] | None, cell: int) -> None:
        super().__init__()
        self.grid = check_grid(grid)
        self.cell = check_cell(cell)

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        num_prefix = x.shape[1] - feat_size[0] * feat_size[1]
        pooled = pool_map(tokens_to_map(x[:, num_prefix:], feat_size), self.grid, self.cell)
        return torch.cat([x[:, :num_prefix], pooled.flatten(2).transpose(1, 2)], dim=1)
