"""Images that cannot be read, or only just: named, counted, and no reason to stop."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import BASE, rows, stop_at
from timm.data import Mixup
from tiny_data import BROKEN, CLASSES, write_folder, write_odd_images

from soft_models.training.augment import BatchTransform
from soft_models.training.data import Batch
from soft_models.training.train import main as train_main
from soft_models.training.validate import main as validate_main


def test_broken_images_do_not_stop_a_run(
    tmp_path: Path, validate: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_folder(tmp_path / "data")
    for split in ("train", "val"):
        path = data / split / "b" / "1.png"
        path.write_bytes(path.read_bytes()[:200])
    argv = [str(data), *BASE, "--mixup", "0.2", "--epochs", "3", "--output", str(tmp_path), "--experiment", "run"]
    assert train_main([*argv, "--val-interval", "2"]) == 0
    error = capsys.readouterr().err
    for split in ("train", "val"):
        assert error.count(f"skipped unreadable image {data / split / 'b' / '1.png'}") == 1
        assert error.count(f"unreadable images of {data / split}, skipped: 1: ") == 1, "after the first pass, once"
    result = validate("--data-dir", str(data), "--checkpoint", str(tmp_path / "run" / "last.pth.tar"))
    assert (result["samples"], result["skipped"]) == (8, 1)
    assert result["loss"] == pytest.approx(float(rows(tmp_path / "run")[2]["eval_loss"]), abs=1e-5)


def test_odd_images_are_trained_on_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_folder(tmp_path / "data")
    for split in ("train", "val"):
        write_odd_images(data / split / "a", data / split / "b" / "0.png")
    argv = [str(data), *BASE, "--epochs", "1", "-b", "5", "--output", str(tmp_path), "--experiment", "run"]
    assert train_main(argv) == 0
    error = capsys.readouterr().err
    for split in ("train", "val"):
        assert f"unreadable images of {data / split}, skipped: {len(BROKEN)}: " in error
        for name in BROKEN:
            assert error.count(f"skipped unreadable image {data / split / 'a' / name} (") == 1
        assert f"1 images of {data / split} are shown by viewers in another orientation" in error
    assert math.isfinite(float(rows(tmp_path / "run")[0]["train_loss"]))


def test_image_that_vanishes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_folder(tmp_path / "data")
    gone = data / "train" / "b" / "1.png"
    argv = [str(data), *BASE, "--epochs", "2", "--output", str(tmp_path), "--experiment", "run"]
    with monkeypatch.context() as patch:
        stop_at(patch, 3, gone.unlink)
        assert train_main(argv) == 0
    assert f"skipped unreadable image {gone} (FileNotFoundError" in capsys.readouterr().err


def test_split_of_which_nothing_can_be_read_gives_no_number(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in CLASSES:
        (tmp_path / "val" / name).mkdir(parents=True)
        (tmp_path / "val" / name / "0.png").write_bytes(b"")
    assert validate_main([str(tmp_path), "-j", "0", "--checkpoint", str(trained / "last.pth.tar")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"none of the 3 images of {tmp_path / 'val'} can be read" in captured.err


def test_training_without_an_image_gives_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_folder(tmp_path / "data")
    for path in (data / "train").rglob("*.png"):
        path.write_bytes(b"")
    argv = [str(data), *BASE, "--val-split", "", "--epochs", "1", "--output", str(tmp_path), "--experiment", "run"]
    assert train_main(argv) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"epoch 0 trained on nothing: no image of {data / 'train'} could be read" in captured.err
    assert not list((tmp_path / "run").glob("*.pth.tar"))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_mixing_leaves_no_image_out(count: int, mode: str) -> None:
    mixup = Mixup(mixup_alpha=0.2, mode=mode, num_classes=3)
    data_config = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    transform = BatchTransform(torch.device("cpu"), data_config, mixup=mixup)
    images = torch.randint(256, (count, 3, 8, 8), dtype=torch.uint8)
    batch = Batch(images, torch.arange(count) % 3, list(range(count)), [], [])
    mixed, targets = transform(batch)
    assert len(mixed) == len(targets) == count
    assert targets.sum(dim=1) == pytest.approx(torch.ones(count))
    if count == 1:
        torch.testing.assert_close(mixed, images / 255)


def test_update_without_any_image_is_left_out(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data")
    for path in (data / "train" / "a").iterdir():
        path.write_bytes(b"")
    options = "--model test_vit --epochs 1 -b 1 --amp --experiment run".split()
    argv = [str(data), *BASE, *options, "--output", str(tmp_path)]
    assert train_main(argv) == 0  # a loss scale, as float16 has one, wants gradients at every update
    assert math.isfinite(float(rows(tmp_path / "run")[0]["train_loss"]))


def test_processes_stop_together_at_a_batch_without_images(tmp_path: Path, command: list[str]) -> None:
    data = write_folder(tmp_path / "data")
    for path in (data / "train").rglob("*.png"):
        path.write_bytes(b"")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    argv = [*launch, *command[1:], "--data-dir", str(data), "--epochs", "1", "-b", "4"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "train.py: stopped: no image of a batch can be read, and the other processes wait for it: " in done.stderr
    assert "RunStopped" not in done.stderr
