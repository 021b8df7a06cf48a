"""cosFormer attention: official numbers, the explicit N x N form, precision, causality, masks."""

import naive
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from official import official_outputs, official_shapes, official_state_dict
from small_models import HALF_ERROR, assert_equal_with_gradients, relative_error
from torch import Tensor

from soft_models.attention.cosformer import (
    Cosformer2dAttention,
    CosformerAttention,
    causal_linear_attention,
    cosformer2d_attention,
    cosformer_attention,
    map_table,
    reweighted_attention,
)

EXPECTED = official_outputs("cosformer")
WEIGHTS = official_state_dict(official_shapes("cosformer_vvt", "cosformer"))


def official_input(seed: int, length: int) -> Tensor:
    """``(length, 2, 64)``, sequence first as in the official code."""
    return torch.from_numpy(np.random.RandomState(seed).standard_normal((length, 2, 64)).astype(np.float32))


def project(name: str, x: Tensor) -> Tensor:
    return F.linear(x, WEIGHTS[f"{name}.weight"], WEIGHTS[f"{name}.bias"])


def official_attention(query: Tensor, key: Tensor, causal: bool = False) -> Tensor:
    """The official module's forward up to its output projection, through our function; sequence first."""
    q, k, v = (
        project(name, x).unflatten(-1, (4, 16)).permute(1, 2, 0, 3)
        for name, x in (("q_proj", query), ("k_proj", key), ("v_proj", key))
    )
    return cosformer_attention(q, k, v, causal=causal).permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_gives_the_official_numbers(causal: bool) -> None:
    x = official_input(3, 50)
    out = project("out_proj", official_attention(x, x, causal))
    expected = EXPECTED["cosformer/causal" if causal else "cosformer/bidirectional"]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_cross_attention_gives_the_official_numbers() -> None:
    out = official_attention(official_input(4, 20), official_input(5, 33))
    expected = EXPECTED["cosformer/cross_no_outproj"]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_module_gives_the_official_numbers() -> None:
    attn = CosformerAttention(64, num_heads=4)
    parts = ("q_proj", "k_proj", "v_proj")
    attn.load_state_dict(
        {
            "qkv.weight": torch.cat([WEIGHTS[f"{name}.weight"] for name in parts]),
            "qkv.bias": torch.cat([WEIGHTS[f"{name}.bias"] for name in parts]),
            "proj.weight": WEIGHTS["out_proj.weight"],
            "proj.bias": WEIGHTS["out_proj.bias"],
        }
    )
    out = attn(official_input(3, 50).transpose(0, 1), (5, 10)).transpose(0, 1)
    expected = EXPECTED["cosformer/bidirectional"]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def random_heads(*lengths: int) -> list[Tensor]:
    return [torch.randn(2, 3, n, 5, dtype=torch.float64, requires_grad=True) for n in lengths]


@pytest.mark.parametrize(("n", "n_k", "max_len"), [(49, 49, None), (13, 29, None), (29, 13, None), (17, 17, 40)])
def test_cosformer_equals_naive_with_gradients(n: int, n_k: int, max_len: int | None) -> None:
    q, k, v = random_heads(n, n_k, n_k)
    out = cosformer_attention(q, k, v, max_len=max_len)
    assert_equal_with_gradients(out, naive.per_head(naive.naive_cosformer, q, k, v, False, max_len), [q, k, v])


@pytest.mark.parametrize("n", [1, 7, 128, 129, 300])
def test_causal_equals_naive_with_gradients(n: int) -> None:
    q, k, v = random_heads(n, n, n)
    out = cosformer_attention(q, k, v, causal=True)
    assert_equal_with_gradients(out, naive.per_head(naive.naive_cosformer, q, k, v, True), [q, k, v])


@pytest.mark.parametrize("chunk", [1, 4, 5, 64])
def test_causal_chunks_do_not_change_the_result(chunk: int) -> None:
    q, k, v = random_heads(19, 19, 19)
    q, k = q.relu(), k.relu()
    expected = causal_linear_attention(q, k, v, chunk=19)
    torch.testing.assert_close(causal_linear_attention(q, k, v, chunk=chunk), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("feat_size", "num_prefix"), [((7, 7), 0), ((5, 9), 0), ((1, 6), 0), ((4, 3), 2)])
def test_cosformer2d_equals_naive_with_gradients(feat_size: tuple[int, int], num_prefix: int) -> None:
    n = feat_size[0] * feat_size[1] + num_prefix
    q, k, v = random_heads(n, n, n)
    out = cosformer2d_attention(q, k, v, feat_size)
    assert_equal_with_gradients(out, naive.per_head(naive.naive_cosformer2d, q, k, v, feat_size), [q, k, v])


def test_map_table_factors_the_sum_of_cosines() -> None:
    table = map_table(17, (3, 5), torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(table @ table.T, naive.vicinity_factors((3, 5), torch.float64, num_prefix=2))


@pytest.mark.parametrize("causal", [False, True])
def test_padding_mask_equals_leaving_the_padding_out(causal: bool) -> None:
    q, k, v = random_heads(11, 11, 11)
    mask = torch.zeros(2, 11, dtype=torch.bool)
    mask[:, 8:] = True
    poisoned = [x.detach().clone() for x in (k, v)]
    for x in poisoned:
        x[:, :, 8:] = 1e30
    out = cosformer_attention(q, *poisoned, causal=causal, key_padding_mask=mask, max_len=11)
    expected = cosformer_attention(q[:, :, :8], k[:, :, :8], v[:, :, :8], causal=causal, max_len=11)
    torch.testing.assert_close(out[:, :, :8], expected, rtol=1e-9, atol=1e-10)


def test_padding_may_differ_between_sequences_of_a_batch() -> None:
    attn = CosformerAttention(12, num_heads=3, max_len=10).double()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[1, 6:] = True
    out = attn(x, (3, 3), mask)
    torch.testing.assert_close(out[:1], attn(x[:1], (3, 3)))
    torch.testing.assert_close(out[1:, :6], attn(x[1:, :6], (2, 3)))


def test_fixed_max_len_keeps_old_causal_outputs_as_the_sequence_grows() -> None:
    q, k, v = random_heads(20, 20, 20)
    long = cosformer_attention(q, k, v, causal=True, max_len=64)
    short = cosformer_attention(q[:, :, :12], k[:, :, :12], v[:, :, :12], causal=True, max_len=64)
    torch.testing.assert_close(long[:, :, :12], short, rtol=1e-9, atol=1e-10)
    moving = cosformer_attention(q[:, :, :12], k[:, :, :12], v[:, :, :12], causal=True)
    assert (moving - cosformer_attention(q, k, v, causal=True)[:, :, :12]).abs().max() > 1e-3


def test_causal_outputs_do_not_see_the_future() -> None:
    attn = CosformerAttention(16, num_heads=2, causal=True, max_len=300).double()
    x = torch.randn(1, 200, 16, dtype=torch.float64)
    changed = x.clone()
    changed[:, 150:] += 1
    torch.testing.assert_close(attn(x, (10, 20))[:, :150], attn(changed, (10, 20))[:, :150])


@pytest.mark.parametrize("kwargs", [{"causal": True}, {"max_len": 50}])
def test_attention_matrix_times_values_is_the_output(kwargs: dict[str, object]) -> None:
    attn = CosformerAttention(24, num_heads=3, **kwargs).double()
    x = torch.randn(2, 1 + 4 * 5, 24, dtype=torch.float64)
    weights = attn.attention_matrix(x, (4, 5))
    v = attn.qkv(x)[..., 48:].unflatten(-1, (3, 8)).transpose(1, 2)
    torch.testing.assert_close(attn.proj((weights @ v).transpose(1, 2).flatten(2)), attn(x, (4, 5)))
    rows = torch.tensor([3, 0, 17])
    torch.testing.assert_close(attn.attention_matrix(x, (4, 5), rows), weights[:, :, rows])


def test_causal_long_sequence_in_half_precision_matches_float32() -> None:
    q, k, v = (3 + torch.randn(1, 2, 112 * 112, 8) for _ in range(3))
    expected = cosformer_attention(q, k, v, causal=True)
    out = cosformer_attention(q.half(), k.half(), v.half(), causal=True)
    assert out.dtype == torch.float16
    assert relative_error(out, expected) < HALF_ERROR


@pytest.mark.parametrize("cls", [CosformerAttention, Cosformer2dAttention])
@pytest.mark.parametrize("feat_size", [(6, 8), (2, 3)])
def test_autocast_leaves_the_sums_in_float32(
    cls: type, feat_size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.dtype] = []

    def recording(q: Tensor, k: Tensor, v: Tensor, *tables: Tensor) -> Tensor:
        seen.extend(x.dtype for x in (q, k, v, q @ k.transpose(-2, -1), *tables[:2]))
        return reweighted_attention(q, k, v, *tables)

    monkeypatch.setattr("soft_models.attention.cosformer.reweighted_attention", recording)
    attn = cls(32, num_heads=2)
    x = torch.randn(2, feat_size[0] * feat_size[1], 32)
    expected = attn(x, feat_size)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        out = attn(x, feat_size)
    assert seen == [torch.float32] * 6
    assert out.dtype == torch.bfloat16
    assert relative_error(out, expected) < HALF_ERROR


def test_wrong_arguments_are_refused_by_name() -> None:
    q, k, v = (x.detach() for x in random_heads(4, 5, 5))
    with pytest.raises(ValueError, match="as many queries as keys, got 4 and 5"):
        cosformer_attention(q, k, v, causal=True)
    with pytest.raises(ValueError, match="must not be longer than max_len, got 5 tokens and max_len=3"):
        cosformer_attention(q, k, v, max_len=3)
    attn = CosformerAttention(8, num_heads=2, max_len=3)
    for method in (attn, attn.attention_matrix):
        with pytest.raises(ValueError, match="must not be longer than max_len, got 5 tokens and max_len=3"):
            method(torch.randn(1, 5, 8), (1, 5))
    with pytest.raises(ValueError, match="max_len must be at least 1, got 0"):
        CosformerAttention(8, num_heads=2, max_len=0)
