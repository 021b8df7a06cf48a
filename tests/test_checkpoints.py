"""Checkpoints: official numbers from official files, every door and wrapping, and nothing loaded in part."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from official import (
    MINI,
    door_overlay,
    largest_deviation,
    mini,
    nested,
    official,
    official_images,
    official_outputs,
    official_shapes,
    official_state_dict,
    stage_outputs,
    write,
)
from timm.data import resolve_data_config
from tiny_data import write_folder
from torch import Tensor, nn
from torch.testing import assert_close

from soft_models.checkpoints import CheckpointError, convert_state_dict, find_weights, matching_names, read_checkpoint
from soft_models.checkpoints.extras import constructor_arguments
from soft_models.training.train import main as train_main
from soft_models.training.validate import main as validate_main

SOFT_NUMBERS = official_outputs("soft")
SOFT_ENTRIES = sorted({key.rsplit("/", 1)[0] for key in SOFT_NUMBERS})


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def expected(images: Tensor) -> Tensor:
    model = mini()
    model.load_state_dict(official())
    with torch.no_grad():
        return model(images)


@pytest.mark.parametrize("entry", SOFT_ENTRIES)
def test_official_numbers_of_soft(entry: str, record_property: Callable[[str, object], None]) -> None:
    tag, size = entry.split("/")
    base = tag.removesuffix("_ill")
    name = "soft_norm_conv_tiny" if "norm" in base else "soft_conv_tiny"
    model = timm.create_model(name, **(MINI if "mini" in base else {})).eval()
    model.load_state_dict(official_state_dict(official_shapes("soft_official", base), ill=tag.endswith("_ill")))
    with torch.no_grad():
        tokens, maps = model.forward_intermediates(official_images(*map(int, size.split("x"))))
        found = stage_outputs(model.forward_head(tokens), maps)
    deviation, words = largest_deviation(found, SOFT_NUMBERS, entry)
    record_property("deviation", words)
    assert deviation < 1e-4, words


WRAPPINGS: dict[str, Callable[[dict[str, Tensor]], dict[str, Any]]] = {
    "raw": dict,
    "state_dict": lambda w: {"state_dict": w, "epoch": 3, "optimizer": {"lr": 0.1}},
    "model": lambda w: {"model": w, "args": argparse.Namespace(lr=0.1)},
    "state_dict_ema": lambda w: {"state_dict": {k: v * 0 for k, v in w.items()}, "state_dict_ema": w},
    "model_ema": lambda w: {"model": {k: v * 0 for k, v in w.items()}, "model_ema": w},
    "state_dict.model": lambda w: {"state_dict": {"model": w}},
    "module.": nested("module."),
    "_orig_mod.": nested("_orig_mod."),
    "backbone.": nested("backbone."),
    "encoder.": nested("encoder."),
    "module._orig_mod.": nested("module._orig_mod."),
    "model.backbone.": nested("model.backbone."),
    "module.encoder. of a segmenter": lambda w: {
        "state_dict": nested("module.encoder.")(w) | {"module.decode_head.conv.weight": torch.ones(3)}
    },
}


def files() -> list[object]:
    cases = [(wrapping, suffix) for wrapping in WRAPPINGS for suffix in (".pth", ".pth.tar")]
    flat = [wrapping for wrapping in WRAPPINGS if wrapping == "raw" or wrapping.endswith(".")]
    return [pytest.param(*case, id="-".join(case)) for case in [*cases, *((f, ".safetensors") for f in flat)]]


def door_load_state_dict(path: Path) -> nn.Module:
    model = mini()
    model.load_state_dict(read_checkpoint(path))
    return model


@pytest.mark.parametrize("names", ["official", "native"])
@pytest.mark.parametrize(("wrapping", "suffix"), files())
@pytest.mark.parametrize("door", [door_overlay, door_load_state_dict])
def test_every_door_opens_every_wrapping(
    door: Callable[[Path], nn.Module],
    wrapping: str,
    suffix: str,
    names: str,
    tmp_path: Path,
    images: Tensor,
    expected: Tensor,
) -> None:
    weights = official() if names == "official" else convert_state_dict(official(), mini())
    model = door(write(WRAPPINGS[wrapping](weights), tmp_path / f"weights{suffix}")).eval()
    with torch.no_grad():
        assert torch.equal(model(images), expected)


def test_checkpoint_path_opens_official_files(tmp_path: Path, images: Tensor, expected: Tensor) -> None:
    path = write({"state_dict": official()}, tmp_path / "official.pth")
    with torch.no_grad():
        assert torch.equal(mini(checkpoint_path=str(path))(images), expected)


def test_a_loaded_model_remembers_the_file_and_not_its_tensors(tmp_path: Path) -> None:
    path = write(official(), tmp_path / "official.pth")
    cfg = door_overlay(path).pretrained_cfg
    assert cfg["file"] == str(path) and "state_dict" not in cfg


OPTIONS = "--model soft_conv_tiny --img-size 32 -b 6 -j 0 --device cpu".split()


@pytest.fixture(scope="module")
def official_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = official_state_dict(official_shapes("soft_official", "soft_tiny"))
    return write({"state_dict_ema": nested("module.")(weights)}, tmp_path_factory.mktemp("files") / "soft_tiny.pth")


@pytest.mark.parametrize("door", ["--pretrained-path", "--initial-checkpoint"])
def test_training_starts_from_official_files(door: str, official_tiny: Path, tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data")
    classes = ["--num-classes", "1000"] if door == "--initial-checkpoint" else []
    argv = [str(data), *OPTIONS, *classes, door, str(official_tiny), "--output", str(tmp_path), "--experiment", "run"]
    assert train_main([*argv, "--epochs", "1", "--warmup-epochs", "0", "--lr", "0", "--min-lr", "0"]) == 0
    trained = find_weights(read_checkpoint(tmp_path / "run" / "last.pth.tar"))[1]
    expected = timm.create_model("soft_conv_tiny")
    expected.load_state_dict(read_checkpoint(official_tiny))
    for name, parameter in expected.named_parameters():
        if not (name.startswith("head") and door == "--pretrained-path"):
            assert torch.equal(trained[name], parameter), name
    assert len(trained["head.weight"]) == (3 if door == "--pretrained-path" else 1000)


def test_validation_opens_official_files(
    official_tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_folder(tmp_path / "data")
    assert validate_main([str(data), *OPTIONS, "--checkpoint", str(official_tiny)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["model"], result["weights"], result["samples"]) == ("soft_conv_tiny", "ema", 9)
    argv = [str(data), *OPTIONS, "--checkpoint", str(official_tiny), "--model", "soft_conv_base"]
    assert validate_main(argv) == 2
    assert "the file fits 'soft_conv_tiny' or 'soft_norm_conv_tiny'" in capsys.readouterr().err


@pytest.mark.parametrize("num_classes", [0, 5, 10])
def test_head_is_kept_where_it_fits_and_new_otherwise(num_classes: int, tmp_path: Path) -> None:
    path = write({"model": official()}, tmp_path / "official.pth")
    source = door_overlay(path)
    model = mini(True, num_classes=num_classes, pretrained_cfg_overlay={"file": str(path)})
    heads = source.head.weight.shape == getattr(model.head, "weight", torch.empty(0)).shape
    assert heads == (num_classes == 10)
    for name, tensor in source.state_dict().items():
        if not name.startswith("head") or num_classes == 10:
            assert torch.equal(model.state_dict()[name], tensor), name


def test_headless_file_gets_a_new_head_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = {name: tensor for name, tensor in official().items() if not name.startswith("head")}
    door_overlay(write(weights, tmp_path / "official.pth"))
    assert "its head is new" in caplog.text


def test_input_channels_are_adapted(tmp_path: Path) -> None:
    path = write(official(), tmp_path / "official.pth")
    gray = torch.randn(2, 1, 64, 64)
    three, one = door_overlay(path), mini(True, in_chans=1, pretrained_cfg_overlay={"file": str(path)})
    with torch.no_grad():
        assert_close(one(gray), three(gray.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("img_size", [(96, 160), 384])
def test_position_tables_are_resized_from_their_own_grid(img_size: Any, tmp_path: Path, images: Tensor) -> None:
    path = write(official(), tmp_path / "official.pth")
    source, model = door_overlay(path), mini(True, img_size=img_size, pretrained_cfg_overlay={"file": str(path)})
    source.set_input_size(img_size)
    with torch.no_grad():
        assert torch.equal(model(images), source(images))
    back = mini(img_size=64)
    back.load_state_dict(model.state_dict())
    assert back.stages[0].pos_embed.shape == (1, 16, 16, 32)


def test_flat_tables_of_another_shape_need_their_img_size() -> None:
    weights, count = official(), {1: (40, 64), 2: (20, 32), 3: (10, 16), 4: (5, 8)}
    for stage, (height, width) in count.items():
        dim = weights[f"pos_embed{stage}"].shape[-1]
        weights[f"pos_embed{stage}"] = torch.randn(1, height * width + (stage == 4), dim)
    model = mini(img_size=(160, 256))
    model.load_state_dict(weights)
    assert torch.equal(model.stages[1].pos_embed.flatten(1, 2), weights["pos_embed2"])
    with pytest.raises(CheckpointError, match=r"stages.0.pos_embed \(1, 2560, 32\) for \(1, 56, 56, 32\)"):
        mini().load_state_dict(weights)


@pytest.mark.parametrize("out_indices", [(0, 1, 2, 3), (1, 2)])
def test_features_only_opens_official_files(out_indices: tuple[int, ...], tmp_path: Path, images: Tensor) -> None:
    path = write({"state_dict_ema": official()}, tmp_path / "official.pth")
    overlay = {"file": str(path)}
    features = mini(True, features_only=True, out_indices=out_indices, pretrained_cfg_overlay=overlay)
    maps = door_overlay(path).forward_intermediates(images, list(out_indices), intermediates_only=True)
    for found, wanted in zip(features(images), maps, strict=True):
        assert torch.equal(found, wanted)


def test_a_trained_file_brings_preprocessing_and_with_its_head_the_classes(tmp_path: Path) -> None:
    source, names = mini(img_size=(64, 96)), [f"class {label}" for label in range(10)]
    stored = {"input_size": [3, 64, 96], "mean": [0.1, 0.2, 0.3], "std": [0.4] * 3, "crop_pct": 0.5}
    extras = {"format": 1, "classes": names, "data_config": {**stored, "interpolation": "bilinear"}}
    path = write({"state_dict": source.state_dict(), "soft_models": extras}, tmp_path / "own.pth.tar")
    model = door_overlay(path)
    config = resolve_data_config({}, model=model)
    assert config["input_size"] == (3, 64, 96) and config["mean"] == (0.1, 0.2, 0.3) and config["std"] == (0.4,) * 3
    assert (config["interpolation"], config["crop_pct"]) == ("bilinear", 0.5)
    assert model.pretrained_cfg["label_names"] == tuple(names)
    assert torch.equal(model.stages[0].pos_embed, source.stages[0].pos_embed), "not resized"
    other = mini(True, num_classes=5, img_size=64, pretrained_cfg_overlay={"file": str(path), "mean": (0.5,) * 3})
    assert other.stages[0].pos_embed.shape[1:3] == (16, 16)
    assert (other.pretrained_cfg["mean"], other.pretrained_cfg["std"]) == ((0.5,) * 3, (0.4,) * 3)
    assert not other.pretrained_cfg.get("label_names"), "of another head"
    assert not mini(True, num_classes=0, pretrained_cfg_overlay={"file": str(path)}).pretrained_cfg.get("label_names")
    given = {"file": str(path), "label_names": tuple("abcde")}
    assert mini(True, num_classes=5, pretrained_cfg_overlay=given).pretrained_cfg["label_names"] == tuple("abcde")
    extras["format"] = 2
    path = write({"state_dict": source.state_dict(), "soft_models": extras}, tmp_path / "later.pth.tar")
    with pytest.raises(CheckpointError, match="has format 2, this version reads up to 1; update"):
        door_overlay(path)


@pytest.mark.parametrize("named", [{"arch": "soft_conv_base"}, {"args": {"model": "soft_conv_base"}}])
def test_arguments_of_another_model_are_not_taken_over(named: dict[str, Any]) -> None:
    args = {"num_classes": 7, "model_kwargs": {"landmark_grid": 5}}
    content = {"state_dict": official(), **named, "args": {**named.get("args", {}), **args}}
    assert constructor_arguments(content, "soft_conv_base") == {
        "img_size": (224, 224),
        "num_classes": 7,
        "landmark_grid": 5,
    }
    assert constructor_arguments(content, "soft_conv_tiny") == {"img_size": (224, 224)}, "but that of the tables"


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in official().items() if key != name}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (without("block2.0.att.mha.W_v.bias"), r"1 missing: stages\.1\.blocks\.0\.attn\.v\.bias"),
        (without("pos_embed3"), r"1 missing: stages\.2\.pos_embed"),
        (official() | {"block3.5.att.norm1.bias": torch.ones(96)}, r"1 unexpected: stages\.2\.blocks\.5\.norm1\.bias"),
        (official() | {"norm.bias": torch.ones(7)}, r"1 of another shape: norm\.bias \(7,\) for \(128,\)"),
        (official() | {"norm.bias": torch.full((128,), torch.nan)}, r"1 tensors of the file hold NaN.*norm\.bias"),
        ({"conv1.weight": torch.ones(3)}, r"0 of .* match; the file is of another model, it has conv1\.weight$"),
        ({f"{a}.w": torch.ones(1) for a in ("module", "module.module")}, "several models"),
    ],
)
@pytest.mark.parametrize("door", [door_overlay, door_load_state_dict])
def test_what_does_not_fit_is_refused_by_name(
    door: Callable[[Path], nn.Module], weights: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        door(write(weights, tmp_path / "weights.pth"))


def test_wrong_variant_is_recognised() -> None:
    weights = timm.create_model("soft_norm_conv_base", num_classes=7).state_dict()
    assert matching_names(weights) == ["soft_conv_base", "soft_norm_conv_base"]
    with pytest.raises(CheckpointError, match=r"fits 'soft_conv_base' or 'soft_norm_conv_base', which of these cannot"):
        timm.create_model("soft_conv_small").load_state_dict(weights)
    with pytest.raises(CheckpointError, match=r"head.*pretrained_cfg_overlay=dict\(file=\.\.\.\)"):
        timm.create_model("soft_conv_base").load_state_dict(weights)


@pytest.mark.parametrize("lost", ["head", "patch_embed.0.0.weight", "head of the model"])
def test_a_refusal_never_names_the_model_that_refuses(lost: str) -> None:
    model = timm.create_model("soft_tiny", num_classes=0 if lost == "head of the model" else 7)
    weights = timm.create_model("soft_tiny", num_classes=7).state_dict()
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith(lost)}
    with pytest.raises(CheckpointError, match=r"of the model's \d+ tensors match; \d (missing|unexpected): ") as caught:
        model.load_state_dict(weights)
    assert "the file fits" not in str(caught.value)
    assert ("adapts these" in str(caught.value)) == lost.startswith("head")


def test_loading_without_strict_takes_what_there_is() -> None:
    model = mini()
    result = model.load_state_dict(without("norm.bias"), strict=False)
    assert result.missing_keys == ["norm.bias"] and not result.unexpected_keys
    assert "norm.weight" in model.load_state_dict({}, strict=False).missing_keys


@pytest.mark.parametrize("source", [{"file": "weights.pth"}, {"url": "https://example.org/weights.pth"}])
def test_weights_without_pretrained_are_refused(source: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="set pretrained=True"):
        timm.create_model("soft_tiny", pretrained_cfg_overlay=source)


@pytest.mark.parametrize("missing", ["patch_embed1.proj.0.weight", "stages.3.cls_token"])
@pytest.mark.parametrize("options", [{"num_classes": 5}, {"features_only": True}, {"in_chans": 1}])
def test_nothing_but_the_head_may_be_missing(missing: str, options: dict[str, Any], tmp_path: Path) -> None:
    weights = without(missing)
    if missing.startswith("stages"):
        weights = convert_state_dict(official(), mini())
        del weights[missing]
    path = write(weights, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=r"1 missing: (patch_embed\.0\.0\.weight|stages\.3\.cls_token)") as caught:
        mini(True, pretrained_cfg_overlay={"file": str(path)}, **options)
    assert "adapts these" not in str(caught.value)


def test_features_do_not_carry_the_file_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(official(), tmp_path / "official.pth")
    features = mini(True, features_only=True, pretrained_cfg_overlay={"file": str(path)})
    assert "state_dict" not in features.pretrained_cfg and "state_dict" not in features.model.pretrained_cfg
    assert "its head is new" not in caplog.text
