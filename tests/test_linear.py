"""The linear layer: torch's, whether it multiplies or convolves."""

import copy
import pickle
import warnings

import pytest
import timm
import torch
from small_models import FAST, small_args
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing import assert_close

from soft_models import linear
from soft_models.attention import ATTENTIONS, create_attention
from soft_models.linear import Linear


@pytest.fixture(autouse=True)
def convolved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of the layers that were computed as convolutions, on any processor; from 2 x 12 on in ``Linear(8, 6)``."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("needs oneDNN")
    convolve, counts = Linear.convolve, list[int]()

    def counted(self: Linear, x: Tensor) -> Tensor:
        counts.append(x[..., 0].numel())
        return convolve(self, x)

    monkeypatch.setattr(linear, "SLOW_PRODUCTS", True)
    monkeypatch.setattr(linear, "FEWEST", 2 * 12 * 8 * 6)
    monkeypatch.setattr(Linear, "convolve", counted)
    return counts


@pytest.mark.parametrize("shape", [(2, 12), (2, 13), (1, 24), (24,), (3, 2, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_by_convolution_is_the_layer(shape: tuple[int, ...], bias: bool, convolved: list[int]) -> None:
    layer = Linear(8, 6, bias=bias)
    plain = nn.Linear(8, 6, bias=bias)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(*shape, 8).requires_grad_()
    results = []
    for module in (layer, plain):
        out = module(x)
        first = torch.autograd.grad(out.square().sum(), [x, *module.parameters()], create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), [x, *module.parameters()], allow_unused=True)
        results.append([out, *first, *(gradient for gradient in second if gradient is not None)])
    assert len(convolved) == 1
    assert_close(*results)


def test_views_and_transposed_tokens_are_taken(convolved: list[int]) -> None:
    layer, x = Linear(8, 6), torch.randn(2, 8, 30).transpose(1, 2)[:, 3:]
    assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert convolved == [54]


def test_products_stay_where_convolutions_are_slower_or_unknown(convolved: list[int]) -> None:
    layer, x = Linear(8, 6), torch.randn(2, 12, 8)
    layer(x[:, :11])  # few
    layer(torch.randn(2, 0, 8))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    copy.deepcopy(layer).double()(x.double())
    copy.deepcopy(layer).to("meta")(x.to("meta"))
    for strict in (False, True):
        torch.export.export(layer, (x,), strict=strict)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        assert_close(torch.jit.script(layer)(x), torch.jit.trace(layer, x, check_trace=False)(x))
    quantised = copy.deepcopy(layer)
    quantised.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantised), requires_grad=False)
    quantised(x)
    torch.fx.symbolic_trace(layer)
    assert convolved == []
    assert_close(torch.fx.symbolic_trace(layer)(x), layer(x))
    assert convolved == [24]


class Quantised(Tensor):
    """Stands for weights that know only matrix products."""


def test_hooks_and_parametrizations_are_served(convolved: list[int]) -> None:
    layer, x, seen = Linear(8, 6), torch.randn(2, 12, 8), []
    expected = layer(x)
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    assert_close(layer(x), expected)
    assert seen[0].shape == (2, 12, 6) and seen[0].is_contiguous()
    assert_close(weight_norm(layer)(x), expected)
    assert_close(torch.vmap(layer)(x[:, None])[:, 0], expected)
    assert len(convolved) >= 3


@pytest.mark.parametrize(
    ("shape", "count"), [((2, 12), 1), ((2, 13), 0), ((1, 24), 0), ((24,), 0), ((3, 2, 4), 0)], ids=str
)
def test_graphs_convolve_where_the_layout_is_kept(shape: tuple[int, ...], count: int, fresh_dynamo: None) -> None:
    layer, x = Linear(8, 6), torch.randn(*shape, 8)
    targets = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        targets.extend(getattr(node.target, "__name__", "") for node in graph.graph.nodes)
        return graph

    assert_close(torch.compile(layer, fullgraph=True, backend=backend)(x), layer(x))
    told_apart = hasattr(torch.compiler, "is_exporting")  # torch 2.6 does not tell a compiler from an export
    assert targets.count("conv2d") == count * told_apart


def test_open_sizes_are_not_decided_about(fresh_dynamo: None) -> None:
    layer, graphs = Linear(8, 6), []
    compiled = torch.compile(
        layer, fullgraph=True, dynamic=True, backend=lambda graph, _: graphs.append(graph) or graph
    )
    for tokens in (12, 13, 40, 3, 7):
        x = torch.randn(2, tokens, 8)
        assert_close(compiled(x), layer(x))
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ATTENTIONS)
def test_projections_of_every_attention_are_of_this_kind(name: str) -> None:
    attn = create_attention(name, 16, num_heads=2)
    others = {path for path, module in attn.named_modules() if type(module) is nn.Linear}
    assert all(path.startswith("gate.") for path in others)
    assert any(type(module) is Linear for module in attn.modules())


@pytest.mark.parametrize("name", FAST)
def test_all_large_layers_of_the_models_are_of_this_kind(name: str) -> None:
    model = timm.create_model(name, **small_args(name))
    others = {path for path, module in model.named_modules() if type(module) is nn.Linear}
    assert {path for path in others if ".gate." not in path} == {"head"}
    assert pickle.loads(pickle.dumps(model)).state_dict().keys() == model.state_dict().keys()
