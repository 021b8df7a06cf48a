"""The contract of the models, over the registered names: one name of each family, and every name with ``--slow``.

Facts that differ between families (strides, number of maps, layers of normalisation) are read from the models' own
metadata. Most tests build a small model of the family (:func:`small`), those called "full" the registered one.
"""

import copy
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from small_models import (
    CLASSES,
    DTYPES,
    HALF_ERROR,
    SIZE,
    blocks,
    close,
    full,
    gradients,
    images,
    loss_of,
    map_sizes,
    over_families,
    over_names,
    relative_error,
    same,
    shapes,
    shared,
    small,
    small_args,
)
from timm.models import PretrainedCfg
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

# Size and cost.


# Parameters in millions and multiply-adds in billions at 224 x 224 as arXiv:2110.11945 and 2207.03341 round them.
PUBLISHED = {
    "tiny": (13, 1.9),
    "small": (24, 3.3),
    "medium": (45, 7.2),
    "large": (64, 11.0),
    "huge": (87, 16.3),
}


@pytest.mark.parametrize("family", ["soft", "soft_norm"])
@pytest.mark.parametrize("size", PUBLISHED)
def test_parameter_count_is_the_published_one(family: str, size: str) -> None:
    count = sum(p.numel() for p in full(f"{family}_{size}").parameters())
    assert count / 1e6 == pytest.approx(PUBLISHED[size][0], rel=0.015), f"{family}_{size}: {count} parameters"


@pytest.mark.parametrize("family", ["soft", "soft_norm"])
@pytest.mark.parametrize(
    "size", [pytest.param(s, marks=() if s in ("tiny", "small") else pytest.mark.slow) for s in PUBLISHED]
)
def test_multiply_adds_are_the_published_ones(family: str, size: str) -> None:
    model = timm.create_model(f"{family}_{size}", device="meta", inverse="solve").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, 3, 224, 224, device="meta"))
    count = counter.get_total_flops() / 2e9  # two operations for each multiply-add
    published = PUBLISHED[size][1]
    assert count == pytest.approx(published, rel=0.04), f"{count:.3f} G multiply-adds, published {published} G"


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
def test_pretrained_without_weights_says_what_to_do(name: str) -> None:
    with pytest.raises(ValueError, match=rf"no weights come with {name}.*pretrained_cfg_overlay=dict\(file="):
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
