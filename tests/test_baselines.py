"""Linformer, Nyströmformer and Performer attention against the softmax attention that they approximate."""

import pytest
import torch
from small_models import assert_equal_with_gradients, relative_error
from torch.testing import assert_close

from soft_models.attention import create_attention
from soft_models.attention.linformer import LinformerAttention
from soft_models.attention.nystromformer import NystromformerAttention, iterative_pinv, nystrom_attention
from soft_models.attention.performer import (
    PerformerAttention,
    orthogonal_directions,
    performer_attention,
    positive_features,
)
from soft_models.attention.softmax import SoftmaxAttention


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v


def softmax_twin(attn: torch.nn.Module, dim: int, num_heads: int) -> SoftmaxAttention:
    """Softmax attention with the weights of ``attn``."""
    twin, own = SoftmaxAttention(dim, num_heads), attn.state_dict()
    for kind in ("weight", "bias"):
        if f"q.{kind}" in own:
            own[f"qkv.{kind}"] = torch.cat([own.pop(f"q.{kind}"), own.pop(f"kv.{kind}")])
    own.pop("directions", None)
    twin.load_state_dict(own)
    return twin.double()


@pytest.mark.parametrize("num_prefix", [0, 1])
def test_linformer_with_every_pixel_in_its_own_pool_is_softmax(num_prefix: int) -> None:
    attn = LinformerAttention(16, 2, landmark_grid=(5, 3)).double()
    x = torch.randn(2, num_prefix + 15, 16, dtype=torch.float64)
    assert_close(attn(x, (5, 3)), softmax_twin(attn, 16, 2)(x, (5, 3)))


def test_nystrom_with_all_tokens_as_landmarks_is_softmax_with_gradients() -> None:
    q, k, v = (torch.randn(2, 2, 11, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    fast, exact = nystrom_attention(q, k, v, q, k, iters=40), softmax_attention(q, k, v)
    assert_equal_with_gradients(fast, exact, (q, k, v), rtol=1e-6, atol=1e-6)


def test_nystromformer_with_every_pixel_as_landmark_is_softmax() -> None:
    attn = NystromformerAttention(16, 2, landmark_grid=(5, 3), pinv_iters=40).double()
    x = torch.randn(2, 15, 16, dtype=torch.float64)
    assert_close(attn(x, (5, 3)), softmax_twin(attn, 16, 2)(x, (5, 3)))


@pytest.mark.parametrize("name", ["linformer", "nystromformer"])
def test_cells_of_no_pixels_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="sr_ratio must be at least 1, got 0"):
        create_attention(name, 16, num_heads=2, landmark_grid=None, sr_ratio=0)


def test_iterative_pinv_does_not_depend_on_batch_mates() -> None:
    matrices = torch.randn(3, 2, 9, 9, dtype=torch.float64).mul(torch.tensor([0.1, 1.0, 3.0])[:, None, None, None])
    matrices = matrices.softmax(dim=-1)
    for i, matrix in enumerate(matrices):
        assert_close(iterative_pinv(matrices)[i], iterative_pinv(matrix), rtol=0, atol=1e-12)


def performer_error(num_features: int) -> float:
    """Mean relative error of the estimate over several draws of the directions."""
    # Short vectors: the estimate's variance grows exponentially with |q + k|^2.
    q, k, v = (torch.randn(1, 2, 40, 16, dtype=torch.float64) * size for size in (0.5, 0.5, 1.0))
    exact = softmax_attention(q * 16**-0.5, k, v)
    errors = []
    for _ in range(20):
        directions = orthogonal_directions(num_features, 16, dtype=torch.float64)
        features = (
            positive_features(q * 16**-0.25, directions, True),
            positive_features(k * 16**-0.25, directions, False),
        )
        errors.append(relative_error(performer_attention(*features, v), exact))
    return sum(errors) / len(errors)


def test_performer_error_falls_as_features_grow() -> None:
    errors = [performer_error(count) for count in (16, 128, 1024)]
    # A mean of n independent draws errs by 1 / sqrt(n), a third at eight times the features; few orthogonal ones less.
    assert errors[1] < 0.7 * errors[0] and errors[2] < 0.6 * errors[1] and errors[2] < 0.15, errors


def test_performer_directions_are_orthogonal_with_gaussian_lengths() -> None:
    directions = orthogonal_directions(64, 32, dtype=torch.float64)
    unit = directions[:32] / directions[:32].norm(dim=1, keepdim=True)
    assert_close(unit @ unit.T, torch.eye(32, dtype=torch.float64))
    assert 4 < directions.norm(dim=1).mean() < 7  # sqrt(32) = 5.7


def test_performer_directions_travel_with_the_checkpoint() -> None:
    first, second = PerformerAttention(16, 2), PerformerAttention(16, 2)
    x = torch.randn(1, 12, 16)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x, (3, 4)), second(x, (3, 4)))


def test_nystromformer_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="pinv_iters must be at least 1, got 0"):
        create_attention("nystromformer", 16, num_heads=2, pinv_iters=0)


def test_performer_without_features_is_refused() -> None:
    with pytest.raises(ValueError, match="num_features must be at least 1"):
        create_attention("performer", 16, num_heads=2, num_features=0)
