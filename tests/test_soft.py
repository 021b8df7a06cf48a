"""SOFT: the pure functions against their explicit N x N form, and the module's own options."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from naive import naive_average_pool, naive_gaussian, naive_released_newton, naive_soft
from small_models import assert_equal_with_gradients, relative_error
from torch import Tensor
from torch.testing import assert_close

from soft_models.attention import inverse, soft
from soft_models.attention.inverse import add_ridge, halved_scale, newton_schulz_pinv, ridge_scale, solve_spd
from soft_models.attention.soft import Landmarks, SoftAttention, gaussian_kernel, soft_attention, soft_inverse_apply

EYE = torch.eye(49)


def kernel_of(spread: float, batch: int = 1, heads: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian kernels of 49 points in 32 dimensions, ``(B, h, 49, 49)``: wide spread, well-conditioned."""
    points = torch.randn(batch, heads, 49, 32, dtype=torch.float64) * spread
    return gaussian_kernel(points, points).to(dtype)


def plain_inverse(kernel: Tensor) -> Tensor:
    return newton_schulz_pinv(add_ridge(kernel), ridge_scale(kernel))


def released_inverse(kernel: Tensor) -> Tensor:
    return newton_schulz_pinv(kernel, halved_scale(kernel))


def test_gaussian_kernel_equals_naive_with_gradients() -> None:
    q, k = torch.randn(6, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    assert_close(gaussian_kernel(q, k), naive_gaussian(q, k))
    inputs = (q.requires_grad_(), k.requires_grad_())
    assert torch.autograd.gradcheck(gaussian_kernel, inputs)
    assert torch.autograd.gradgradcheck(gaussian_kernel, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_gaussian_kernel_stays_a_kernel_far_from_the_origin(dtype: torch.dtype, offset: float) -> None:
    q = ((torch.randn(2, 3, 60, 32) * 3 * 32**-0.25).to(dtype).float()) + offset
    kernel = gaussian_kernel(q, q)
    assert_close(kernel.diagonal(dim1=-2, dim2=-1), torch.ones(2, 3, 60), atol=1e-3, rtol=0)
    assert kernel.min() >= 0 and kernel.max() <= 1
    assert_close(kernel, kernel.transpose(-2, -1), atol=1e-6, rtol=0)
    # float32 holds 50 +- 4e-6: that much of the distance is lost with the offset, and no more.
    assert_close(kernel, gaussian_kernel(q - offset, q - offset), atol=1e-3, rtol=0)


def test_gaussian_kernel_of_far_points_has_no_denormals() -> None:
    kernel = gaussian_kernel(torch.zeros(1, 4), torch.full((3, 4), 100.0))
    assert kernel.max() < 1e-37 and kernel.min() >= torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("inverse", [plain_inverse, released_inverse])
def test_inverse_of_identity(inverse) -> None:
    assert_close(inverse(EYE[None, None]).squeeze(), EYE / (1.01 if inverse is plain_inverse else 1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("spread", [0.3, 1.5])
def test_inverse_of_well_conditioned_kernels(spread: float) -> None:
    kernel = kernel_of(spread)
    assert torch.linalg.cond(kernel.double()).max() < 300
    assert_close(plain_inverse(kernel) @ add_ridge(kernel), EYE.expand_as(kernel), atol=1e-2, rtol=0)
    assert_close(released_inverse(kernel) @ kernel, EYE.expand_as(kernel), atol=1e-2, rtol=0)


@pytest.mark.parametrize("inverse", [plain_inverse, released_inverse])
@pytest.mark.parametrize("case", ["ill-conditioned", "all ones"])
def test_inverse_of_singular_kernels_is_finite_and_bounded_with_gradients(inverse, case: str) -> None:
    kernel = kernel_of(0.05) if case == "ill-conditioned" else torch.ones(1, 1, 49, 49)
    kernel.requires_grad_()
    result = inverse(kernel)
    result.square().sum().backward()
    assert result.abs().max() < 2**20
    assert kernel.grad is not None and kernel.grad.isfinite().all()


@pytest.mark.parametrize(
    "inverse",
    [
        lambda kernel: newton_schulz_pinv(kernel, ridge_scale(kernel), 40),
        lambda kernel: solve_spd(kernel, torch.eye(6, dtype=kernel.dtype).expand_as(kernel)),
    ],
    ids=["newton", "solve"],
)
def test_gradients_are_those_of_the_inverse_to_second_order(inverse: Callable[[Tensor], Tensor]) -> None:
    points = torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1, 2, 6, 6, dtype=torch.float64)
    first, second = [], []
    for exact in (False, True):
        kernel = add_ridge(gaussian_kernel(points, points))
        result = torch.linalg.inv(kernel) if exact else inverse(kernel)
        (gradient,) = torch.autograd.grad((result * weight).sum(), points, create_graph=True)
        first.append(gradient)
        second.append(torch.autograd.grad(gradient.square().sum(), points)[0])
    assert_close(first[0], first[1], rtol=1e-8, atol=1e-8)
    assert_close(second[0], second[1], rtol=1e-7, atol=1e-7)


SOLVED = {"well": lambda: kernel_of(1.5), "ill": lambda: kernel_of(0.05), "all ones": lambda: torch.ones(1, 1, 49, 49)}


@pytest.mark.parametrize("exporting", [False, True])
@pytest.mark.parametrize("case", sorted(SOLVED))
def test_solve_is_the_inverse_for_any_kernel(case: str, exporting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverse, "is_exporting", lambda: exporting)  # then by Newton steps
    kernel, x = add_ridge(SOLVED[case]()), torch.randn(1, 1, 49, 32)
    found, exact = solve_spd(kernel, x), torch.linalg.solve(kernel.double(), x.double())
    # The condition number is up to 4,901: so many times 6e-8 is what float32 input leaves.
    assert relative_error(found, exact) < 3e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_solve_hides_no_broken_kernel(value: float) -> None:
    kernels = add_ridge(kernel_of(1.0, batch=2))
    kernels[1, :, 3] = kernels[1, :, :, 3] = value
    found = solve_spd(kernels, torch.randn(2, 1, 49, 32))
    assert found[0].isfinite().all() and not found[1].isfinite().any()


def test_exported_solve_has_converged_with_many_landmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverse, "is_exporting", lambda: True)
    kernel, x = add_ridge(torch.ones(1, 1, 400, 400, dtype=torch.float64)), torch.randn(1, 1, 400, 2).double()
    assert_close(solve_spd(kernel, x, gradient_steps=0), torch.linalg.solve(kernel, x), rtol=1e-5, atol=1e-5)


def test_halved_scale_equals_the_released_loop_and_ignores_batch_mates() -> None:
    kernels = torch.cat([kernel_of(spread, heads=3, dtype=torch.float64) for spread in (0.05, 0.2, 0.4)])
    batch = released_inverse(kernels)
    for i, kernel in enumerate(kernels):
        assert_close(batch[i], naive_released_newton(kernel), rtol=1e-6, atol=1e-6)
        assert_close(batch[i : i + 1], released_inverse(kernels[i : i + 1]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("inverse", ["newton", "solve"])
def test_soft_equals_naive_with_gradients(normalize: bool, inverse: str) -> None:
    q, v = torch.randn(6, 35, 4, dtype=torch.float64), torch.randn(6, 35, 4, dtype=torch.float64)
    landmarks = torch.randn(6, 5, 4, dtype=torch.float64) * 2
    inputs = [x.requires_grad_() for x in (q, v, landmarks)]
    ridge = 0.0 if normalize and inverse == "newton" else 0.01
    fast = soft_attention(*inputs, 3, normalize, inverse, 40)
    naive = torch.stack([naive_soft(*head, normalize, ridge) for head in zip(*inputs, strict=True)])
    assert_equal_with_gradients(fast, naive, inputs, rtol=1e-6, atol=1e-6)


def test_soft_with_all_tokens_as_landmarks_is_the_gaussian_kernel_itself() -> None:
    q, v = torch.randn(1, 12, 8, dtype=torch.float64), torch.randn(1, 12, 8, dtype=torch.float64)
    kernel = gaussian_kernel(q, q)
    low_rank = kernel.transpose(-2, -1) @ soft_inverse_apply(kernel, kernel @ v, 1, False, "solve")
    assert_close(low_rank, kernel @ v, rtol=0.05, atol=0.05)  # up to the ridge of 0.01


@pytest.mark.parametrize("feat_size", [(14, 14), (15, 9), (4, 11)])
def test_average_landmarks_equal_naive_pooling(feat_size: tuple[int, int]) -> None:
    landmarks = Landmarks(dim=8, num_heads=2, kind="avg", grid=7)
    q = torch.randn(2, feat_size[0] * feat_size[1], 8)
    grid = min(7, feat_size[0]), min(7, feat_size[1])
    pooled = torch.stack([naive_average_pool(image.reshape(*feat_size, 8), grid) for image in q])
    pooled = pooled.reshape(2, grid[0] * grid[1], 2, 4).transpose(1, 2).flatten(0, 1)
    expected = torch.nn.functional.gelu(torch.nn.functional.layer_norm(pooled * 4**-0.25, (4,), eps=1e-5))
    assert_close(landmarks(q, feat_size), expected)


@pytest.mark.parametrize(
    ("kind", "grid", "feat_size", "count"),
    [
        ("avg", 7, (56, 56), 49),
        ("avg", 7, (256, 100), 49),
        ("avg", (3, 5), (20, 20), 15),
        ("avg", 7, (4, 4), 16),
        ("avg", None, (16, 25), 6),
        ("conv", None, (64, 64), 64),
        ("conv", None, (17, 31), 6),
        ("conv", 7, (64, 200), 49),
        ("conv", 7, (24, 200), 21),
    ],
)
def test_number_of_landmarks(kind: str, grid: int | None, feat_size: tuple[int, int], count: int) -> None:
    landmarks = Landmarks(dim=8, num_heads=2, kind=kind, sr_ratio=8, grid=grid)
    assert landmarks(torch.randn(2, feat_size[0] * feat_size[1], 8), feat_size).shape == (4, count, 4)


def test_conv_landmarks_with_a_grid_equal_those_without_up_to_its_size() -> None:
    bound, free = Landmarks(8, 2, "conv", 4, None), Landmarks(8, 2, "conv", 4, 7)
    free.load_state_dict(bound.state_dict())
    q = torch.randn(2, 28 * 20, 8)
    assert torch.equal(bound(q, (28, 20)), free(q, (28, 20)))


def test_prefix_tokens_are_queries_and_keys_but_no_landmarks() -> None:
    attn = SoftAttention(8, 2, landmark_grid=2).eval()
    x = torch.randn(2, 1 + 12, 8)
    changed = x.clone()
    changed[:, 0] += 1.0
    q = attn.q(x)
    assert_close(attn.attention_matrix(x, (3, 4))[:, :, 1:, 1:], attn.attention_matrix(changed, (3, 4))[:, :, 1:, 1:])
    assert (attn(x, (3, 4)) - attn(changed, (3, 4)))[:, 1:].abs().max() > 1e-6
    assert attn.landmarks(q[:, 1:], (3, 4)).shape == (4, 4, 4)


def test_local_convolution_sees_the_pixels_alone() -> None:
    attn = SoftAttention(8, num_heads=2, landmark_grid=2, local_kernel=3)
    plain = SoftAttention(8, num_heads=2, landmark_grid=2)
    plain.load_state_dict({key: value for key, value in attn.state_dict().items() if key != "local.weight"})
    x = torch.randn(2, 1 + 12, 8)
    added = attn(x, (3, 4)) - plain(x, (3, 4))
    local = attn.local(attn.v(x[:, 1:]), (3, 4)) @ attn.proj.weight.T
    assert_close(added[:, 1:], local)
    assert_close(added[:, 0], torch.zeros(2, 8))


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of every call that is computed 10 tokens of two images at a time."""
    calls, attend = list[int](), SoftAttention.attend_in_pieces

    def counted(self: SoftAttention, q: Tensor, *more: Tensor) -> Tensor:
        calls.append(q.shape[1])
        return attend(self, q, *more)

    monkeypatch.setattr(soft, "PIECE_ELEMENTS", 2 * 10 * 8)
    monkeypatch.setattr(SoftAttention, "attend_in_pieces", counted)
    return calls


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap's, about clamp_
@pytest.mark.parametrize("options", [{}, {"normalize": True, "local_kernel": 3}, {"landmarks": "conv", "sr_ratio": 2}])
@pytest.mark.parametrize("prefix", [0, 1])
def test_many_tokens_in_pieces_are_the_whole(options: dict[str, Any], prefix: int, in_pieces: list[int]) -> None:
    attn, x = SoftAttention(8, 2, **options).eval(), torch.randn(2, prefix + 24, 8)
    given, whole = x.clone(), attn(x, (4, 6))  # a gradient is recorded
    with torch.no_grad():
        assert_close(attn(x, (4, 6)), whole)
        assert torch.equal(x, given)
        assert_close(torch.vmap(lambda image: attn(image[None], (4, 6))[0])(x), whole)
        with torch.autocast("cpu", torch.bfloat16):
            half = attn(x, (4, 6))
        assert half.dtype == torch.bfloat16 and (half - whole).norm() < 0.02 * whole.norm()
        attn(x[:, : prefix + 18], (3, 6))  # fewer than two pieces
    assert [count for count in in_pieces if count < prefix + 24] == []
    assert len(in_pieces) >= 2


def test_queries_that_something_looks_at_are_not_written_over(in_pieces: list[int]) -> None:
    attn, x, seen = SoftAttention(8, 2).eval(), torch.randn(2, 24, 8), []
    hook = attn.q.register_forward_hook(lambda module, inputs, output: seen.append((output, output.clone())))
    with torch.no_grad():
        expected = attn(x, (4, 6))
        assert in_pieces == [] and torch.equal(*seen[0])
        hook.remove()
        assert_close(attn(x, (4, 6)), expected)
        attn.q = torch.nn.Identity()
        given = x.clone()
        attn.eval()(x, (4, 6))
    assert in_pieces == [24] and torch.equal(x, given)
