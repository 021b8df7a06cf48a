"""Vicinity attention: the explicit form, the released limits, precision, gate."""

import naive
import pytest
import torch
from small_models import assert_equal_with_gradients
from torch import Tensor

from soft_models.attention.vicinity import VicinityAttention, clamp_magnitude, vicinity_attention


def random_heads(n: int, scale: float = 1.0) -> list[Tensor]:
    return [(scale * torch.randn(2, 3, n, 5, dtype=torch.float64)).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize(("feat_size", "num_prefix"), [((7, 7), 0), ((4, 9), 0), ((2, 2), 0), ((3, 4), 2)])
def test_plain_form_equals_naive_with_gradients(feat_size: tuple[int, int], num_prefix: int) -> None:
    q, k, v = random_heads(feat_size[0] * feat_size[1] + num_prefix)
    out = vicinity_attention(q, k, v, feat_size, clamp=False)
    assert_equal_with_gradients(out, naive.per_head(naive.naive_vicinity, q, k, v, feat_size, False), [q, k, v])


# Each scale makes other limits bind: small ones the lower limits, large ones the upper.
@pytest.mark.parametrize("scale", [0.01, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("feat_size", [(6, 5), (2, 3)])
def test_limited_form_equals_naive_with_gradients(scale: float, feat_size: tuple[int, int]) -> None:
    q, k, v = random_heads(feat_size[0] * feat_size[1], scale)
    out = vicinity_attention(q, k, v, feat_size)
    assert_equal_with_gradients(out, naive.per_head(naive.naive_vicinity, q, k, v, feat_size, True), [q, k, v])


def test_limits_bind_and_matter() -> None:
    q, k, v = (30 * torch.randn(1, 1, 400, 8) for _ in range(3))
    limited = vicinity_attention(q, k, v, (20, 20))
    assert (limited - vicinity_attention(q, k, v, (20, 20), clamp=False)).abs().max() > 0.1


def test_clamp_magnitude_keeps_sign_and_zero_and_stops_gradients() -> None:
    x = torch.tensor([-1e6, -1.0, -1e-6, 0.0, 1e-6, 1.0, 1e6], requires_grad=True)
    out = clamp_magnitude(x)
    torch.testing.assert_close(out, torch.tensor([-1e4, -1.0, -1e-4, 0.0, 1e-4, 1.0, 1e4]))
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 0, 0, 0, 1, 0]


def test_gate_multiplies_the_output() -> None:
    attn = VicinityAttention(16, num_heads=2, clamp=False).double()
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    out = attn(x, (3, 4))
    q, k, v = attn.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    plain = attn.proj(vicinity_attention(q, k, v, (3, 4), clamp=False).transpose(1, 2).flatten(2))
    first, _, second, _ = attn.gate
    gate = torch.sigmoid(second(first(x.mean(dim=1)).relu()))
    torch.testing.assert_close(out, plain + plain * gate[:, None])


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e6])
def test_module_limits_projection_and_gated_sum(scale: float) -> None:
    attn = VicinityAttention(16, num_heads=2).double()
    with torch.no_grad():
        attn.proj.weight.mul_(scale)
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    q, k, v = attn.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    plain = clamp_magnitude(attn.proj(vicinity_attention(q, k, v, (3, 4)).transpose(1, 2).flatten(2)))
    expected = clamp_magnitude(plain + plain * attn.gate(x.mean(dim=1, keepdim=True)))
    torch.testing.assert_close(attn(x, (3, 4)), expected)


def test_wrong_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="got dim=20, feature_reduction=2, num_heads=4"):
        VicinityAttention(20, num_heads=4)
    with pytest.raises(ValueError, match="divisible by gate_reduction, got dim=16, gate_reduction=3"):
        VicinityAttention(16, num_heads=2, gate_reduction=3)
