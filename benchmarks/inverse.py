"""The two inverses of SOFT's landmark kernel: error of result and gradient against float64, and time.

    python -m benchmarks.inverse --output benchmarks/results/inverse.md

Landmarks are 49 points of 32 normal coordinates of the given spread, as stage 3 of SOFT-Tiny has them for 8 images.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from benchmarks.measure import count, heading, in_turns, quartiles, show_table, table_file
from soft_models.attention.soft import add_ridge, gaussian_kernel, soft_inverse_apply

IMAGES, HEADS, LANDMARKS, WIDTH = 8, 10, 49, 32
SPREADS = (0.6, 0.3, 0.1, 0.05)
ROUNDS = 15


def solve(points: Tensor, x: Tensor, inverse: str | None) -> tuple[Tensor, Tensor]:
    """``(A + 0.01 I)^-1 x`` and its gradient with respect to the points; exact without a name."""
    points = points.clone().requires_grad_()
    kernel = gaussian_kernel(points, points)
    y = soft_inverse_apply(kernel, x, HEADS, False, inverse) if inverse else torch.linalg.solve(add_ridge(kernel), x)
    return y.detach(), torch.autograd.grad(y.square().sum(), points)[0]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def measure(spread: float) -> Iterator[str]:
    """Rows of the table, the inverses in turns."""
    points, x = (torch.randn(IMAGES * HEADS, LANDMARKS, WIDTH) * scale for scale in (spread, 1.0))
    kernel = add_ridge(gaussian_kernel(points.double(), points.double()))
    condition, exact = torch.linalg.cond(kernel).median(), solve(points.double(), x.double(), None)
    times = in_turns({inverse: partial(solve, points, x, inverse) for inverse in ("newton", "solve")}, ROUNDS)
    for inverse, values in times.items():
        errors = " | ".join(f"{error(a, b):.0e}" for a, b in zip(solve(points, x, inverse), exact, strict=True))
        yield f"| {spread} | {condition:,.0f} | `{inverse}` | {errors} | {1000 * quartiles(values)[1]:.1f} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inverse", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=count, default=2, help="torch threads")
    parser.add_argument("--output", type=table_file, help="file for the table, in Markdown")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    head = [
        f"`python -m benchmarks.inverse`, {heading(args.threads, 'float32')}",
        "",
        "| spread | condition | inverse | error | error of the gradient | forward and backward, ms |",
        "|---:|---:|---|---:|---:|---:|",
    ]
    show_table(head, chain.from_iterable(map(measure, SPREADS)), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
