"""From one model to another: other channels and heads, optimisation, batch normalisation, checkpoints."""

import copy
import io
import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from small_models import (
    blocks,
    close,
    full,
    gradients,
    images,
    load,
    loss_of,
    over_names,
    same,
    save,
    shared,
    small,
    small_args,
)
from timm.models import _hub, save_for_hf
from timm.optim import create_optimizer_v2
from timm.utils import reparameterize_model
from timm.utils.model import freeze_batch_norm_2d
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

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


def test_upload_to_the_hub_carries_weights_and_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub:
        """The part of huggingface_hub.HfApi that timm calls, writing to a folder."""

        def __init__(self, **_: Any) -> None: ...

        def create_repo(self, repo_id: str, **_: Any) -> Any:
            return SimpleNamespace(repo_id=repo_id)

        def file_exists(self, **_: Any) -> bool:
            return False

        def upload_folder(self, folder_path: str, **_: Any) -> None:
            shutil.copytree(folder_path, tmp_path / "uploaded")

    if not hasattr(_hub, "HfApi"):
        pytest.skip("this timm uploads in another way")
    monkeypatch.setattr(_hub, "HfApi", Hub)
    arguments = small_args("soft_tiny")
    model = small("soft_tiny")
    card = {"license": "apache-2.0", "description": "Digits.", "usage": "`import timm, soft_models`"}
    timm.models.push_to_hf_hub(model, "user/digits", model_args=arguments, model_card=card)
    text = (tmp_path / "uploaded/README.md").read_text(encoding="utf-8")
    assert all(part in text for part in ("license: apache-2.0", "Model card for digits", *card.values()))
    again = timm.create_model(f"local-dir:{tmp_path / 'uploaded'}", pretrained=True).eval()
    with torch.no_grad():
        same(again(images()), model(images()), "logits")


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
        same(copied(x), expected, "logits of the copy")
        next(copied.parameters()).zero_()
        same(model(x), expected, "logits after a change to a copy")


def emptied(name: str) -> nn.Module:
    """A model that was built on meta, of NaN in every tensor."""
    with torch.device("meta"):
        model = timm.create_model(name, **small_args(name)).eval()
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    assert [key for key, t in tensors.items() if not t.is_meta] == []
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        return model.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)


@over_names
def test_model_built_on_meta_is_complete_after_loading(name: str) -> None:
    model = emptied(name)
    for module in model.modules():
        if callable(initialise := getattr(module, "init_non_persistent_buffers", None)):
            initialise()
    model.load_state_dict(shared(name).state_dict())
    with torch.no_grad():
        close(model(images()), shared(name)(images()), "logits", rtol=1e-6, atol=1e-6)


@over_names
def test_init_weights_fills_a_model_built_on_meta(name: str) -> None:
    model = emptied(name)
    model.init_weights()
    assert [key for key, value in model.state_dict().items() if not value.isfinite().all()] == []
    fresh = timm.create_model(name, **small_args(name)).state_dict()
    for key, value in model.state_dict().items():
        if value.is_floating_point() and value.numel() > 500:
            assert value.std().item() == pytest.approx(fresh[key].std().item(), rel=0.25, abs=1e-6), f"spread of {key}"
