"""Inverses of SOFT's landmark kernels: the paper's iteration, and the exact one."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from soft_models.graphs import is_exporting

__all__ = [
    "GRADIENT_STEPS",
    "NEWTON_STEPS",
    "add_ridge",
    "halved_scale",
    "newton_schulz_pinv",
    "ridge_scale",
    "solve_spd",
]

# Defaults of the functions below, since TorchScript reads no module constants.
NEWTON_STEPS = 20  # of the paper
RIDGE = 0.01  # added to the diagonal of the landmark kernel by the official code
GRADIENT_STEPS = 2  # steps that carry the gradient of an inverse
# From the start 1.8 A / |A|_1^2 the error of an eigenvalue e is (1 - 1.8 e^2 / |A|_1^2)^(2^steps): with the ridge alone
# as the smallest eigenvalue, 1e-7 after 28 steps with 49 landmarks and after 37 with 1,024.
EXPORT_STEPS = 38
MAX_HALVINGS = 10  # of the Newton start scale in the normalised form, as released


def newton_schulz_pinv(
    matrix: Tensor, scale: Tensor, iters: int = NEWTON_STEPS, gradient_steps: int = GRADIENT_STEPS
) -> Tensor:
    """Inverse of symmetric positive (semi-)definite matrices by Newton-Schulz steps ``X <- 2 X - X A X``.

    The Newton-Raphson iteration of arXiv:2110.11945. All but the last ``gradient_steps`` run
    without gradient: the derivative of the last two is the closed form ``-X dA X``, right to second order as well,
    while one step alone gives wrong second derivatives.

    Args:
        matrix: A, ``(..., M, M)``.
        scale: ``(..., 1, 1)``; the iteration starts at ``scale * A`` and needs ``0 < scale < 2 / lambda_max(A)^2``.
        iters: Number of steps, at least ``gradient_steps``.
        gradient_steps: Steps that carry the gradient.

    Returns:
        ``(..., M, M)``; bounded by ``scale * 2 ** iters * A`` where A is singular.
    """
    shape = matrix.shape
    a = matrix.reshape(-1, shape[-2], shape[-1])
    constant = a.detach()
    x = (scale.detach() * matrix.detach()).reshape(-1, shape[-2], shape[-1])
    for _ in range(iters - gradient_steps):
        x = torch.baddbmm(x, torch.bmm(x, constant), x, beta=2.0, alpha=-1.0)
    for _ in range(gradient_steps):
        x = torch.baddbmm(x, torch.bmm(x, a), x, beta=2.0, alpha=-1.0)
    return x.reshape(shape)


def ridge_scale(kernel: Tensor) -> Tensor:
    """Newton start of plain SOFT: ``0.9 * 2 / |A|_1^2``, ``(..., M, M)`` to ``(..., 1, 1)`` (arXiv:2110.11945)."""
    return 1.8 / kernel.sum(dim=-1).amax(dim=-1)[..., None, None].square()


def halved_scale(kernel: Tensor, max_halvings: int = MAX_HALVINGS) -> Tensor:
    """Newton start of the normalised form, ``(B, h, M, M)`` to ``(B, 1, 1, 1)``.

    ``2 / max^2``, the maximum being over heads and row sums of one sample, then halved until the largest absolute
    column sum of ``I - A X_0`` is at most 1.01, as released. Two differences: batch mates have no part in it, and it
    is halved at least once, because without that the identity matrix would be mapped to zero.
    """
    rows = kernel.sum(dim=-1)  # (B, h, M)
    # Diagonal and row sums of A A say all about |I - scale A A|, as its other entries are not negative.
    diagonal = kernel.square().sum(dim=-1)[:, None]  # (B, 1, h, M)
    off_diagonal = (kernel @ rows[..., None]).squeeze(-1)[:, None] - diagonal
    halvings = torch.arange(1, max_halvings + 1, device=kernel.device)
    candidates = 2.0 / rows.amax(dim=(1, 2))[:, None].square() * torch.pow(0.5, halvings.to(kernel.dtype))  # (B, 10)
    scales = candidates[:, :, None, None]
    residual = ((1.0 - scales * diagonal).abs() + scales * off_diagonal).amax(dim=(2, 3))  # (B, 10)
    # The first that fits, else the last.
    fits = F.pad((residual[:, :-1] <= 1.01).to(torch.int64), (0, 1), value=1.0)
    return candidates.gather(1, fits.argmax(dim=1, keepdim=True))[:, :, None, None]


def add_ridge(kernel: Tensor, ridge: float = RIDGE) -> Tensor:
    return kernel + ridge * torch.eye(kernel.shape[-1], device=kernel.device, dtype=kernel.dtype)


def solve_spd(matrix: Tensor, x: Tensor, gradient_steps: int = GRADIENT_STEPS) -> Tensor:
    """``A^-1 x`` for symmetric positive definite matrices, by a Cholesky factorisation and iterative refinement.

    The factorisation runs without gradient. The derivative of the two steps of refinement, ``-A^-1 dA A^-1 x``, is
    the closed form, right to second order as well.

    Args:
        matrix: A, ``(..., M, M)``.
        x: ``(..., M, d)``.
        gradient_steps: Steps of refinement.

    Returns:
        ``(..., M, d)``; NaN where ``matrix`` has no such factor, or holds NaN or infinity.
    """
    inverse = inverse_spd(matrix.detach())
    y = inverse @ x
    for _ in range(gradient_steps):
        y = y + inverse @ (x - matrix @ y)
    return y


def inverse_spd(matrix: Tensor, iters: int = EXPORT_STEPS) -> Tensor:
    """Inverse of symmetric positive definite matrices ``(..., M, M)``, NaN of others.

    In exported programs, and on devices for which torch may lack the factorisation, by so many Newton steps that
    they have converged for any kernel with its ridge of up to 1,700 landmarks.
    """
    if not torch.jit.is_scripting():
        if is_exporting() or matrix.device.type not in ("cpu", "cuda", "meta"):
            return newton_schulz_pinv(matrix, ridge_scale(matrix), iters)
    factor, info = torch.linalg.cholesky_ex(matrix)
    factor = factor.masked_fill((info != 0)[..., None, None], math.nan)
    # By triangles, since cholesky_inverse goes through a batch one by one on GPUs.
    eye = torch.eye(matrix.shape[-1], device=matrix.device, dtype=matrix.dtype)
    half = torch.linalg.solve_triangular(factor, eye, upper=False)
    return half.transpose(-2, -1) @ half
