"""Shared parts: layouts that cost no copy, and an MLP in pieces that is the whole one."""

import pytest
import torch
from timm.layers import Mlp
from torch import nn
from torch.testing import assert_close

from soft_models import layers
from soft_models.layers import ChunkedMlp, prepare_images, tokens_to_map


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
    found = prepare_images(x)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert_close(found, x, rtol=0, atol=0)
    assert_close(torch.vmap(lambda image: prepare_images(image[None])[0])(x), x, rtol=0, atol=0)


def test_an_image_without_its_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"images must be a batch \(B, C, H, W\), got 3 dimensions"):
        prepare_images(torch.randn(3, 64, 64))


def chunked_and_whole(monkeypatch: pytest.MonkeyPatch, drop: float = 0.0) -> tuple[ChunkedMlp, nn.Module, list[int]]:
    """An MLP in pieces of 20 tokens, timm's with the same weights, and the sizes of the pieces as they are computed."""
    monkeypatch.setattr(layers, "HIDDEN_ELEMENTS", 20 * 32)
    chunked, whole = ChunkedMlp(8, 32, drop=drop).eval(), Mlp(8, 32, drop=drop).eval()
    whole.load_state_dict(chunked.state_dict())
    sizes: list[int] = []
    compute = chunked.compute
    chunked.compute = lambda x: sizes.append(x.shape[:-1].numel()) or compute(x)  # type: ignore[method-assign]
    return chunked, whole, sizes


@pytest.mark.parametrize(("tokens", "pieces"), [(10, [20]), (11, [20, 2]), (35, [20, 20, 20, 10])])
def test_mlp_in_pieces_is_the_whole(tokens: int, pieces: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    chunked, whole, sizes = chunked_and_whole(monkeypatch)
    x = torch.randn(2, tokens, 8)
    with torch.no_grad():
        assert_close(chunked(x), whole(x))
    assert sizes == pieces


def test_mlp_is_whole_where_pieces_could_show(monkeypatch: pytest.MonkeyPatch) -> None:
    chunked, whole, sizes = chunked_and_whole(monkeypatch, drop=0.5)
    x = torch.randn(2, 35, 8)
    assert_close(chunked(x), whole(x))  # a gradient is recorded
    with torch.no_grad():
        torch.manual_seed(0)
        dropped = chunked.train()(x)  # as reentrant checkpointing does, which draws the same dropout a second time
        torch.manual_seed(0)
        assert_close(dropped, whole.train()(x))
        chunked.eval().fc1.register_forward_hook(lambda module, inputs, output: None)
        chunked(x)
        chunked.fc1 = nn.Sequential(chunked.fc1)  # whatever stands in for it
        chunked(x)
    assert sizes[:3] == [70, 70, 70]
