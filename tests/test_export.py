"""Exported files give the model's outputs at other batches and sizes, and replace nothing unless they do."""

import json
from pathlib import Path

import pytest
import timm
import torch

from soft_models import export
from soft_models.export import main

SMALL = ["--model-kwargs", "embed_dims=(16,16,32,32)", "num_heads=(1,2,2,2)", "depths=(1,1,1,1)", "--num-classes", "5"]
SMALL_VIT = ["--model-kwargs", "depth=2", "embed_dim=48", "--num-classes", "5"]
MODELS = {
    "soft_tiny": SMALL,
    "soft_norm_conv_tiny": SMALL,
    "vvt_tiny": SMALL,
    "cosformer2d_vit_tiny_patch16_224": SMALL_VIT,
}


def saved(name: str, folder: Path) -> tuple[torch.nn.Module, list[str]]:
    """A small model, and the options that export it."""
    kwargs = {key: eval(value) for key, _, value in (text.partition("=") for text in MODELS[name][1:-2])}
    model = timm.create_model(name, num_classes=5, **kwargs).eval()
    extras = {"classes": list("abcde"), "data_config": {"mean": [0.1, 0.2, 0.3]}}
    torch.save({"arch": name, "state_dict": model.state_dict(), "soft_models": extras}, folder / "model.pth")
    return model, [name, "--checkpoint", str(folder / "model.pth"), "--img-size", "96", *MODELS[name]]


@pytest.mark.parametrize("name", ["soft_tiny", "vvt_tiny", "cosformer2d_vit_tiny_patch16_224"])
def test_torch_program_equals_the_model(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, options = saved(name, tmp_path)
    path = tmp_path / "model.pt2"
    assert main([*options, "--format", "torch", "--output", str(path)]) == 0
    said = capsys.readouterr().err
    assert f"wrote {path}: any batch, any size of more than one pixel in each map; read back at batches 1, 2, 5" in said
    images, texts = torch.randn(3, 3, 64, 160), {"soft_models.json": ""}
    found = torch.export.load(path, extra_files=texts).module()(images)
    torch.testing.assert_close(found, model(images), rtol=1e-4, atol=1e-5)
    described = json.loads(texts["soft_models.json"])
    assert (described["model"], described["input_size"], described["classes"]) == (name, [3, 96, 96], list("abcde"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "soft_tiny"] + ["soft_tiny"]
)
def test_onnx_file_equals_the_model(name: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, options = saved(name, tmp_path)
    path = tmp_path / "model.onnx"
    assert main([*options, "--output", str(path)]) == 0
    session = runtime.InferenceSession(path)
    assert session.get_inputs()[0].shape == ["batch", 3, "height", "width"]
    described = json.loads(session.get_modelmeta().custom_metadata_map["soft_models"])
    assert (described["mean"], described["classes"]) == ([0.1, 0.2, 0.3], list("abcde"))
    for shape in ((1, 3, 96, 96), (5, 3, 64, 160)):
        images = torch.randn(shape)
        (logits,) = session.run(None, {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), model(images).detach(), rtol=1e-3, atol=1e-4)


def test_image_mode_of_other_channels_is_told(tmp_path: Path) -> None:
    path, texts = tmp_path / "model.pt2", {"soft_models.json": ""}
    options = ["--input-size", "4", "64", "64", "--input-img-mode", "CMYK", "--format", "torch"]
    assert main(["test_byobnet", *options, "--output", str(path)]) == 0
    torch.export.load(path, extra_files=texts)
    assert json.loads(texts["soft_models.json"])["input_img_mode"] == "CMYK"


def test_deviating_file_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, options = saved("soft_tiny", tmp_path)
    original = export.read
    monkeypatch.setattr(export, "read", lambda kind, path: lambda images: original(kind, path)(images) + 0.01)
    path = tmp_path / "model.pt2"
    path.write_bytes(b"earlier")
    argv = [*options, "--format", "torch", "--fixed-size", "--output", str(path)]
    assert main(argv) == 2
    assert f"{path} exists; give --output another name, or --overwrite" in capsys.readouterr().err
    assert main([*argv, "--overwrite"]) == 1
    assert "the exported model deviates by" in capsys.readouterr().err
    assert path.read_bytes() == b"earlier"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.pt2", "model.pth"]


def test_size_that_a_program_cannot_take_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--format", "torch", "soft_tiny", "--img-size", "32", *SMALL]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "the model cannot be exported; try --fixed-size or a larger --img-size (AssertionError: Guard" in last
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no model: name one, or give --checkpoint"),
        (["soft_tinny"], "unknown model 'soft_tinny'; did you mean 'soft_tiny'"),
        (["soft_tiny", "--format", "tflite"], "format must be one of 'onnx', 'torch'"),
        (["soft_tiny", "--output", "x.onnx"], "must end in .pt2 for --format torch (onnx or torch), got 'x.onnx'"),
        (["soft_tiny", "--output", "/dev/null/x.pt2"], "cannot write to the folder '/dev/null' ("),
        (["soft_tiny", "--checkpoint", "none.pth"], "no checkpoint file 'none.pth'"),
        (["soft_tiny", "--img-size", "16"], "images must be at least 32 x 32"),
        (["soft_tiny", "--input-size", "4", "64", "64"], "needs --input-img-mode: a PIL mode with so many channels"),
    ],
)
def test_mistakes_are_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--format", "torch", *argv]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
