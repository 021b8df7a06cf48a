"""Shared parts: layouts that cost no copy, and an MLP in pieces that is the whole one."""

import pytest
import torch
from timm.layers import Mlp
from torch import Tensor, nn
from torch.testing import assert_close

from soft_models import layers
from soft_models.layers import ChunkedMlp, check_images, tokens_to_map


@pytest.mark.parametrize("batch", [1, 2])
def test_tokens_to_map_is_a_view_that_convolutions_take_for_channels_last(batch: int) -> None:
    tokens = torch.randn(batch, 12, 8)
    maps = tokens_to_map(tokens, (3, 4))
    assert maps.data_ptr() == tokens.data_ptr()
    assert maps.stride() == (96, 1, 32, 8)  # a stride of 8 for the batch of one would count as another layout
    assert_close(maps, tokens.transpose(1, 2).unflatten(2, (3, 4)))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_images_of_any_layout_become_channels_last(batch: int, channels: int, layout: torch.memory_format) -> None:
    x = torch.randn(batch, channels, 32, 40).to(memory_format=layout)
    found = check_images(x)
    assert found.stride() == (channels * 32 * 40, 1, channels * 40, channels)
    assert_close(found, x, rtol=0, atol=0)


def count_pieces(mlp: nn.Module, x: Tensor) -> int:
    pieces = []
    handle = mlp.fc1.register_forward_hook(lambda *_: pieces.append(1))
    mlp(x)
    handle.remove()
    return len(pieces)


@pytest.mark.parametrize(("tokens", "pieces"), [(10, 1), (11, 2), (35, 4)])
def test_mlp_in_pieces_is_the_whole(tokens: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "HIDDEN_ELEMENTS", 2 * 10 * 32)  # 20 tokens
    chunked, whole = ChunkedMlp(8, 32).eval(), Mlp(8, 32).eval()
    whole.load_state_dict(chunked.state_dict())
    x = torch.randn(2, tokens, 8)
    with torch.no_grad():
        assert_close(chunked(x), whole(x))
        assert count_pieces(chunked, x) == pieces
    assert count_pieces(chunked, x) == 1  # where gradients are recorded
    assert_close(chunked(x), whole(x))
