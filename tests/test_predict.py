"""Predictions: the numbers are the model's own, names and preprocessing the checkpoint's, odd images do no harm."""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from runs import ROOT
from tiny_data import BROKEN, CLASSES, write_image, write_odd_images

from soft_models.predict import PredictConfig, class_names
from soft_models.predict import main as predict_main
from soft_models.training.train import main as train_main
from soft_models.training.trained import Stored
from soft_models.training.validate import main as validate_main


@pytest.fixture(scope="module")
def checkpoint(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model of three classes, with preprocessing that is not its own default."""
    output = tmp_path_factory.mktemp("output")
    options = "--model test_byobnet --img-size 48 --crop-pct 1.0 --mean 0.4 --std 0.3 -b 6 -j 0 --epochs 4"
    argv = [str(data), *options.split(), *"--lr 1e-2 --opt adamw --warmup-epochs 0 --device cpu".split()]
    assert train_main([*argv, "--output", str(output), "--experiment", "run"]) == 0
    return output / "run" / "model_best.pth.tar"


@pytest.fixture
def predict(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the command; returns its exit code, the JSON that it wrote and what it printed."""

    def run(*argv: str, path: str = str(checkpoint)) -> tuple[int, Any, Any]:
        target = tmp_path / "result.json"
        target.unlink(missing_ok=True)
        capsys.readouterr()
        code = predict_main([*argv, "--device", "cpu", "--checkpoint", path, "--results-file", str(target)])
        results = json.loads(target.read_text(encoding="utf-8")) if target.exists() else None
        return code, results, capsys.readouterr()

    return run


def test_accuracy_is_that_of_validation(
    predict: Callable[..., Any], checkpoint: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, results, _ = predict(str(data / "val"), "--batch-size", "4")
    assert code == 0
    assert len(results) == 9
    assert all(sum(found["probability"] for found in result["classes"]) == pytest.approx(1) for result in results)
    right = [result["classes"][0]["name"] == Path(result["image"]).parent.name for result in results]
    assert validate_main([str(data), "-j", "0", "--device", "cpu", "--checkpoint", str(checkpoint)]) == 0
    assert json.loads(capsys.readouterr().out)["top1"] == pytest.approx(100 * sum(right) / 9)


def test_text_names_every_image_in_order(predict: Callable[..., Any], data: Path) -> None:
    paths = [str(data / "val" / "c" / "1.png"), str(data / "val" / "a" / "0.png")]
    code, results, printed = predict(*paths, "--topk", "2")
    assert code == 0
    assert [result["image"] for result in results] == paths
    lines = printed.out.splitlines()
    assert len(lines) == 6
    assert [lines[0], lines[3]] == [f"{path}:" for path in paths]
    first = results[0]["classes"][0]
    assert lines[1] == f"{100 * first['probability']:6.2f} %  {first['name']}"


def test_table_has_a_row_for_each_class(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.csv"
    argv = [str(data / "val" / "a"), "--checkpoint", str(checkpoint), "--device", "cpu", "--results-file", str(path)]
    assert predict_main(argv) == 0
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 9
    assert {row["name"] for row in rows} == set(CLASSES)
    assert [row["rank"] for row in rows[:3]] == ["1", "2", "3"]
    assert float(rows[0]["probability"]) >= float(rows[1]["probability"]) >= float(rows[2]["probability"])


def test_odd_images_are_predicted_or_named(predict: Callable[..., Any], data: Path, tmp_path: Path) -> None:
    write_odd_images(tmp_path / "odd", data / "val" / "a" / "0.png")
    code, results, printed = predict(str(tmp_path / "odd"))
    assert code == 1
    assert {Path(result["image"]).name for result in results if "error" in result} == BROKEN
    assert len(results) == 12
    for name in BROKEN:
        assert f"skipped unreadable image {tmp_path / 'odd' / name} (" in printed.err
        assert f"{tmp_path / 'odd' / name}: unreadable" in printed.out
    assert "unreadable images of those asked for, skipped: 5: " in printed.err
    assert "1 images of those asked for are shown by viewers in another orientation" in printed.err
    assert "turned.jpg" in printed.err


def test_names_that_are_no_utf8_go_out_as_they_came_in(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/caf\xe9.png"
    try:
        with open(name, "wb") as file:  # noqa: PTH123 - a Path is text
            file.write((data / "val" / "a" / "0.png").read_bytes())
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    command = [sys.executable, "-m", "soft_models.predict", name, "--checkpoint", str(checkpoint), "--device", "cpu"]
    command += ["--results-file", str(tmp_path / "result.csv")]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8:strict", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(name + b":\n")
    assert name in (tmp_path / "result.csv").read_bytes()


def test_folders_are_read_as_in_training(predict: Callable[..., Any], data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    for path in ("a.png", ".ipynb_checkpoints/a.png", "sub.png/b.png"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(data / "val" / "a" / "0.png", folder / path)
    (folder / "link").symlink_to(data / "val" / "b")
    (folder / "sub.png" / "loop").symlink_to(folder)
    code, results, _ = predict(str(folder))
    assert code == 0
    found = [Path(result["image"]).relative_to(folder).as_posix() for result in results]
    assert found == ["a.png", "link/0.png", "link/1.png", "link/2.png", "sub.png/b.png"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no images: name files or folders of them"),
        (["nowhere.jpg"], "no image or folder 'nowhere.jpg'"),
        (["{empty}"], "holds no images"),
        (["{image}", "--topk", "0"], "--topk must be at least 1, got 0"),
        (["{image}", "--top-k", "3"], "unknown flag --top-k; did you mean '--topk'"),
        (["{image}", "--seed", "3"], "unknown flag --seed"),
        (["{image}", "--log-interval", "3"], "unknown flag --log-interval"),
        (["{image}", "--model", "soft_tiny"], "is a checkpoint of 'test_byobnet', not of --model 'soft_tiny'"),
        (["{image}", "--class-map", "{classes}"], "4 class names for a head of 3 outputs"),
        (["{image}", "--input-size", "4", "32", "32"], "do not fit"),
    ],
)
def test_mistakes_are_refused(
    predict: Callable[..., Any], data: Path, tmp_path: Path, argv: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\n", encoding="utf-8")
    places = {
        "{empty}": str(tmp_path / "empty"),
        "{image}": str(data / "val" / "a" / "0.png"),
        "{classes}": str(tmp_path / "classes.txt"),
    }
    code, results, printed = predict(*(places.get(text, text) for text in argv))
    assert (code, results, printed.out) == (2, None, "")
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1 or printed.err.startswith("test_byobnet")


def test_missing_checkpoint_and_model(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    image = str(data / "val" / "a" / "0.png")
    assert predict_main([image]) == 2
    assert "no model: give --checkpoint, or --model" in capsys.readouterr().err
    assert predict_main([image, "--checkpoint", "none.pth"]) == 2
    assert "no checkpoint file 'none.pth'" in capsys.readouterr().err
    assert predict_main([image, "--model", "soft_tiny"]) == 2
    assert "soft_tiny" in capsys.readouterr().err


def test_heads_of_a_thousand_are_named_after_imagenet(predict: Callable[..., Any], data: Path, tmp_path: Path) -> None:
    model = timm.create_model("test_byobnet")
    path = tmp_path / "published.pth"
    torch.save({"arch": "test_byobnet", "state_dict": model.state_dict()}, path)
    code, results, printed = predict(str(data / "val" / "a" / "0.png"), path=str(path))
    assert code == 0
    assert "those of imagenet-1k" in printed.err
    assert not any(found["name"].isdigit() for found in results[0]["classes"])


def test_unnamed_outputs_are_shown_by_number(predict: Callable[..., Any], data: Path, tmp_path: Path) -> None:
    path = tmp_path / "bare.pth"
    torch.save(
        {
            "arch": "test_byobnet",
            "args": {"num_classes": 7},
            "state_dict": timm.create_model("test_byobnet", num_classes=7).state_dict(),
        },
        path,
    )
    code, results, printed = predict(str(data / "val" / "a" / "0.png"), path=str(path))
    assert code == 0
    assert "7 of the head's 7 outputs have no name" in printed.err
    assert all(found["name"] == str(found["label"]) for found in results[0]["classes"])


def test_names_that_a_loaded_model_brings_are_used() -> None:
    model = timm.create_model("test_byobnet", num_classes=3)
    model.pretrained_cfg["label_names"] = ("x", "y", "z")  # as save_for_hf writes them
    assert class_names(PredictConfig(), Stored(), model) == ["x", "y", "z"]


def test_a_new_image_of_a_class_is_recognised(predict: Callable[..., Any], tmp_path: Path) -> None:
    for label, name in enumerate(CLASSES):
        write_image(tmp_path / "new" / f"{name}.png", label, np.random.default_rng(label + 10))
    _, results, _ = predict(str(tmp_path / "new"), "--topk", "1")
    assert [result["classes"][0]["name"] for result in results] == list(CLASSES)
