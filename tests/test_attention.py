"""The contract of the attention mechanisms, over every name in ``ATTENTIONS``."""

import copy
import functools
import inspect
import io
import warnings
from typing import Any

import pytest
import torch
from small_models import HALF_ERROR, enliven, gradients, loss_of, relative_error, through_file
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from soft_models.attention import ATTENTIONS, attention_options, create_attention

over_attentions = pytest.mark.parametrize("name", sorted(ATTENTIONS))

DIM, HEADS = 24, 3
MAP = (9, 11)  # height and width: different, and 99 pixels are no power of two
QUADRATIC = {"softmax"}  # by definition
# Options under which the output is the explicit weights times the values, for attentions that have them.
LINEAR = {"clamp": False}


def build(name: str, **kwargs: Any) -> nn.Module:
    """Attention of weights under which every part matters, in eval mode."""
    return enliven(create_attention(name, DIM, num_heads=HEADS, **kwargs).eval())


def build_with(name: str, options: dict[str, Any]) -> nn.Module:
    """As :func:`build`, with those of the options that the attention has."""
    return build(name, **{key: value for key, value in options.items() if key in attention_options(name)})


@functools.cache
def shared(name: str) -> nn.Module:
    """One attention for the tests that change nothing in it."""
    return build(name)


def tokens(batch: int = 2, prefix: int = 0, feat_size: tuple[int, int] = MAP) -> Tensor:
    shape = (batch, prefix + feat_size[0] * feat_size[1], DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def close(actual: Tensor, expected: Tensor, what: str, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Compare, with an absolute tolerance that is relative to the largest entry where that exceeds 1."""
    atol *= max(1.0, expected.detach().abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def check_gradients(attn: nn.Module) -> None:
    """Every parameter must have a gradient that is finite and does something."""
    assert [key for key, gradient in gradients(attn).items() if not gradient.any()] == [], "zero"


def projection_of_values(attn: nn.Module) -> nn.Linear:
    """The layer whose last channels are the values: the last one before the output projection."""
    return [module for name, module in attn.named_children() if isinstance(module, nn.Linear) and name != "proj"][-1]


# Construction.


@over_attentions
def test_attention_takes_the_common_arguments(name: str) -> None:
    assert {"dim", "num_heads", "qkv_bias", "proj_drop", "device", "dtype"} <= attention_options(name)
    defaults = {key: p.default for key, p in inspect.signature(ATTENTIONS[name]).parameters.items()}
    assert (defaults["num_heads"], defaults["qkv_bias"], defaults["proj_drop"]) == (8, True, 0.0)
    with_bias, without = (
        sum(p.numel() for p in build(name, qkv_bias=bias).parameters() if p.ndim == 1) for bias in (True, False)
    )
    assert with_bias > without, "qkv_bias must be used"


@over_attentions
def test_width_not_divisible_by_heads_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"dim must be divisible by .*num_heads.*dim=24.*num_heads=0"):
        create_attention(name, 24, num_heads=0)
    with pytest.raises(ValueError, match=r"dim must be divisible by .*num_heads.*dim=24.*num_heads=5"):
        create_attention(name, 24, num_heads=5)


@over_attentions
def test_unknown_keyword_is_a_type_error(name: str) -> None:
    with pytest.raises(TypeError, match="proj_dorp"):
        create_attention(name, DIM, proj_dorp=0.1)


def test_unknown_name_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"unknown attention 'sfot'; choose one of \['.*'softmax'.*\]"):
        create_attention("sfot", DIM)
    with pytest.raises(ValueError, match="unknown attention 'sfot'"):
        attention_options("sfot")


@over_attentions
def test_device_and_dtype_reach_every_tensor(name: str) -> None:
    attn = create_attention(name, DIM, num_heads=HEADS, device="meta", dtype=torch.float64)
    tensors = attn.state_dict()
    assert [key for key, t in tensors.items() if not t.is_meta] == []
    assert [key for key, t in tensors.items() if t.is_floating_point() and t.dtype != torch.float64] == []
    assert attn(torch.empty(2, 99, DIM, device="meta", dtype=torch.float64), MAP).shape == (2, 99, DIM)


@over_attentions
def test_projection_dropout_acts_in_training_only(name: str) -> None:
    attn, x = build(name, proj_drop=0.5), tokens()
    attn.load_state_dict(shared(name).state_dict())
    close(attn(x, MAP), shared(name)(x, MAP), "output in eval mode")
    attn.train()
    share = (attn(x, MAP) == 0).float().mean().item()
    assert 0.4 < share < 0.6, f"share of dropped outputs {share:.3f}, rate 0.5"


# Output.


@over_attentions
@pytest.mark.parametrize("feat_size", [MAP, (11, 9), (1, 1), (1, 13), (3, 2)])
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_output_has_the_shape_of_the_input(name: str, feat_size: tuple[int, int], prefix: int) -> None:
    x = tokens(2, prefix, feat_size)
    before = x.clone()
    output = shared(name)(x, feat_size)
    assert output.shape == x.shape
    assert output.isfinite().all()
    assert torch.equal(x, before), "the input must not change"


@over_attentions
def test_prefix_token_takes_part(name: str) -> None:
    x = tokens(prefix=1)
    output = shared(name)(x, MAP)
    moved = x.clone()
    moved[:, 0] += 1.0
    changed = (shared(name)(moved, MAP) - output).abs().amax(dim=(0, 2))
    assert changed[0] > 1e-3, "the token's own output must change"
    assert changed[1:].max() > 1e-5, "the pixels must see the token"


@over_attentions
def test_every_pixel_is_seen(name: str) -> None:
    x = tokens(1).requires_grad_()
    output = shared(name)(x, MAP)
    (gradient,) = torch.autograd.grad(loss_of(output[:, :1]), x)
    unseen = (gradient[0].abs().amax(dim=1) == 0).nonzero().flatten().tolist()
    # Where features are rectified a few pairs may be orthogonal.
    assert len(unseen) < 5, f"pixels without influence on the first output: {unseen}"


@over_attentions
def test_input_need_not_be_contiguous(name: str) -> None:
    x = tokens()
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    close(shared(name)(strided, MAP), shared(name)(x, MAP), "output")


@over_attentions
def test_batch_equals_its_images_one_by_one_and_permuted(name: str) -> None:
    x = tokens(3)
    x = torch.stack([1.5 * x[0], 0.05 * x[1], x[2, :1].expand_as(x[2])])
    together = shared(name)(x, MAP)
    order = torch.tensor([2, 0, 1])
    close(shared(name)(x[order], MAP), together[order], "output of the permuted batch")
    for i in range(3):
        close(shared(name)(x[i : i + 1], MAP), together[i : i + 1], f"output of image {i} alone")


@over_attentions
def test_eval_is_deterministic_and_keeps_nothing(name: str) -> None:
    attn, x = build(name), tokens()
    attributes = {path: set(vars(module)) for path, module in attn.named_modules()}
    buffers = {key: value.clone() for key, value in attn.state_dict().items()}
    close(attn(x, MAP), attn(x, MAP), "output", rtol=1e-6, atol=1e-6)
    assert {path: set(vars(module)) for path, module in attn.named_modules()} == attributes
    assert [key for key, value in attn.state_dict().items() if not torch.equal(value, buffers[key])] == []


@over_attentions
def test_state_dict_round_trip(name: str) -> None:
    other = create_attention(name, DIM, num_heads=HEADS).eval()
    other.load_state_dict(shared(name).state_dict())
    close(other(tokens(), MAP), shared(name)(tokens(), MAP), "output")


@over_attentions
def test_state_dict_does_not_depend_on_the_map(name: str) -> None:
    attn = build(name)
    attn(tokens(), MAP)
    shapes = {key: value.shape for key, value in attn.state_dict().items()}
    attn(tokens(feat_size=(4, 17)), (4, 17))
    assert {key: value.shape for key, value in attn.state_dict().items()} == shapes


# Number formats and gradients.


@over_attentions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtype_of_the_input_is_kept_and_every_parameter_gets_a_gradient(name: str, dtype: torch.dtype) -> None:
    attn = copy.deepcopy(shared(name)).to(dtype).train()
    x = tokens(prefix=1).to(dtype).requires_grad_()
    output = attn(x, MAP)
    assert output.dtype == dtype
    loss_of(output).backward()
    check_gradients(attn)
    assert x.grad is not None
    assert x.grad.isfinite().all(), "gradient of the input"


@over_attentions
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_near_float32(name: str, dtype: torch.dtype, autocast: bool) -> None:
    attn, x = shared(name), tokens()
    with torch.no_grad():
        expected = attn(x, MAP)
        if autocast:
            with torch.autocast("cpu", dtype):
                output = attn(x, MAP)
        else:
            output = copy.deepcopy(attn).to(dtype)(x.to(dtype), MAP)
    assert output.dtype == dtype
    error = relative_error(output, expected)
    assert error < HALF_ERROR, f"relative error {error:.4f}"


@over_attentions
@pytest.mark.parametrize("value", [0.0, 0.7, -30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equal_tokens_are_finite_with_finite_gradients(name: str, dtype: torch.dtype, value: float) -> None:
    attn = copy.deepcopy(shared(name)).to(dtype)
    x = torch.full((2, 99, DIM), value, dtype=dtype).requires_grad_()
    output = attn(x, MAP)
    assert output.isfinite().all(), "output"
    loss_of(output).backward()
    infinite = [key for key, p in attn.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not infinite, f"parameters without a finite gradient: {infinite}"
    assert x.grad is not None
    assert x.grad.isfinite().all(), "gradient of the input"


# The explicit weights.


@over_attentions
@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("feat_size", [MAP, (5, 3)])
def test_output_is_the_attention_matrix_times_the_values(name: str, feat_size: tuple[int, int], prefix: int) -> None:
    attn = build_with(name, LINEAR).double()
    x = tokens(2, prefix, feat_size).double()
    seen: dict[str, Tensor] = {}
    attn.proj.register_forward_pre_hook(lambda _, args: seen.update(merged=args[0]))
    attn(x, feat_size)
    values = projection_of_values(attn)(x)[..., -seen["merged"].shape[-1] :].unflatten(-1, (HEADS, -1)).transpose(1, 2)
    merged = seen["merged"].unflatten(-1, (HEADS, -1)).transpose(1, 2)  # (B, h, N, d)
    matrix = attn.attention_matrix(x, feat_size)
    assert matrix.shape == (2, HEADS, x.shape[1], x.shape[1])
    close(matrix @ values, merged, "output before the projection", rtol=1e-8, atol=1e-8)


@over_attentions
@pytest.mark.parametrize("prefix", [0, 1])
def test_chosen_rows_are_rows_of_the_attention_matrix(name: str, prefix: int) -> None:
    attn, x = copy.deepcopy(shared(name)).double(), tokens(prefix=prefix).double()
    rows = torch.tensor([0, 98, 7, 7])
    matrix = attn.attention_matrix(x, MAP)
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with context:
            close(attn.attention_matrix(x, MAP, rows), matrix[:, :, rows], "rows", rtol=1e-9, atol=1e-9)


@over_attentions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_matrix_in_half_precision_is_near_float32(name: str, dtype: torch.dtype) -> None:
    expected = shared(name).attention_matrix(tokens(), MAP)
    matrix = copy.deepcopy(shared(name)).to(dtype).attention_matrix(tokens().to(dtype), MAP)
    with torch.autocast("cpu", dtype):
        under_autocast = shared(name).attention_matrix(tokens().to(dtype), MAP)
    for found in (matrix, under_autocast):
        error = relative_error(found, expected)
        assert error < 3 * HALF_ERROR, f"relative error {error:.4f}"


# Cost.


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("name", sorted(set(ATTENTIONS) - QUADRATIC))
def test_four_times_the_pixels_cost_four_times_as_much(name: str) -> None:
    attn = create_attention(name, DIM, num_heads=HEADS, device="meta")
    costs, sizes = [], []
    for feat_size in ((40, 72), (80, 144)):
        x = torch.empty(1, feat_size[0] * feat_size[1], DIM, device="meta")
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            attn(x, feat_size)
        costs.append(counter.get_total_flops())
        with torch.no_grad(), LargestTensor() as largest:
            attn(x, feat_size)
        sizes.append(largest.elements)
    assert costs[1] <= 4.01 * costs[0], f"{costs[1] / costs[0]:.2f} times the operations"
    assert sizes[1] <= 4.01 * sizes[0], f"{sizes[1] / sizes[0]:.2f} times the largest tensor"


@pytest.mark.parametrize("name", sorted(ATTENTIONS))
def test_chosen_rows_of_the_weights_need_no_square(name: str) -> None:
    feat_size, rows = (40, 72), torch.tensor([5])
    attn, x = create_attention(name, DIM, num_heads=HEADS, device="meta"), torch.empty(1, 40 * 72, DIM, device="meta")
    with torch.no_grad(), LargestTensor() as largest:
        attn.attention_matrix(x, feat_size, rows)
    assert largest.elements < (40 * 72) ** 2 / 10


# Compilers.


@over_attentions
@pytest.mark.parametrize("training", [True, False])
def test_compiles_without_graph_breaks(name: str, training: bool, fresh_dynamo: None) -> None:
    attn = build(name).train(training)
    compiled = torch.compile(copy.deepcopy(attn), fullgraph=True, backend="eager")
    x, y = tokens(prefix=1).requires_grad_(), tokens(prefix=1).requires_grad_()
    expected, actual = attn(x, MAP), compiled(y, MAP)
    close(actual, expected, "output")
    loss_of(expected).backward()
    loss_of(actual).backward()
    close(y.grad, x.grad, "gradient of the input", rtol=1e-4, atol=1e-4)


@over_attentions
@pytest.mark.parametrize(
    "others", [[(5, MAP), (3, MAP)], pytest.param([(2, (10, 13)), (2, (12, 14))], marks=pytest.mark.slow)], ids=str
)
def test_another_batch_or_map_compiles_once_more_at_most(
    name: str, others: list[tuple[int, tuple[int, int]]], fresh_dynamo: None
) -> None:
    attn = build(name)
    counter = CompileCounter()
    compiled = torch.compile(attn, backend=counter, fullgraph=True)
    with torch.no_grad():
        for batch, feat_size in [(2, MAP), *others]:
            x = tokens(batch, 0, feat_size)
            close(compiled(x, feat_size), attn(x, feat_size), f"output of a batch of {batch} with a map of {feat_size}")
    assert counter.frame_count <= 2, "graphs"


@over_attentions
def test_exported_program_takes_other_batches_and_survives_a_file(name: str) -> None:
    attn = build(name)
    batch = torch.export.Dim("batch", min=1, max=8)
    program = torch.export.export(attn, (tokens(prefix=1), MAP), dynamic_shapes=({0: batch}, (None, None)))
    program = through_file(program)
    with torch.no_grad():
        for count in (1, 8):
            x = tokens(count, prefix=1)
            close(program.module()(x, MAP), attn(x, MAP), f"output of a batch of {count}")


@pytest.mark.parametrize(("name", "options"), [("cosformer", {"causal": True}), ("vicinity", {"clamp": False})])
def test_other_forms_compile_export_and_script_with_equal_outputs(
    name: str, options: dict[str, Any], fresh_dynamo: None
) -> None:
    attn = build(name, **options)
    shapes = {"x": {0: torch.export.Dim("batch", min=1, max=8)}, "feat_size": (None, None)}
    exported = torch.export.export(attn, (tokens(), MAP), dynamic_shapes=shapes).module()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        for graph in (torch.compile(attn, fullgraph=True, backend="eager"), exported, torch.jit.script(attn)):
            for batch in (1, 5):
                close(graph(tokens(batch), MAP), attn(tokens(batch), MAP), f"output of a batch of {batch}")


@over_attentions
@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscript_under_autocast_holds_large_sums(name: str, how: str) -> None:
    attn, feat_size = build(name), (56, 56)
    x = 10 * tokens(1, 0, feat_size)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if how == "script":
            graph = torch.jit.script(attn)
        else:
            graph = torch.jit.trace(Fixed(attn, feat_size), x, check_trace=False)
        for _ in range(3):  # the first calls may run another graph than the later ones
            with torch.autocast("cpu", torch.float16):
                output = graph(x, feat_size) if how == "script" else graph(x)
            assert relative_error(output, attn(x, feat_size)) < HALF_ERROR


class Fixed(nn.Module):
    """An attention for maps of one size: a trace takes tensors alone."""

    def __init__(self, attn: nn.Module, feat_size: tuple[int, int]) -> None:
        super().__init__()
        self.attn, self.feat_size = attn, feat_size

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, self.feat_size)


@over_attentions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_is_built_under_a_half_default(name: str, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        attn = create_attention(name, DIM, num_heads=HEADS)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {tensor.dtype for tensor in attn.state_dict().values()} == {dtype}
    assert attn(tokens().to(dtype), MAP).isfinite().all()


@over_attentions
def test_scripted_module_equals_eager_for_other_maps(name: str) -> None:
    attn = build(name)
    stream = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        torch.jit.save(torch.jit.script(attn), stream)
        stream.seek(0)
        scripted = torch.jit.load(stream)
        for batch, prefix, feat_size in ((2, 0, MAP), (3, 1, (4, 17))):
            x = tokens(batch, prefix, feat_size)
            close(scripted(x, feat_size), attn(x, feat_size), f"output for a map of {feat_size}")


@over_attentions
def test_copies_are_independent(name: str) -> None:
    attn, x = build(name), tokens()
    expected = attn(x, MAP)
    copied = copy.deepcopy(attn)
    close(copied(x, MAP), expected, "output of the copy")
    with torch.no_grad():
        next(copied.parameters()).zero_()
    close(attn(x, MAP), expected, "output after a change to the copy")
