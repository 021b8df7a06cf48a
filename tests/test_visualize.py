"""Attention maps of query points: right numbers, right places, one line for every mistake."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from small_models import PYRAMID, family_names
from torch import nn
from torch.testing import assert_close

from soft_models import visualize
from soft_models.errors import UsageError
from soft_models.training.config import TrainedConfig
from soft_models.training.trained import load_or_random
from soft_models.visualize import AttentionMap, attention_layers, attention_maps, main

SIZE = (70, 54)  # width and height in pixels: different, and no multiples of a stride
POINT = (50.0, 30.0)
PANEL = visualize.VisualizeConfig.panel
NAMES = ["soft_tiny", "soft_conv_tiny", "pyramid_tiny_nystromformer", "vvt_tiny", "cosformer2d_vit_tiny_patch16_224"]


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    pixels = np.random.default_rng(0).integers(0, 255, (SIZE[1], SIZE[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def full_matrices(model: nn.Module, image: torch.Tensor) -> list[tuple[torch.Tensor, tuple[int, int]]]:
    """The whole N x N matrix and the map size of the last attention in each stage or block."""
    found: list[tuple[torch.Tensor, tuple[int, int]]] = []

    def record(attn: Any, inputs: tuple[torch.Tensor, tuple[int, int]]) -> None:
        found.append((attn.attention_matrix(*inputs)[0], inputs[1]))

    hooks = [modules[-1].register_forward_pre_hook(record) for _, modules in attention_layers(model)]
    with torch.no_grad():
        model(image)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_maps_are_the_rows_of_the_full_matrix_at_the_query(name: str) -> None:
    model = timm.create_model(name).eval()
    image = torch.randn(1, 3, SIZE[1], SIZE[0])
    maps = attention_maps(model, image, [POINT, (0, 0), (SIZE[0] - 1, SIZE[1] - 1)])
    full = full_matrices(model, image)
    assert len(maps) == len(full)
    for found, (matrix, (H, W)) in zip(maps, full, strict=True):
        stride, prefix = found.stride, matrix.shape[-1] - H * W
        assert (H, W) == (-(-SIZE[1] // stride), -(-SIZE[0] // stride))
        corners = [[int(POINT[1]) // stride, int(POINT[0]) // stride], [0, 0], [H - 1, W - 1]]
        assert found.cells.tolist() == corners
        for (row, column), weights, on_prefix in zip(corners, found.weights, found.prefix, strict=True):
            expected = matrix[:, prefix + row * W + column]
            assert_close(weights.flatten(1), expected[:, prefix:], msg=lambda text: f"{name}: {text}")
            assert_close(on_prefix, expected[:, :prefix])


def test_maps_are_of_one_image() -> None:
    with pytest.raises(UsageError, match=r"attention maps are of one image, got 2; pass image\[:1\]"):
        attention_maps(timm.create_model("soft_tiny"), torch.randn(2, 3, 64, 64), [(3, 3)])


def test_class_token_is_apart_from_the_pixels() -> None:
    maps = attention_maps(timm.create_model("soft_tiny"), torch.randn(1, 3, 64, 64), [(3, 3)])
    assert [found.prefix.shape[-1] for found in maps] == [0, 0, 0, 1]
    assert_close(maps[3].weights.sum(dim=(2, 3)) + maps[3].prefix.sum(-1), torch.ones(1, 16))


@pytest.mark.parametrize("name", family_names())
def test_every_family_has_layers(name: str) -> None:
    model = timm.create_model(name, device="meta")
    layers = attention_layers(model)
    assert [stride for stride, _ in layers] == ([16] * 12 if "vit" in name else [4, 8, 16, 32])


def test_chosen_stage_and_block_and_mode_is_kept() -> None:
    model = timm.create_model("soft_tiny").train()
    model.patch_embed.eval()  # frozen
    image = torch.randn(1, 3, 64, 64)
    first, last = (attention_maps(model, image, [(3, 3)], stages=[2], block=block)[0] for block in (0, -1))
    assert first.stage == last.stage == 2
    assert not torch.equal(first.weights, last.weights)
    assert model.training and model.stages[3].training
    assert not any(module.training for module in model.patch_embed.modules())
    for block in (3, -4):
        with pytest.raises(UsageError, match=f"block {block + (block > 0)} does not exist: stage 3 has blocks 1 to 3"):
            attention_maps(model, image, [(3, 3)], stages=[2], block=block)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_heat_lies_at_its_cell_and_the_cross_at_the_query() -> None:
    weights = torch.zeros(5, 7)
    weights[3, 5], weights[1, 1] = 2.0, -2.0
    panel = np.asarray(visualize.draw_map(Image.new("RGB", (200, 144), "gray"), weights, 32, (20.0, 100.0)), dtype=int)
    scale = PANEL / 200
    assert panel.shape == (round(144 * scale), PANEL, 3), "cut at the image's border, not squeezed"
    y, x = round(3.5 * 32 * scale), round(5.5 * 32 * scale)
    assert panel[y, x, 0] > 200 and panel[y, x, 2] < 60, "yellow at the largest weight"
    y, x = round(1.5 * 32 * scale), round(1.5 * 32 * scale)
    assert panel[y, x, 2] > 200 and panel[y, x, 0] < 60, "blue at the most negative weight"
    assert panel[round(100 * scale), round(20 * scale)].min() == 255, "white cross at the query"


def test_command_draws_models_points_and_heads(photo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new/sheet.png"
    argv = [str(photo), "--model", "soft_tiny", "cosformer_vit_tiny_patch16_224", "--point", "50,30", "3,3"]
    assert main([*argv, "--stage", "1", "--head", "1", "2", "--size", "48", "--output", str(output)]) == 0
    assert "random weights" in capfd.readouterr().err
    with Image.open(output) as sheet:
        width, height = sheet.size
    panel = round(PANEL * 48 / 62)
    assert width >= 2 * PANEL and height > 8 * panel, "two models, two points, two heads"


def test_panels_without_contrast_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    even, peaked = torch.rand(1, 1, 4, 4) * 0.1 + 1, torch.zeros(1, 1, 4, 4)
    peaked[..., 1, 2] = -1
    cells, prefix = torch.zeros(1, 2), torch.zeros(1, 1, 0)
    maps = [AttentionMap(i, 16, cells, weights, prefix) for i, weights in enumerate((even, peaked))]
    monkeypatch.setattr(visualize, "attention_maps", lambda *_: maps)
    cfg, photo = visualize.VisualizeConfig(size=64), Image.new("RGB", (64, 64))
    ((_, panels),) = visualize.model_rows(cfg, "soft_tiny", "", photo)
    assert [title for title, _ in panels][1:] == ["stage 1: 4 x 4, nearly even", "stage 2: 4 x 4"]


def test_coarse_maps_are_told_about_the_size(photo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = [str(photo), "--model", "soft_tiny", "--output", str(tmp_path / "a.png")]
    assert main([*argv, "--size", "64"]) == 0
    assert "stage 4 has a map of 3 x 2: a larger --size draws finer ones" in capfd.readouterr().err
    assert main([*argv, "--size", "128"]) == 0
    assert "a larger --size" not in capfd.readouterr().err


def test_checkpoint_of_a_training_run_names_its_model(tmp_path: Path) -> None:
    model = timm.create_model("soft_tiny", num_classes=3, img_size=32)
    args = {"model": "soft_tiny", "num_classes": 3, "model_kwargs": {"img_size": 32}}
    torch.save({"arch": "soft_tiny", "args": args, "state_dict": model.state_dict()}, tmp_path / "own.pth.tar")
    loaded = load_or_random(TrainedConfig(checkpoint=str(tmp_path / "own.pth.tar")))
    assert loaded.name == "soft_tiny"
    image = torch.randn(1, 3, 64, 64)
    for a, b in zip(*(attention_maps(m, image, [(9, 9)]) for m in (model, loaded.model)), strict=True):
        assert torch.equal(a.weights, b.weights)


def test_checkpoint_of_others_needs_its_head(photo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, sheet = str(tmp_path / "plain.pth"), tmp_path / "sheet.png"
    torch.save(timm.create_model("soft_tiny", num_classes=3, in_chans=1).state_dict(), path)
    argv = [str(photo), "--model", "soft_tiny", "--checkpoint", path, "--output", str(sheet), "--size", "64"]
    assert main(argv) == 2
    assert "; are --num-classes and --model-kwargs the checkpoint's?" in capfd.readouterr().err
    assert main([*argv, "--num-classes", "3", "--model-kwargs", "in_chans=1"]) == 0
    assert sheet.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["absent.png"], "no image file 'absent.png'"),
        ([], "no image: name a file"),
        (["PHOTO", "--model", "soft_tinny"], "unknown model 'soft_tinny'; did you mean 'soft_tiny'?"),
        (["PHOTO", "--model", "resnet18"], "ResNet has no attention of soft_models; python -m soft_models lists"),
        (["PHOTO", "--point", "70,3"], "point 70,3 lies outside the image, which is 70 x 54 pixels"),
        (["PHOTO", "--point", "3"], "--point takes x,y in pixels, got '3'"),
        (["PHOTO", "--stage", "5"], "stage 5 does not exist: the model has stages 1 to 4"),
        (["PHOTO", "--stage", "0"], "stage 0 does not exist"),
        (["PHOTO", "--head", "3"], "head 3 does not exist: stage 1 has heads 1 to 2"),
        (["PHOTO", "--block", "2"], "block 2 does not exist: stage 1 has blocks 1 to 1"),
        (["PHOTO", "--block", "0"], "--block counts from 1, or is -1 for the last, got 0"),
        (["PHOTO", "--size", "16"], "--size must be at least 32 pixels, got 16"),
        (
            ["PHOTO", "--model", "cosformer_vit_tiny_patch16_224", "--model-kwargs", "dynamic_img_size=False"],
            "the model cannot take images of 3 x 224 x 290 (--size): Input width (290) doesn't match model (224)",
        ),
        (
            ["PHOTO", "--model", "cosformer_vit_tiny_patch16_224", "--model-kwargs", "weight_init=bogus"],
            "cannot create cosformer_vit_tiny_patch16_224: unknown weight_init 'bogus'",
        ),
        (["PHOTO", "--model", "vit_tiny_patch16_224", "--model-kwargs", "num_heads=0"], "cannot create vit_tiny"),
        (["PHOTO", "--model", "soft_tiny.x"], "unknown tag of weights in 'soft_tiny.x'; leave out what follows"),
        (["PHOTO", "--size", "0"], "--size must be at least 32 pixels, got 0"),
        (["PHOTO", "--panel", "8"], "--panel must be at least 32 pixels, got 8"),
        (["PHOTO", "--output", "sheet.jpg"], "--output must end with .png"),
        (["PHOTO", "--output", "PHOTO"], "is the image itself; name another file"),
        (["PHOTO", "--checkpoint", "absent.pth"], "no checkpoint file 'absent.pth'"),
        (["PHOTO", "--model", "soft_tiny", "vvt_tiny", "--checkpoint", "a.pth"], "must be as many, got 2 and 1"),
        (["PHOTO", "--heads", "1"], "unknown flag --heads; did you mean '--head'?"),
    ],
    ids=str,
)
def test_mistake_is_one_line_and_exit_code_2(
    argv: list[str], message: str, photo: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main([str(photo) if word == "PHOTO" else word for word in argv]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if "random weights" not in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("visualize: error: ") and message in lines[0]
    assert not list(tmp_path.iterdir())


def test_file_that_is_no_image_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.png").write_text("no image")
    assert main([str(tmp_path / "notes.png")]) == 2
    assert "cannot read the image" in capfd.readouterr().err


def test_photographs_are_read_as_in_training(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    assert np.array_equal(np.asarray(visualize.load_photo(str(tmp_path / "deep.png")))[..., 0], values >> 8)


def test_photographs_of_skimage_by_name() -> None:
    pytest.importorskip("skimage", reason="scikit-image is optional")
    assert visualize.load_photo("skimage:coffee").size == (600, 400)
    with pytest.raises(UsageError, match="ships no image 'cofee'; did you mean 'coffee'"):
        visualize.load_photo("skimage:cofee")


def test_model_of_timm_is_refused_in_python() -> None:
    with pytest.raises(UsageError, match="has no attention of soft_models"):
        attention_maps(timm.create_model("test_byobnet"), torch.randn(1, 3, 64, 64), [(1, 1)])


def test_backbone_has_the_maps_of_its_model() -> None:
    backbone = timm.create_model("soft_tiny", features_only=True, out_indices=(0, 1), **PYRAMID)
    for model in (backbone, backbone.model):
        assert [found.stage for found in attention_maps(model, torch.randn(1, 3, 48, 64), [(1, 1)])] == [0, 1]
