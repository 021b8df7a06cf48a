"""Shared parts: layouts that cost no copy, and what is computed otherwise where that shows nowhere."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.testing import assert_close

from soft_models import layers
from soft_models.attention.tokens import tokens_to_map
from soft_models.layers import Block, Blocks, ConvBNReLU, PostNormBlock, TanhGELU, prepare_images
from soft_models.pyramid import Stem


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


SIZE = (5, 7)  # of the map, which these blocks do not read


class Shift(nn.Module):
    """Stands for an attention, also under autocast: every token gets half of its neighbour."""

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        y = x.roll(1, dims=1) / 2
        return y.bfloat16() if torch.is_autocast_enabled("cpu") else y


@pytest.fixture(params=[Block, PostNormBlock])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Block:
    """A block in evaluation that takes 20 tokens at a time; ``sizes`` has those of the pieces as they are computed."""
    monkeypatch.setattr(layers, "HIDDEN_ELEMENTS", 20 * 32)
    block = request.param(Shift(), 8, 4, nn.LayerNorm, proj_drop=0.5, drop_path=0.5).eval()
    combine, sizes = block.combine, []
    monkeypatch.setattr(block, "combine", lambda x, *more: sizes.append(x.shape[:-1].numel()) or combine(x, *more))
    block.__dict__["sizes"] = sizes
    return block


@pytest.mark.parametrize(("tokens", "pieces"), [(10, [20]), (11, [20, 2]), (35, [20, 20, 20, 10])])
def test_block_in_pieces_is_the_whole(tokens: int, pieces: list[int], block: Block) -> None:
    x = torch.randn(2, tokens, 8)
    given = x.clone()
    whole = block(x, SIZE)  # a gradient is recorded
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert_close(block(x, SIZE), whole)
    assert block.sizes == [2 * tokens, *pieces, *pieces]
    assert torch.equal(x, given), "what was given is not written over"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        half = block(x, SIZE)
        block.train()
        block.drop_path, block.mlp.drop1, block.mlp.drop2 = nn.Identity(), nn.Identity(), nn.Identity()
        assert_close(half, block(x, SIZE), rtol=0, atol=0)


def test_block_is_whole_where_pieces_could_show(block: Block) -> None:
    x, seen = torch.randn(2, 35, 8), []

    def looked_inside() -> None:
        block(x, SIZE)
        assert block.sizes.pop() == 70

    with torch.no_grad():
        block.train()(x, SIZE)  # as reentrant checkpointing does, which draws the same dropout a second time
        assert block.sizes.pop() == 70
        block.eval()
        for module in (block.attn, block.norm1, block.mlp.fc1):
            hook = module.register_forward_hook(lambda module, inputs, output: seen.append((output, output.clone())))
            looked_inside()
            hook.remove()
        wrapped = block.norm1.forward
        block.norm1.forward = lambda x: wrapped(x)  # as offloading does
        looked_inside()
        del block.norm1.forward
        hook = register_module_forward_hook(lambda module, inputs, output: seen.append((output, output.clone())))
        looked_inside()
        hook.remove()
        assert len(seen) > 3 and all(torch.equal(output, then) for output, then in seen)
        mlp, block.mlp = block.mlp, nn.Sequential(Rearranged(), block.mlp).eval()  # mixes tokens
        looked_inside()
        block.mlp, block.norm2 = mlp, Rearranged().eval()
        looked_inside()


class Rearranged(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(1)


@pytest.fixture(params=["blocks", "stem"])
def grouped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Blocks | Stem:
    """What takes 2 images of ``GROUPED`` at a time; ``sizes`` has those of the groups as they are computed."""
    blocks = Blocks(Block(Shift(), 8, 4, nn.LayerNorm, drop_path=0.5), PostNormBlock(Shift(), 8, 2, nn.LayerNorm))
    module = (blocks if request.param == "blocks" else Stem(3, 8)).eval()
    monkeypatch.setattr(layers, "GROUP_ELEMENTS", 2 * module.growth * GROUPED[request.param][0].numel() / 5)
    compute, sizes = module.compute, []
    monkeypatch.setattr(module, "compute", lambda x, *more: sizes.append(len(x)) or compute(x, *more))
    module.__dict__.update(sizes=sizes, inputs=GROUPED[request.param])
    return module


GROUPED = {"blocks": (torch.randn(5, 35, 8), SIZE), "stem": (torch.randn(5, 3, 24, 20),)}


def test_images_in_groups_are_the_batch(grouped: Blocks | Stem) -> None:
    whole = grouped(*grouped.inputs)  # a gradient is recorded
    with torch.no_grad():
        assert_close(grouped(*grouped.inputs), whole)
        x, *feat_size = grouped.inputs
        assert [len(grouped(x[:count], *feat_size)) for count in (0, 2)] == [0, 2]
    assert grouped.sizes == [5, 2, 2, 1, 0, 2]


def test_blocks_are_cut_like_any_sequence() -> None:
    blocks = Blocks(Block(Shift(), 8, 4, nn.LayerNorm), Block(Shift(), 8, 2, nn.LayerNorm)).eval()
    x = torch.randn(2, 35, 8)
    assert_close(blocks[1:](blocks[:1](x, SIZE), SIZE), blocks(x, SIZE))
    assert blocks[:0](x, SIZE) is x


def test_batch_is_whole_where_groups_could_show(grouped: Blocks | Stem) -> None:
    first = next(module for module in grouped.modules() if not list(module.children()))
    with torch.no_grad():
        hook = first.register_forward_hook(lambda module, inputs, output: None)
        grouped(*grouped.inputs)
        hook.remove()
        first.train()  # as batch norm that estimates its statistics
        grouped(*grouped.inputs)
    assert grouped.sizes == [5, 5]


def test_gelu_by_the_sigmoid_is_that_by_tanh() -> None:
    x = torch.linspace(-30, 30, 10_001)
    gelu, expected = TanhGELU().eval(), F.gelu(x, approximate="tanh")
    with torch.no_grad():
        assert not torch.equal(gelu(x), expected), "another formula"
        assert_close(gelu(x), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(gelu.train()(x), expected)
        half = x.bfloat16()
        assert torch.equal(gelu.eval()(half), F.gelu(half, approximate="tanh"))
    assert torch.equal(gelu(x.requires_grad_()), expected)


@pytest.fixture
def conv() -> ConvBNReLU:
    """In evaluation, with statistics and weights of the norm that do something."""
    conv = ConvBNReLU(3, 8, stride=2).eval()
    for tensor in (conv[1].running_mean, conv[1].running_var, conv[1].weight.data, conv[1].bias.data):
        tensor.uniform_(0.5, 2)
    return conv


def test_norm_merged_into_the_convolution_of_large_maps_is_the_norm(
    conv: ConvBNReLU, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged, calls = conv.merged, []
    monkeypatch.setattr(conv, "merged", lambda x: calls.append(len(x)) or merged(x))
    for side, count in ((4, 0), (40, 1)):
        x = torch.randn(2, 3, side, side)
        apart = conv(x)
        with torch.no_grad():
            assert_close(conv(x), apart)
        assert len(calls) == count, "of small maps the weights would cost more than the norm"
    with torch.no_grad():
        hook = conv[1].register_forward_hook(lambda module, inputs, output: None)
        conv(x)
        hook.remove()
        conv[1].train()  # alone, as statistics are estimated anew
        conv(x)
        assert len(calls) == 1
        assert not torch.equal(conv.eval()(x), apart), "statistics of training are taken over"
        assert len(calls) == 2
        conv.append(nn.Dropout().eval())
        conv(x)
    assert len(calls) == 2
