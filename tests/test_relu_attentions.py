"""Attentions with ReLU features, whose normaliser may vanish or overflow: hard inputs, long sequences."""

import copy
from typing import Any

import pytest
import torch
from small_models import DTYPES, HALF_ERROR, relative_error
from torch import nn

from soft_models.attention import create_attention

over_relu = pytest.mark.parametrize(
    ("name", "options"),
    [("cosformer", {}), ("cosformer2d", {}), ("vicinity", {}), ("vicinity", {"clamp": False})],
    ids=str,
)


@over_relu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["dead queries", "constant", "zero", "large"])
def test_hard_inputs_stay_finite_forward_and_backward(
    name: str, options: dict[str, Any], dtype: torch.dtype, case: str
) -> None:
    attn: Any = create_attention(name, 32, num_heads=2, **options)
    x = torch.randn(2, 48, 32)
    if case == "dead queries":
        nn.init.constant_(attn.qkv.bias[: len(attn.qkv.bias) // 3], -10.0)
    elif case == "constant":
        x = torch.ones_like(x)
    elif case == "zero":
        x = torch.zeros_like(x)
        nn.init.zeros_(attn.qkv.bias)
    else:
        x = 100 * x
    attn, x = attn.to(dtype), x.to(dtype).requires_grad_()
    out = attn(x, (6, 8))
    assert out.dtype == dtype
    out.float().square().mean().backward()
    assert out.isfinite().all()
    assert all(p.isfinite().all() for p in (x.grad, *(p.grad for p in attn.parameters())))


@over_relu
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_long_sequences_in_half_precision_match_float32(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    attn: Any = create_attention(name, 32, num_heads=2, **options)
    nn.init.normal_(attn.qkv.weight, std=3 * 32**-0.5)
    nn.init.constant_(attn.qkv.bias, 3.0)
    x = torch.randn(1, 112 * 112, 32)
    expected = attn(x, (112, 112))
    out = copy.deepcopy(attn).to(dtype)(x.to(dtype), (112, 112)).float()
    assert out.isfinite().all()
    error = relative_error(out, expected)
    assert error < HALF_ERROR, f"relative error {error:.3f}"
