"""The contract of the models, over the registered names: one name of each family, and every name with ``--slow``.

Facts that differ between families (strides, number of maps, layers of normalisation) are read from the models' own
metadata. Most tests build a small model of the family (:func:`small`), those called "full" the registered one.
"""

import copy
import functools
import inspect
import io
import itertools
import json
import operator
import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from timm.models import PretrainedCfg
from timm.models._hub import save_for_hf
from timm.optim import create_optimizer_v2
from timm.utils import reparameterize_model
from timm.utils.model import freeze_batch_norm_2d
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode
from torchvision.ops import FeaturePyramidNetwork
from zoo import family_names, registered_names

from soft_models.attention import ATTENTIONS
from soft_models.pyramid import PyramidTransformer

FAST = family_names()
over_families = pytest.mark.parametrize("name", FAST)
over_names = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in registered_names()]
)

SIZE = (48, 80)  # pixels: not square, no multiples of 32
CLASSES = 10
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF_ERROR = 0.02  # of the norm: what half precision may cost
PYRAMID: dict[str, Any] = {"embed_dims": (16, 32, 48, 64), "depths": (1, 1, 2, 1), "num_heads": (1, 2, 3, 4)}
VIT: dict[str, Any] = {"embed_dim": 48, "depth": 3, "num_heads": 3}
BLOCK = re.compile(r"(?:^|\.)blocks\.\d+$")

# Size: parameters in millions, multiply-adds in billions at 224 x 224 without the iterative inverse.
COUNTS = {
    "tiny": (12.96, 1.95),
    "small": (23.97, 3.38),
    "medium": (45.58, 7.46),
    "large": (64.42, 11.33),
    "huge": (86.76, 16.15),
}


@functools.cache
def full(name: str) -> nn.Module:
    """The registered model on the meta device: for its metadata."""
    return timm.create_model(name, device="meta").eval()


def small_args(name: str) -> dict[str, Any]:
    """Constructor arguments that make a model of the family of ``name`` small."""
    strides = {info["reduction"] for info in full(name).feature_info}
    return {"img_size": 64, "num_classes": CLASSES, **(PYRAMID if len(strides) > 1 else VIT)}


def small(name: str, **kwargs: Any) -> nn.Module:
    """A small model of the family of ``name``, in eval mode, of random weights under which every part matters."""
    model = timm.create_model(name, **(small_args(name) | kwargs)).eval()
    return enliven(model)


@functools.cache
def shared(name: str) -> nn.Module:
    """One small model for the tests that change nothing in it."""
    return small(name)


@torch.no_grad()
def enliven(model: nn.Module) -> nn.Module:
    """Random weights of ordinary size: fresh ones leave attention flat and biases zero, which hides faults.

    Each tensor's values depend on its name and shape alone, also inside a feature extractor.
    """
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        seed = zlib.crc32(name.removeprefix("model.").encode())
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
        if name.endswith("num_batches_tracked"):
            continue
        if name.endswith("running_var"):
            tensor.copy_(0.5 + noise.square())
        elif name.endswith((".bias", "running_mean")):
            tensor.copy_(0.1 * noise)
        elif tensor.ndim < 2:
            tensor.copy_(1.0 + 0.1 * noise)
        else:
            tensor.copy_(noise * (0.5 if len(tensor) == 1 else tensor[0].numel() ** -0.5))
    return model


def few_newton_steps(model: nn.Module) -> nn.Module:
    """The same model with few steps of an iterative inverse, whose number only makes compilers slow."""
    for module in model.modules():
        if hasattr(module, "newton_iters"):
            module.newton_iters = 3
    return model


def images(batch: int = 2, size: tuple[int, int] = SIZE, chans: int = 3) -> Tensor:
    return torch.randn(batch, chans, *size, generator=torch.Generator().manual_seed(2))


def map_sizes(model: nn.Module, size: tuple[int, int]) -> list[tuple[int, int]]:
    """Height and width of every map, after the strides that the model gives: rounded up, so that nothing is cropped."""
    return [(-(-size[0] // info["reduction"]), -(-size[1] // info["reduction"])) for info in model.feature_info]


def shapes(maps: list[Tensor]) -> list[tuple[int, int]]:
    return [(y.shape[-2], y.shape[-1]) for y in maps]


def close(actual: Tensor, expected: Tensor, what: str, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal but for the rounding of matrix products, which depends on how memory is aligned."""
    close(actual, expected, what, rtol=1e-5, atol=1e-5)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def loss_of(*outputs: Tensor) -> Tensor:
    """A sum with random weights: a plain one is constant behind a layer normalisation."""
    generator = torch.Generator().manual_seed(3)
    return sum(((y * torch.randn(y.shape, generator=generator).to(y.dtype)).sum() for y in outputs), torch.zeros(()))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter; fails with the names of those that have none or one that is not finite."""
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert not without, f"parameters without a gradient: {without}"
    infinite = [name for name, p in model.named_parameters() if not p.grad.isfinite().all()]
    assert not infinite, f"parameters with a gradient that is not finite: {infinite}"
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if BLOCK.search(name)}


def save(model: nn.Module, folder: Path) -> str:
    path = folder / "weights.pth"
    torch.save(model.state_dict(), path)
    return str(path)


def load(name: str, file: str, **kwargs: Any) -> nn.Module:
    """Weights in a file of ``CLASSES`` classes through timm's pretrained path, which adapts head and channels."""
    overlay = {"file": file, "num_classes": CLASSES}
    arguments = small_args(name) | kwargs
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **arguments).eval()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Size and cost.


@pytest.mark.parametrize("family", ["soft", "soft_norm"])
@pytest.mark.parametrize("size", COUNTS)
def test_parameter_count_is_the_published_one(family: str, size: str) -> None:
    count = sum(p.numel() for p in full(f"{family}_{size}").parameters())
    assert count / 1e6 == pytest.approx(COUNTS[size][0], rel=1e-3), f"{family}_{size}: {count} parameters"


@pytest.mark.parametrize("family", ["soft", "soft_norm"])
@pytest.mark.parametrize(
    "size", [pytest.param(s, marks=() if s in ("tiny", "small") else pytest.mark.slow) for s in COUNTS]
)
def test_multiply_adds_are_the_published_ones(family: str, size: str) -> None:
    model = timm.create_model(f"{family}_{size}", device="meta", inverse="solve").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, 3, 224, 224, device="meta"))
    count = counter.get_total_flops() / 2e9  # two operations for each multiply-add
    published = COUNTS[size][1]
    assert 0.95 * published <= count <= 1.02 * published, f"{count:.3f} G multiply-adds, published {published} G"


# The registered models, full.


@over_names
def test_full_model_trains_every_parameter(name: str) -> None:
    model = timm.create_model(name, img_size=64, num_classes=7).train()
    logits = model(images(size=(64, 96)))
    assert logits.shape == (2, 7)
    assert logits.isfinite().all()
    loss_of(logits).backward()
    gradients(model)


@over_names
def test_full_model_gives_the_maps_of_its_metadata(name: str) -> None:
    model = timm.create_model(name, features_only=True).eval()
    with torch.no_grad():
        maps = model(images(1))
    assert [y.shape[1] for y in maps] == model.feature_info.channels()
    assert shapes(maps) == [(-(-SIZE[0] // r), -(-SIZE[1] // r)) for r in model.feature_info.reduction()]


@over_names
def test_metadata_is_of_the_model(name: str) -> None:
    model, cfg = full(name), full(name).pretrained_cfg
    modules = dict(model.named_modules())
    strides = [info["reduction"] for info in model.feature_info]
    assert strides == [4, 8, 16, 32] or set(strides) == {16}, strides
    assert {info["module"] for info in model.feature_info} <= modules.keys()
    assert modules[cfg["first_conv"]].weight.shape[1] == model.in_chans == cfg["input_size"][0]
    assert modules[cfg["classifier"]] is model.get_classifier()
    assert model.get_classifier().weight.shape == (model.num_classes, model.head_hidden_size)
    assert model.num_classes == cfg["num_classes"] == 1000
    assert getattr(model, "output_fmt", "NCHW") == "NCHW"
    assert list(modules)[-1] == cfg["classifier"], "the classifier must be registered last"


@pytest.mark.slow
@over_families
@pytest.mark.parametrize(
    "size", [(256, 832), (832, 256), (800, 1216), (223, 223), (225, 225), (230, 198), (300, 500), (256, 320)]
)
def test_full_model_takes_any_size(name: str, size: tuple[int, int]) -> None:
    model = timm.create_model(name).eval()
    with torch.no_grad():
        final, maps = model.forward_intermediates(images(1, size))
        logits = model.forward_head(final)
    assert logits.isfinite().all(), "logits"
    assert all(y.isfinite().all() for y in maps), "maps"
    assert shapes(maps) == map_sizes(model, size)


# Entry points.


@over_names
@pytest.mark.parametrize(
    "keywords",
    [
        {"pretrained_cfg": {"num_classes": 7}},
        {"pretrained_cfg": PretrainedCfg(num_classes=7)},
        {"pretrained_cfg_overlay": {"num_classes": 7}},
        {"cache_dir": None, "checkpoint_path": "", "num_classes": 7},
        {"scriptable": True, "exportable": True, "no_jit": True, "num_classes": 7},
    ],
    ids=["dict", "object", "overlay", "empty", "flags"],
)
def test_create_model_takes_the_keywords_of_timm(name: str, keywords: dict[str, Any]) -> None:
    model = timm.create_model(name, device="meta", **keywords)
    assert model.num_classes == 7
    assert model.get_classifier().weight.shape[0] == 7


@over_names
def test_entry_point_takes_what_timm_passes(name: str) -> None:
    entry_point = timm.model_entrypoint(name)
    model = entry_point(
        pretrained=False, pretrained_cfg=None, pretrained_cfg_overlay=None, cache_dir=None, device="meta"
    )
    assert model.pretrained_cfg["architecture"] == name


@over_names
def test_pretrained_without_weights_is_an_error(name: str) -> None:
    if name in timm.list_models(pretrained=True):
        pytest.skip("has weights")
    with pytest.raises((RuntimeError, ValueError), match=rf"(?i)no (pretrained )?weights .*{name}"):
        timm.create_model(name, pretrained=True, device="meta")


@over_names
def test_unknown_argument_is_a_type_error(name: str) -> None:
    with pytest.raises(TypeError, match="drop_pth"):
        timm.create_model(name, drop_pth=0.1, device="meta")


@over_names
def test_unknown_tag_is_an_error(name: str) -> None:
    with pytest.raises(RuntimeError, match="tag"):
        timm.create_model(f"{name}.bogus", device="meta")


# Results do not depend on what should not matter.


@over_names
def test_an_image_is_independent_of_its_batch_mates(name: str) -> None:
    model = shared(name)
    x = images(3)
    x = torch.stack([1.5 * x[0], 0.05 * x[1], torch.full_like(x[2], 0.7)])
    order = torch.tensor([2, 0, 1])
    with torch.no_grad():
        together = model(x)
        close(model(x[order]), together[order], "logits of the permuted batch", rtol=1e-5)
        for i in range(3):
            close(model(x[i : i + 1]), together[i : i + 1], f"logits of image {i} alone", rtol=1e-5)
    assert (together[0] - together[1]).abs().max() > 1e-2, "the images must matter"


@over_names
def test_eval_is_deterministic_and_leaves_its_input_alone(name: str) -> None:
    model, x = shared(name), images()
    before = x.clone()
    with torch.no_grad():
        same(model(x), model(x), "logits of the same images")
    assert torch.equal(x, before)


@over_names
def test_channels_last_gives_equal_logits(name: str) -> None:
    model, x = shared(name), images()
    strided = x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = model(x)
        close(model(strided), expected, "logits of a channels-last image")
        close(copy.deepcopy(model).to(memory_format=torch.channels_last)(strided), expected, "channels-last model")


@over_names
def test_forward_is_head_of_features(name: str) -> None:
    model, x = shared(name), images()
    with torch.no_grad():
        features = model.forward_features(x)
        same(model(x), model.forward_head(features), "logits from the features")
        logits = model.get_classifier()(model.forward_head(features, pre_logits=True))
        close(model(x), logits, "logits from the pre-logits")
    assert features.shape[-1 if features.ndim == 3 else 1] == model.num_features


# Number formats.


@over_names
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_forward_and_backward(name: str, dtype: torch.dtype) -> None:
    model = timm.create_model(name, **small_args(name)).eval()
    x = images()
    with torch.no_grad():
        expected = model(x)
    model = model.to(dtype)
    logits = model(x.to(dtype))
    assert logits.dtype == dtype
    error = relative_error(logits, expected)
    assert error < HALF_ERROR, f"logits: relative error {error:.4f} in {dtype}"
    model.train()
    model.zero_grad()
    loss_of(model(x.to(dtype))).backward()
    assert {gradient.dtype for gradient in gradients(model).values()} == {dtype}


@over_names
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_gives_its_dtype_and_float32_gradients(name: str, dtype: torch.dtype) -> None:
    model = timm.create_model(name, **small_args(name)).eval()
    x = images()
    with torch.no_grad():
        expected = model(x)
    with torch.autocast("cpu", dtype):
        logits = model(x)
    assert logits.dtype == dtype
    error = relative_error(logits, expected)
    assert error < HALF_ERROR, f"logits: relative error {error:.4f} under autocast to {dtype}"
    loss_of(logits).backward()
    assert {gradient.dtype for gradient in gradients(model).values()} == {torch.float32}


@over_names
@pytest.mark.parametrize("value", [0.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constant_images_are_finite_with_finite_gradients(name: str, dtype: torch.dtype, value: float) -> None:
    model = copy.deepcopy(shared(name)).to(dtype)
    x = torch.full((2, 3, *SIZE), value, dtype=dtype)
    for training in (False, True):
        model.train(training).zero_grad()
        logits = model(x)
        assert logits.isfinite().all(), f"logits, training={training}"
        loss_of(logits).backward()
        gradients(model)


@over_names
def test_device_and_dtype_reach_every_tensor(name: str) -> None:
    model = timm.create_model(name, device="meta", dtype=torch.bfloat16)
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    assert [key for key, t in tensors.items() if not t.is_meta] == []
    assert [key for key, t in tensors.items() if t.is_floating_point() and t.dtype != torch.bfloat16] == []


# Dropout and stochastic depth.


@over_names
def test_stochastic_depth_drops_whole_samples(name: str) -> None:
    model = small(name, drop_path_rate=0.5).train()
    calls: dict[str, int] = dict.fromkeys(blocks(model), 0)
    dropped = kept = 0

    def check(path: str, rate: float) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
        def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            nonlocal dropped, kept
            calls[next(block for block in calls if path.startswith(f"{block}."))] += 1
            for branch, out in zip(args[0], output, strict=True):
                if out.any():
                    close(out, branch / (1.0 - rate), f"kept branch of {path}")
                    kept += 1
                else:
                    dropped += 1

        return hook

    for path, module in model.named_modules():
        if type(module).__name__ == "DropPath":
            module.register_forward_hook(check(path, module.drop_prob))
    model(images(1).expand(8, -1, -1, -1))
    # The rate grows from 0 at the first block.
    assert list(calls.values()) == [0, *[2] * (len(calls) - 1)], f"branches under stochastic depth: {calls}"
    assert dropped, "no branch was dropped"
    assert kept, "no branch was kept"


@over_names
@pytest.mark.parametrize("option", ["drop_rate", "pos_drop_rate", "proj_drop_rate", "drop_path_rate"])
def test_drop_rates_act_in_training_only(name: str, option: str) -> None:
    if option not in inspect.signature(type(full(name)).__init__).parameters:
        pytest.skip(f"the family has no {option}")
    plain, model, x = shared(name), small(name, **{option: 0.5}), images(8)
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        same(model(x), plain(x), f"logits in eval mode with {option}")
        model.train()
        assert (model(x) - model(x)).abs().max() > 1e-2, f"{option} does not act in training"


@over_names
def test_projection_dropout_is_in_every_block(name: str) -> None:
    model = timm.create_model(name, device="meta", proj_drop_rate=0.25, **small_args(name))
    for path, block in blocks(model).items():
        rates = [module.p for module in block.modules() if isinstance(module, nn.Dropout) and module.p]
        assert len(rates) >= 2, f"attention and MLP of {path} must drop, got {rates}"
        assert set(rates) == {0.25}


# Input sizes.


@over_names
@pytest.mark.parametrize("size", [(32, 104), (104, 32), (47, 65), (58, 50), (76, 124), (64, 96)])
def test_any_size_gives_finite_logits_and_maps_rounded_up(name: str, size: tuple[int, int]) -> None:
    model = shared(name)
    with torch.no_grad():
        final, maps = model.forward_intermediates(images(size=size))
        logits = model.forward_head(final)
    assert logits.shape == (2, CLASSES)
    assert logits.isfinite().all(), "logits"
    assert all(y.isfinite().all() for y in maps), "maps"
    assert shapes(maps) == map_sizes(model, size)
    assert [y.shape[:2] for y in maps] == [(2, info["num_chs"]) for info in model.feature_info]


@over_names
@pytest.mark.parametrize("side", [32, 48, 64, 112])
def test_small_images_train_and_evaluate(name: str, side: int) -> None:
    model = small(name)
    x = images(2, (side, side))
    with torch.no_grad():
        assert model(x).isfinite().all(), "logits in eval mode"
    logits = model.train()(x)
    assert logits.isfinite().all(), "logits in training"
    loss_of(logits).backward()
    gradients(model)


@over_names
@pytest.mark.parametrize("size", [(31, 64), (64, 31), (8, 8), (1, 1)])
def test_images_below_the_minimum_work_or_are_refused_by_name(name: str, size: tuple[int, int]) -> None:
    model, x = shared(name), images(1, size)
    functions = (model, model.forward_features, model.forward_intermediates)
    with torch.no_grad():
        try:
            logits = model(x)
        except ValueError:
            for function in functions:
                with pytest.raises(ValueError, match=rf"at least 32 x 32 pixels, got {size[0]} x {size[1]}"):
                    function(x)
        else:
            assert logits.isfinite().all()
            assert shapes(model.forward_intermediates(x, intermediates_only=True)) == map_sizes(model, size)


@over_names
@pytest.mark.parametrize("height", [45, 46, 47, 48])
def test_no_row_or_column_of_pixels_is_cropped(name: str, height: int) -> None:
    x = images(1, (height, height + 15)).requires_grad_()
    first = shared(name).forward_intermediates(x, indices=[0], intermediates_only=True)[0]
    (gradient,) = torch.autograd.grad(loss_of(first), x)
    unseen_rows = (gradient.abs().amax(dim=(0, 1, 3)) == 0).nonzero().flatten().tolist()
    unseen_columns = (gradient.abs().amax(dim=(0, 1, 2)) == 0).nonzero().flatten().tolist()
    assert not unseen_rows, f"rows without influence on the first map: {unseen_rows} of {height}"
    assert not unseen_columns, f"columns without influence on the first map: {unseen_columns} of {height + 15}"


@over_names
def test_last_row_and_column_of_pixels_change_the_first_map(name: str) -> None:
    model, x = shared(name), images(1, (47, 61))
    with torch.no_grad():
        first = model.forward_intermediates(x, indices=[0], intermediates_only=True)[0]
        for index in ((..., -1, slice(None)), (..., -1)):
            perturbed = x.clone()
            perturbed[index] += 3.0
            changed = model.forward_intermediates(perturbed, indices=[0], intermediates_only=True)[0] - first
            assert changed[index].abs().max() > 1e-3, "the border of the map must follow the border of the image"


@over_names
def test_img_size_is_an_int_a_tuple_or_a_list(name: str) -> None:
    tables = [
        {key: p.shape for key, p in timm.create_model(name, device="meta", img_size=s).named_parameters()}
        for s in (96, (96, 96), [96, 96])
    ]
    assert tables[0] == tables[1] == tables[2]


@over_names
@pytest.mark.parametrize("size", [(32, 32), (48, 80), (96, 96), (132, 68)])
def test_set_input_size_gives_the_logits_of_a_dynamic_size(name: str, size: tuple[int, int]) -> None:
    model = small(name)
    x = images(size=size)
    with torch.no_grad():
        expected = model(x)
        model.set_input_size(size)
        actual = model(x)
        assert actual.isfinite().all(), "logits at the size that was set"
        stride = model.feature_info[0]["reduction"]
        if size[0] % stride == size[1] % stride == 0:  # a patch embedding makes no room for the padding of others
            close(actual, expected, "logits at the size that was set")
        assert model(images(size=(64, 64))).isfinite().all(), "another size still works"


@over_names
def test_set_input_size_equals_the_constructor(name: str) -> None:
    model = timm.create_model(name, **small_args(name))
    model.set_input_size((96, 160))
    other = timm.create_model(name, **(small_args(name) | {"img_size": (96, 160)}))
    assert {key: v.shape for key, v in model.state_dict().items()} == {
        key: v.shape for key, v in other.state_dict().items()
    }


# Feature maps.


@over_names
def test_features_equal_the_intermediates_of_the_full_model(name: str) -> None:
    model, x = shared(name), images()
    features = small(name, features_only=True)
    missing, unexpected = features.model.load_state_dict(model.state_dict(), strict=False)
    assert not missing, f"the classifier lacks {missing}"
    assert set(unexpected) <= {key for key in model.state_dict() if key.startswith(("head", "norm", "fc_norm"))}
    with torch.no_grad():
        maps = features(x)
        expected = model.forward_intermediates(x, intermediates_only=True)[-len(maps) :]
    for i, (actual, wanted) in enumerate(zip(maps, expected, strict=True)):
        same(actual, wanted, f"map {i}")


@over_names
@pytest.mark.parametrize("out_indices", [(0, 2), (-1,), [2, 1], (2, -3), 2])
def test_out_indices_come_in_order_of_execution_and_as_described(name: str, out_indices: Any) -> None:
    model = small(name, features_only=True, out_indices=out_indices)
    infos = shared(name).feature_info
    last = range(len(infos) - out_indices, len(infos)) if isinstance(out_indices, int) else out_indices
    chosen = sorted({i % len(infos) for i in last})
    with torch.no_grad():
        maps = model(images())
        expected = shared(name).forward_intermediates(images(), intermediates_only=True)
    assert model.feature_info.reduction() == [infos[i]["reduction"] for i in chosen]
    assert model.feature_info.channels() == [y.shape[1] for y in maps]
    for actual, index in zip(maps, chosen, strict=True):
        close(actual, expected[index], f"map {index}")


@over_names
@pytest.mark.parametrize("out_indices", [(99,), (-99,), (0, 99)])
def test_out_indices_out_of_range_are_refused(name: str, out_indices: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="out of range"):
        small(name, features_only=True, out_indices=out_indices)


@over_names
def test_no_out_indices_are_refused(name: str) -> None:
    with pytest.raises(ValueError):
        small(name, features_only=True, out_indices=())


@over_names
def test_final_map_is_the_pixels_of_the_features(name: str) -> None:
    model, x = shared(name), images()
    with torch.no_grad():
        final, maps = model.forward_intermediates(x, norm=True)
        features = model.forward_features(x)
    close(final, features, "features")
    H, W = map_sizes(model, SIZE)[-1]
    assert maps[-1].ndim == 4
    pixels = features.flatten(2).transpose(1, 2) if features.ndim == 4 else features[:, features.shape[1] - H * W :]
    close(maps[-1].flatten(2).transpose(1, 2), pixels, "last map, which holds no class token")


@over_names
def test_average_pooling_is_the_mean_of_the_final_map(name: str) -> None:
    model, x = copy.deepcopy(shared(name)), images()
    model.reset_classifier(CLASSES, "avg")
    with torch.no_grad():
        mean = model.forward_intermediates(x, norm=True, intermediates_only=True)[-1].mean(dim=(2, 3))
        expected = getattr(model, "fc_norm", nn.Identity())(mean)
        close(model.forward_head(model.forward_features(x), pre_logits=True), expected, "pre-logits")


@over_names
def test_maps_of_a_multiple_of_32_divide_exactly(name: str) -> None:
    with torch.no_grad():
        maps = shared(name).forward_intermediates(images(size=(64, 96)), intermediates_only=True)
    strides = [info["reduction"] for info in shared(name).feature_info]
    assert shapes(maps) == [(64 // stride, 96 // stride) for stride in strides]


@over_names
def test_feature_pyramid_network_takes_the_maps(name: str) -> None:
    model = small(name, features_only=True)
    with torch.no_grad():
        maps = {str(i): y for i, y in enumerate(model(images(size=(83, 125))))}
        merged = FeaturePyramidNetwork(model.feature_info.channels(), 24)(maps)
    assert [y.shape for y in merged.values()] == [(2, 24, *y.shape[2:]) for y in maps.values()]


@over_names
@pytest.mark.parametrize("indices", [None, 1, [0, -1]])
def test_stopping_early_changes_no_map(name: str, indices: Any) -> None:
    model, x = shared(name), images()
    with torch.no_grad():
        maps = model.forward_intermediates(x, indices=indices, intermediates_only=True)
        early = model.forward_intermediates(x, indices=indices, stop_early=True, intermediates_only=True)
    for i, (actual, expected) in enumerate(zip(early, maps, strict=True)):
        same(actual, expected, f"map {i}")


@over_names
def test_unknown_output_format_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"output_fmt.*'NCHW'"):
        shared(name).forward_intermediates(images(), output_fmt="NHWC")


# Every parameter is used.


@over_names
def test_no_subset_of_the_maps_leaves_a_parameter_unused(name: str) -> None:
    indices = range(len(shared(name).feature_info))
    for size in range(1, len(indices) + 1):
        for out_indices in itertools.combinations(indices, size):
            model = small(name, features_only=True, out_indices=out_indices).train()
            loss_of(*model(images(size=(32, 48)))).backward()
            without = [key for key, p in model.named_parameters() if p.grad is None]
            assert not without, f"out_indices={out_indices} leaves without a gradient: {without}"


@over_names
@pytest.mark.parametrize("options", [{"num_classes": 0}, {"global_pool": "avg"}, {"num_classes": 0, "global_pool": ""}])
def test_no_form_of_the_head_leaves_a_parameter_unused(name: str, options: dict[str, Any]) -> None:
    model = small(name, **options).train()
    loss_of(model(images())).backward()
    gradients(model)


def run_distributed(rank: int, folder: str, name: str, options: dict[str, Any]) -> None:
    """One of two processes: three steps, then both must hold the same parameters."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(small(name, **options).train(), find_unused_parameters=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        outputs = model(torch.randn(2, 3, *SIZE))
        optimizer.zero_grad()
        loss_of(*outputs if isinstance(outputs, list) else (outputs,)).backward()
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    torch.distributed.all_gather(both, flat)
    assert torch.equal(both[0], both[1]), "the processes hold different parameters"
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_classes": 0}, {"features_only": True}], ids=str)
@over_families
def test_two_processes_train_without_unused_parameters(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_distributed, (str(tmp_path), name, options), nprocs=2)


# Channels and heads.


@over_names
@pytest.mark.parametrize("chans", [1, 4, 12])
def test_other_channel_counts_run(name: str, chans: int) -> None:
    model = small(name, in_chans=chans)
    assert model.in_chans == chans
    with torch.no_grad():
        assert model(images(chans=chans)).isfinite().all()


@over_names
def test_gray_model_from_colour_weights_equals_the_colour_model(name: str, tmp_path: Path) -> None:
    gray = images(chans=1)
    model = load(name, save(shared(name), tmp_path), in_chans=1)
    assert model.in_chans == 1
    with torch.no_grad():
        close(model(gray), shared(name)(gray.expand(-1, 3, -1, -1)), "logits", rtol=0, atol=1e-4)


@over_names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reset_classifier(name: str, dtype: torch.dtype) -> None:
    model, x = copy.deepcopy(shared(name)).to(dtype).train(), images().to(dtype)
    model.reset_classifier(7)
    head = model.get_classifier()
    assert model.num_classes == head.out_features == 7
    assert head.weight.dtype == dtype
    assert head.training, "the new head must be in the model's mode"
    model.eval()
    with torch.no_grad():
        assert model(x).shape == (2, 7)
        model.reset_classifier(0)
        assert model.num_classes == 0
        pooled = model(x)
        assert pooled.shape == (2, model.num_features)
        features = model.forward_features(x)
        same(pooled, model.forward_head(features, pre_logits=True), "pre-logits")
        model.reset_classifier(0, "")
        assert model(x).shape == features.shape, "without pooling"


@over_names
def test_head_may_be_replaced_by_another_module(name: str) -> None:
    model = copy.deepcopy(shared(name))
    model.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(model.num_features, 3))
    assert model(images()).shape == (2, 3)


@over_names
def test_constructor_and_reset_refuse_an_unknown_pooling(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown global_pool 'maxx'; choose one of .*'avg'"):
        timm.create_model(name, device="meta", global_pool="maxx")
    with pytest.raises(ValueError, match=r"unknown global_pool 'maxx'; choose one of .*'avg'"):
        copy.deepcopy(full(name)).reset_classifier(7, "maxx")


# Optimisation.


@over_names
def test_layer_decay_has_every_parameter_once_and_grows_with_depth(name: str) -> None:
    model = timm.create_model(name, **small_args(name))
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
    names = {id(p): key for key, p in model.named_parameters()}
    scale = {names[id(p)]: group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    decay = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(scale) == len(names)

    def scales(prefix: str) -> set[float]:
        return {value for key, value in scale.items() if key.startswith(f"{prefix}.")}

    lowest = min(scale.values())
    assert scales(model.pretrained_cfg["first_conv"]) == {lowest}
    assert scales(model.pretrained_cfg["classifier"]) == {1.0}
    depth = [scales(path) for path in blocks(model)]
    assert all(len(values) == 1 for values in depth), f"a block must have one rate: {depth}"
    order = [min(values) for values in depth]
    assert order == sorted(order), f"rates must grow with depth: {order}"
    assert lowest <= order[0] < order[-1] < 1.0
    for key in scale:
        if "pos_embed" in key or key.endswith("token"):
            assert scale[key] == lowest, f"{key} must learn as slowly as the stem"
            assert decay[key] == 0.0, f"{key} must not decay"
        elif key.endswith(".bias") or dict(model.named_parameters())[key].ndim == 1:
            assert decay[key] == 0.0, f"{key} must not decay"
        else:
            assert decay[key] == 0.05, f"{key} must decay"
        if match := re.match(r"(.*\.)downsample\.", key):
            assert {scale[key]} == scales(f"{match[1]}blocks.0"), f"{key} must learn with the stage it feeds"


@over_names
def test_layer_decay_leaves_frozen_parameters_out(name: str) -> None:
    model = timm.create_model(name, **small_args(name))
    next(iter(blocks(model).values())).requires_grad_(False)
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
    grouped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert grouped == {id(p) for p in model.parameters() if p.requires_grad}
    loss_of(model.train()(images())).backward()
    optimizer.step()


@over_names
@pytest.mark.parametrize("features_only", [False, True])
def test_gradient_checkpointing_changes_no_gradient(name: str, features_only: bool) -> None:
    results = []
    for enable in (False, True):
        model = small(name, features_only=features_only).double().train()  # rounding is another matter
        inner = model.model if features_only else model
        inner.set_grad_checkpointing(enable)
        calls = [0]
        for block in blocks(inner).values():
            block.register_forward_pre_hook(lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1))
        outputs = model(images().double())
        loss_of(*outputs if features_only else (outputs,)).backward()
        assert calls[0] == (1 + enable) * len(blocks(inner)), f"calls of the {len(blocks(inner))} blocks"
        results.append((gradients(model), dict(model.named_buffers())))
    for key, gradient in results[0][0].items():
        close(results[1][0][key], gradient, f"gradient of {key}", rtol=1e-6, atol=1e-6)
    for key, buffer in results[0][1].items():
        close(results[1][1][key], buffer, f"buffer {key}, updated once")


@over_names
def test_gradient_checkpointing_is_switched_on_without_arguments_and_off(name: str) -> None:
    model, x = copy.deepcopy(shared(name)), images()
    expected = model(x)
    model.set_grad_checkpointing()
    close(model(x), expected, "logits in eval mode")
    model.set_grad_checkpointing(False)
    same(model(x), expected, "logits after switching off")


# Batch normalisation.


@over_names
def test_batch_of_one_trains_except_where_a_norm_sees_one_value(name: str) -> None:
    model = small(name)
    single = []
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.register_forward_hook(lambda _, args, __: single.append(args[0].shape[2:].numel() == 1))
    with torch.no_grad():
        assert model(images(1, (32, 32))).isfinite().all(), "eval mode always works"
    loss_of(model.train()(images(1, (64, 64)))).backward()
    gradients(model)
    if any(single):
        with pytest.raises(ValueError, match=r"more than 1 value per channel.*\[1, \d+, 1, 1\]"):
            model(images(1, (32, 32)))
    else:
        assert model(images(1, (32, 32))).isfinite().all()


@over_names
def test_batch_norm_may_be_synchronised_frozen_or_folded(name: str) -> None:
    model, x = shared(name), images()
    count = sum(isinstance(module, _BatchNorm) for module in model.modules())
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    assert sum(isinstance(module, nn.SyncBatchNorm) for module in synchronised.modules()) == count
    frozen = freeze_batch_norm_2d(copy.deepcopy(model))
    folded = reparameterize_model(model)
    for changed in (frozen, folded):
        assert not any(isinstance(module, _BatchNorm) for module in changed.modules())
    with torch.no_grad():
        expected = model(x)
        close(synchronised(x), expected, "logits with synchronised normalisation")
        close(frozen(x), expected, "logits with frozen normalisation")
        close(folded(x), expected, "logits with folded normalisation")


# Checkpoints.


@over_names
def test_checkpoint_of_a_classifier_loads_into_the_feature_extractor(name: str, tmp_path: Path) -> None:
    state = shared(name).state_dict()
    model = load(name, save(shared(name), tmp_path), features_only=True)
    own = {key.removeprefix("model."): value for key, value in model.state_dict().items()}
    assert set(own) <= set(state), f"not of the checkpoint: {set(own) - set(state)}"
    assert {key for key, value in own.items() if not torch.equal(value, state[key])} == set()
    left = set(state) - set(own)
    assert all(key.startswith(("head", "norm", "fc_norm")) for key in left), f"left out of the checkpoint: {left}"


@over_names
def test_checkpoint_with_another_class_count_loads_but_for_the_head(name: str, tmp_path: Path) -> None:
    state, file = shared(name).state_dict(), save(shared(name), tmp_path)
    model = load(name, file, num_classes=5)
    assert model.get_classifier().out_features == 5
    different = {key for key, value in model.state_dict().items() if value.shape != state[key].shape}
    assert different == {"head.weight", "head.bias"}
    for key in state.keys() - different:
        assert torch.equal(model.state_dict()[key], state[key]), key
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        timm.create_model(name, checkpoint_path=file, **(small_args(name) | {"num_classes": 5}))


@over_names
def test_checkpoint_of_one_image_size_loads_into_another(name: str, tmp_path: Path) -> None:
    square = small(name, img_size=224)
    model = load(name, save(square, tmp_path), img_size=(96, 160))
    square.set_input_size((96, 160))
    x = images(size=(96, 160))
    with torch.no_grad():
        close(model(x), square(x), "logits")


@over_names
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_checkpoint_path_gives_equal_logits(name: str, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        safetensors.torch.save_file(shared(name).state_dict(), file)
    else:
        torch.save({"state_dict": shared(name).state_dict()}, file)
    model = timm.create_model(name, checkpoint_path=str(file), **small_args(name)).eval()
    with torch.no_grad():
        same(model(images()), shared(name)(images()), "logits")


@over_names
def test_folder_for_the_hub_gives_the_model_back(name: str, tmp_path: Path) -> None:
    arguments = small_args(name) | {"img_size": (64, 96)}
    model = small(name, img_size=(64, 96))
    save_for_hf(model, str(tmp_path), model_args=arguments, safe_serialization=True)
    stored = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["model_args"]
    assert stored["img_size"] == [64, 96], "a list, which the constructor must take"
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        same(again(images()), model(images()), "logits")
    tuned = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=3, in_chans=1).eval()
    assert tuned(images(chans=1)).shape == (2, 3)


@over_names
def test_copies_and_pickles_give_equal_logits(name: str) -> None:
    model, x = shared(name), images()
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    unpickled = torch.load(stream, weights_only=False)
    with torch.no_grad():
        expected = model(x)
        same(unpickled(x), expected, "logits of the unpickled model")
        copied = copy.deepcopy(model)
        next(copied.parameters()).zero_()
        same(model(x), expected, "logits after a change to a copy")


@over_names
def test_model_built_on_meta_is_complete_after_loading(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, **small_args(name)).eval()
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    assert [key for key, t in tensors.items() if not t.is_meta] == []
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        model.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    for module in model.modules():
        if callable(initialise := getattr(module, "init_non_persistent_buffers", None)):
            initialise()
    model.load_state_dict(shared(name).state_dict())
    with torch.no_grad():
        close(model(images()), shared(name)(images()), "logits", rtol=1e-6, atol=1e-6)


@over_names
def test_init_weights_fills_a_model_built_on_meta(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, **small_args(name)).eval()
    torch.use_deterministic_algorithms(True)
    try:
        model.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    model.init_weights()
    assert [key for key, value in model.state_dict().items() if not value.isfinite().all()] == []
    fresh = timm.create_model(name, **small_args(name)).state_dict()
    for key, value in model.state_dict().items():
        if value.is_floating_point() and value.numel() > 500:
            assert value.std().item() == pytest.approx(fresh[key].std().item(), rel=0.25, abs=1e-6), f"spread of {key}"


# Compilers.


@over_families
@pytest.mark.parametrize(
    ("training", "checkpointing"),
    [
        (True, False),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
def test_compiles_without_graph_breaks(name: str, training: bool, checkpointing: bool, fresh_dynamo: None) -> None:
    model = few_newton_steps(small(name)).train(training)
    compiled_from = copy.deepcopy(model)
    compiled_from.set_grad_checkpointing(checkpointing)
    compiled = torch.compile(compiled_from, fullgraph=True, backend="eager")
    expected, actual = model(images()), compiled(images())
    close(actual, expected, "logits", rtol=1e-5)
    loss_of(expected).backward()
    loss_of(actual).backward()
    wanted = gradients(model)
    for key, gradient in gradients(compiled_from).items():
        close(gradient, wanted[key], f"gradient of {key}")


@pytest.mark.slow  # tens of seconds; the attentions alone are tested fast
@over_families
@pytest.mark.parametrize("other", [(5, SIZE), (2, (64, 96))], ids=["batch", "size"])
def test_another_batch_or_size_compiles_once_more_at_most(
    name: str, other: tuple[int, tuple[int, int]], fresh_dynamo: None
) -> None:
    model = few_newton_steps(small(name))
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    with torch.no_grad():
        compiled(images())
        assert counter.frame_count == 1, "graphs"
        x = images(*other)
        close(compiled(x), model(x), "logits", rtol=1e-5)
    assert counter.frame_count <= 2, "graphs"


@over_families
def test_exported_program_takes_other_batches_and_survives_a_file(name: str) -> None:
    model = few_newton_steps(small(name))
    batch = torch.export.Dim("batch", min=1, max=8)
    program = torch.export.export(model, (images(),), dynamic_shapes=({0: batch},))
    stream = io.BytesIO()
    torch.export.save(program, stream)
    stream.seek(0)
    program = torch.export.load(stream)
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
    foreign = [
        t
        for t in targets
        if not (isinstance(t, torch._ops.OpOverload) and t.namespace == "aten")
        and getattr(t, "__module__", "") != operator.getitem.__module__
    ]
    assert not foreign, f"operations that are not PyTorch's own: {foreign}"
    reloaded = program.module()
    with torch.no_grad():
        for count in (1, 8):
            close(reloaded(images(count)), model(images(count)), f"logits of a batch of {count}", rtol=1e-5)


@over_families
def test_traced_model_gives_equal_logits(name: str) -> None:
    model = few_newton_steps(small(name))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript, and tells of each shape that a trace fixes
        traced = torch.jit.trace(model, images(), check_trace=False)
        x = 0.5 * images().flip(0)
        close(traced(x), model(x), "logits", rtol=1e-5)


# The pyramid's own arguments.


def pyramid(**kwargs: Any) -> PyramidTransformer:
    return enliven(PyramidTransformer(**(PYRAMID | {"img_size": 64, "num_classes": CLASSES} | kwargs)).eval())


@pytest.mark.parametrize("place", ["attention", "stage4_attention"])
@pytest.mark.parametrize("attention", sorted(ATTENTIONS))
def test_pyramid_takes_every_attention(attention: str, place: str) -> None:
    model = pyramid(**{place: attention})
    with torch.no_grad():
        together = model(images())
        close(model(images()[1:]), together[1:], "logits of an image alone", rtol=1e-5)
    loss_of(model.train()(images())).backward()
    gradients(model)


@pytest.mark.parametrize("size", [(32, 32), (47, 65), (104, 32)])
@pytest.mark.parametrize(
    "options",
    [
        {"landmark_grid": None},
        {"landmark_grid": 3},
        {"landmark_grid": (2, 5)},
        {"landmark_grid": [2, 5]},
        {"landmarks": "conv"},
        {"landmarks": "conv", "landmark_grid": None},
        {"landmarks": "conv", "sr_ratios": (4, 4, 2, 1)},
        {"stage4_attention": "soft"},
        {"inverse": "newton", "newton_iters": 5},
        {"attention": "soft_norm"},
        {"attention": "soft_norm", "inverse": "newton"},
        {"local_kernels": (0, 0, 0)},
        {"global_pool": "avg"},
        {"act_layer": "relu"},
        {"act_layer": nn.SiLU},
        {"norm_layer": "layernorm"},
        {"norm_layer": nn.LayerNorm},
    ],
    ids=str,
)
def test_pyramid_options_take_any_size(options: dict[str, Any], size: tuple[int, int]) -> None:
    model = pyramid(**options)
    logits = model(images(size=size))
    assert logits.isfinite().all()
    loss_of(logits).backward()
    gradients(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"img_size": 31}, "img_size must be at least 32 x 32 pixels, got 31"),
        ({"img_size": (64, 16)}, r"img_size must be at least 32 x 32 pixels, got \(64, 16\)"),
        ({"embed_dims": (16, 32, 48)}, r"embed_dims needs 4 entries, one per stage, got \(16, 32, 48\)"),
        ({"depths": (1, 1, 1, 1, 1)}, "depths needs 4 entries"),
        ({"num_heads": (1, 2)}, "num_heads needs 4 entries"),
        ({"mlp_ratios": (4,)}, "mlp_ratios needs 4 entries"),
        ({"sr_ratios": (8, 4, 2)}, "sr_ratios needs 4 entries"),
        ({"local_kernels": (9, 5, 3, 3)}, "local_kernels needs 3 entries"),
        ({"num_heads": (3, 2, 3, 4)}, "dim must be divisible by num_heads, got dim=16, num_heads=3"),
        ({"global_pool": "tokens"}, r"unknown global_pool 'tokens'; choose one of \('token', 'avg', ''\)"),
        ({"attention": "sfot"}, r"unknown attention 'sfot'; choose one of \[.*'soft'.*\]"),
        ({"stage4_attention": "sofmax"}, r"unknown attention 'sofmax'; choose one of \[.*'softmax'.*\]"),
        ({"landmarks": "average"}, "unknown landmarks 'average'; choose 'avg' or 'conv'"),
        ({"landmark_grid": 0}, "landmark_grid must be positive, got 0"),
        ({"landmark_grid": (7, -1)}, r"landmark_grid must be positive, got \(7, -1\)"),
        ({"sr_ratios": (8, 0, 2, 1)}, "sr_ratio must be at least 1, got 0"),
        ({"local_kernels": (9, 4, 3)}, "local_kernel must be odd, or 0 for none, got 4"),
        ({"newton_iters": 1}, "newton_iters must be at least 2, got 1"),
        ({"newton_iters": 9}, "inverse='solve' takes no Newton steps, got newton_iters=9"),
        ({"act_layer": "gleu"}, "unknown act_layer 'gleu'; choose a name of timm's, such as 'gelu'"),
        ({"inverse": "sovle"}, "unknown inverse 'sovle'; choose 'newton' or 'solve'"),
        (
            {"attention": "softmax", "landmarks": "conv"},
            "'softmax' and 'softmax' has no landmarks, got landmarks='conv'",
        ),
        ({"attention": "softmax", "landmark_grid": 5}, "has no landmark_grid, got landmark_grid=5"),
        ({"attention": "softmax", "newton_iters": 9}, "has no newton_iters, got newton_iters=9"),
        ({"attention": "softmax", "inverse": "solve"}, "has no inverse, got inverse='solve'"),
        ({"attention": "softmax", "sr_ratios": (4, 4, 2, 1)}, r"has no sr_ratios, got sr_ratios=\(4, 4, 2, 1\)"),
        ({"attention": "softmax", "local_kernels": (3, 3, 3)}, r"has no local_kernels, got local_kernels=\(3, 3, 3\)"),
    ],
    ids=str,
)
def test_pyramid_refuses_wrong_arguments_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PyramidTransformer(**(PYRAMID | {"device": "meta"} | options))


@pytest.mark.parametrize(
    ("landmarks", "inverse", "activation"), [("conv", "newton", "GELUTanh"), ("avg", "solve", "GELU")]
)
def test_conv_landmarks_bring_the_release_with_them(landmarks: str, inverse: str, activation: str) -> None:
    blocks = [block for stage in pyramid(landmarks=landmarks).stages for block in stage.blocks]
    assert {block.attn.inverse for block in blocks[:-1]} == {inverse}
    assert [type(block.mlp.act).__name__ for block in blocks] == [activation] * (len(blocks) - 1) + ["GELU"]


def test_pyramid_methods_refuse_wrong_arguments_by_name() -> None:
    model = pyramid()
    with pytest.raises(ValueError, match="img_size must be at least 32 x 32 pixels, got 16"):
        model.set_input_size(16)
    with pytest.raises(ValueError, match="unknown init mode 'jax'; choose one of"):
        model.init_weights("jax")
    with pytest.raises(ValueError, match="unknown output_fmt 'NLC'; choose one of"):
        model.forward_intermediates(images(), output_fmt="NLC")
    with pytest.raises(ValueError, match="images must be at least 32 x 32 pixels, got 48 x 31"):
        model(images(size=(48, 31)))
    with pytest.raises(ValueError, match="unknown global_pool 'max'"):
        model.reset_classifier(3, "max")


def test_class_token_pooling_is_the_first_token() -> None:
    model = pyramid(global_pool="token")
    tokens = model.forward_features(images())
    assert torch.equal(model.forward_head(tokens, pre_logits=True), tokens[:, 0])


def test_position_tables_are_made_for_the_image_size() -> None:
    model = pyramid(img_size=(75, 130))
    assert [tuple(stage.pos_embed.shape[1:3]) for stage in model.stages] == [(19, 33), (10, 17), (5, 9), (3, 5)]
