"""Checkpoint files: damaged ones refused in one line, and the command that converts one."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import timm
import torch
from official import (
    MINI,
    door_overlay,
    mini,
    nested,
    official,
    official_shapes,
    official_state_dict,
    write,
)
from safetensors import SafetensorError

from soft_models.checkpoints import CheckpointError, find_weights, read_checkpoint
from soft_models.checkpoints.__main__ import main as convert_main
from soft_models.downstream import FPNBackbone


def damaged(kind: str, path: Path) -> Path:
    data = write(official(), path.with_suffix(".good")).read_bytes()
    contents = {
        "empty": b"",
        "text": b"<html>404 not found</html>",
        "truncated": data[: len(data) // 2],
        "cut at the end": data[:-100],
        "bits flipped": bytes(b ^ 0x55 for b in data[:2000]) + data[2000:],
        "header of a huge file": (2**62).to_bytes(8, "little") + b"{}",
        "header that lies": (2).to_bytes(8, "little") + b"[]",
        "legacy pickle cut short": b"\x80\x02X\x01",
    }
    path.write_bytes(contents[kind])
    return path


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(
    "kind",
    [
        "empty",
        "text",
        "truncated",
        "cut at the end",
        "bits flipped",
        "header of a huge file",
        "header that lies",
        "legacy pickle cut short",
    ],
)
def test_damaged_files_are_refused_in_one_line(kind: str, suffix: str, tmp_path: Path) -> None:
    path = damaged(kind, tmp_path / f"weights{suffix}")
    with pytest.raises(CheckpointError, match="is not a readable checkpoint") as caught:
        door_overlay(path)
    assert "\n" not in str(caught.value)
    assert not any(word in str(caught.value) for word in ("KeyError", "EOFError", "()"))


@pytest.mark.slow
def test_random_damage_never_loads_silently(tmp_path: Path) -> None:
    good = write(official(), tmp_path / "good.pth").read_bytes()
    generator = torch.Generator().manual_seed(0)
    source = mini()
    source.load_state_dict(official())
    for i in range(100):
        broken = bytearray(good)
        for place in torch.randint(0, len(good), (20,), generator=generator).tolist():
            broken[place] ^= 0xFF
        (tmp_path / f"{i}.pth").write_bytes(broken)
        try:
            model = door_overlay(tmp_path / f"{i}.pth")
        except CheckpointError as error:
            assert "\n" not in str(error)
        else:  # the damage lies where nothing is stored
            assert all(torch.equal(value, source.state_dict()[name]) for name, value in model.state_dict().items())


class Stranger:
    """A class that unpickling would have to import."""


def test_files_that_need_code_are_refused_and_can_be_trusted(tmp_path: Path) -> None:
    path = write({"state_dict": official(), "hook": Stranger()}, tmp_path / "stranger.pth")
    with pytest.raises(CheckpointError, match=r"Stranger.*--trust"):
        door_overlay(path)
    content = read_checkpoint(path, weights_only=False)
    assert find_weights(content)[0] == "state_dict"


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint file 'nowhere\.pth'"):
        door_overlay(Path("nowhere.pth"))
    with pytest.raises(CheckpointError, match=f"^'{tmp_path}' is a folder: name the checkpoint file"):
        door_overlay(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3}, "no weights under"),
        ({"conv1.weight": torch.ones(3)}, "the weights do not fit: 0 of the model's"),
        (official() | {"norm.bias": torch.full((128,), torch.nan)}, "1 tensors of the file hold NaN or infinity"),
        ({f"{prefix}.w": torch.ones(1) for prefix in ("module", "module.module")}, "the file holds several models"),
    ],
    ids=["none", "foreign", "nan", "several"],
)
def test_what_is_wrong_with_weights_comes_with_the_name_of_their_file(
    content: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(content, tmp_path / "other.pth")
    for door in (door_overlay, lambda path: FPNBackbone("soft_conv_tiny", checkpoint=path, **MINI)):
        with pytest.raises(CheckpointError, match=f"^{path}: {message}"):
            door(path)
    assert convert_main([str(path), str(tmp_path / "out.pth"), "--model", "soft_conv_tiny"]) == 2
    assert f"convert: error: {path}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "use_ema", "message"),
    [
        ({"epoch": 3}, None, "no weights under state_dict_ema"),
        ({"state_dict": official()}, True, "no averaged weights"),
        (official(), True, "no averaged weights"),
        ({}, None, "the file has nothing"),
    ],
)
def test_weights_that_are_not_there_are_not_replaced(content: Any, use_ema: bool | None, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_weights(content, use_ema)


def test_converter_writes_what_the_official_file_holds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weights = official_state_dict(official_shapes("soft_official", "soft_tiny"))
    source = write({"state_dict": nested("module.")(weights), "epoch": 1}, tmp_path / "soft_tiny.pth")
    target = tmp_path / "new" / "out.safetensors"
    assert convert_main([str(source), str(target)]) == 0
    log = capfd.readouterr().err
    assert "under 'state_dict'" in log
    assert "dropped: nothing" in log
    assert "soft_conv_tiny or soft_norm_conv_tiny" in log and "cannot be told" in log
    model = timm.create_model("soft_conv_tiny")
    model.load_state_dict(weights)
    written = read_checkpoint(target)
    assert written.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in model.state_dict().items())
    assert convert_main([str(source), str(target)]) == 2 and "--overwrite" in capfd.readouterr().err


@pytest.mark.parametrize("target", ["out.pth", "out.safetensors"])
def test_converter_leaves_what_it_cannot_write_anew(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = official_state_dict(official_shapes("soft_official", "soft_tiny"))
    source = write(weights, tmp_path / "soft_tiny.pth")
    (tmp_path / target).write_bytes(b"before")

    for error in (RuntimeError("no space"), SafetensorError("no space"), OSError("no space")):
        for name in ("torch.save", "save_file"):
            monkeypatch.setattr(f"soft_models.checkpoints.__main__.{name}", Mock(side_effect=error))
        assert convert_main([str(source), str(tmp_path / target), "--overwrite"]) == 2
        assert f"cannot write {tmp_path / target}: no space" in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([target, "soft_tiny.pth"])
    assert (tmp_path / target).read_bytes() == b"before"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.pth", "out.pth"], "no checkpoint file"),
        (["{source}", "out.onnx"], "must end in .safetensors or .pth"),
        (["{source}", "out.pth", "--model", "soft_tinny"], "unknown model"),
        (["{source}", "out.pth", "--model", "soft_tiny.x"], "unknown tag of weights in 'soft_tiny.x'"),
        (["{source}", "out.pth", "--model", "soft_conv_tiny"], "of another shape"),
        (["{source}", "out.pth"], "fits no model of ours"),
        (["{source}", "out.pth", "--use-ema"], "no averaged weights"),
    ],
)
def test_converter_refuses_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write(official(), tmp_path / "official.pth")
    assert convert_main([argument.format(source=source) for argument in arguments]) == 2
    assert message in capfd.readouterr().err and not (tmp_path / "out.pth").exists()


def test_converter_takes_a_run_of_other_shapes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = {"embed_dims": [16, 16, 32, 32], "num_heads": [1, 2, 2, 2], "depths": [1, 1, 1, 1]}
    weights = timm.create_model("pyramid_tiny_linformer", num_classes=3, **arguments).state_dict()
    extras = {"model_args": {"num_classes": 3, **arguments}}
    content = {"arch": "pyramid_tiny_linformer", "state_dict": weights, "soft_models": extras}
    source, target = write(content, tmp_path / "last.pth.tar"), tmp_path / "out.pth"
    assert convert_main([str(source), str(target)]) == 0
    assert "have to be given again: num_classes=3, embed_dims=[16, 16, 32, 32]" in capfd.readouterr().err
    found = read_checkpoint(target)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"model_kwargs": {"foo": 1}}, "cannot create soft_tiny: "),
        ({"gp": "bogus"}, "unknown global_pool 'bogus'"),
    ],
)
def test_arguments_that_the_model_does_not_take_are_told(
    stored: dict[str, Any], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = timm.create_model("soft_tiny", img_size=32).state_dict()
    source = write({"arch": "soft_tiny", "args": stored, "state_dict": weights}, tmp_path / "own.pth")
    assert convert_main([str(source), str(tmp_path / "out.pth")]) == 2
    assert message in capfd.readouterr().err.splitlines()[-1]


def test_only_code_that_is_refused_is_named(tmp_path: Path) -> None:
    path = tmp_path / "own.pth"
    torch.save({"args": argparse.Namespace(path=Stranger())}, path)
    with pytest.raises(CheckpointError, match=r"needs code to be unpickled \([\w.]*Stranger\), which is refused"):
        read_checkpoint(path)


def test_converter_runs_as_a_module() -> None:
    command = [sys.executable, "-W", "error", "-m", "soft_models.checkpoints", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "--use-ema" in result.stdout


def test_damage_inside_a_file_is_noticed(tmp_path: Path) -> None:
    weights = {"first": torch.randn(1000), "second": torch.randn(1000)}
    path = write(weights, tmp_path / "weights.pth")
    content = path.read_bytes()
    place = content.index(weights["second"].numpy().tobytes()) + 400
    path.write_bytes(content[:place] + bytes(400) + content[place + 400 :])
    assert torch.equal(torch.load(path)["first"], weights["first"]), "torch does not notice"
    with pytest.raises(CheckpointError, match=r"weights\.pth is damaged \(weights/data/1\); copy or download it again"):
        read_checkpoint(path)


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = write({"first": torch.randn(1000), "second": torch.randn(1000)}, tmp_path / "weights.pth")
    finally:
        torch.serialization.set_crc32_options(before)
    assert list(read_checkpoint(path)) == ["first", "second"]
