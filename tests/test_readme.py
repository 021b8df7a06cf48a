"""The README's snippets run as they stand, in one folder and one after the other, as a reader would run them."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from official import official_shapes, official_state_dict
from PIL import Image

ROOT = Path(__file__).parent.parent
SNIPPETS = re.findall(
    r"^```(\w+)\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
)
# Added to the training command: nothing but what makes it short.
SHORT = ["--epochs", "1", "--img-size", "32", "-b", "4", "-j", "0", "--warmup-epochs", "0", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the README takes for granted: the repository's files, images of one's own, an official file."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("train.py", "validate.py", "configs"):
        (folder / name).symlink_to(ROOT / name)
    for split in ("train", "val"):
        for label in "abc":
            (folder / "my_images" / split / label).mkdir(parents=True)
            for i in range(4):
                image = Image.fromarray(torch.randint(256, (40, 36, 3), dtype=torch.uint8).numpy())
                image.save(folder / "my_images" / split / label / f"{i}.jpg")
    weights = official_state_dict(official_shapes("soft_official", "soft_tiny"))
    torch.save({"state_dict": weights}, folder / "soft_tiny.pth")
    deit = timm.create_model("deit_tiny_patch16_224")
    torch.save({"model": deit.state_dict()}, folder / "deit_tiny_patch16_224.pth")
    return folder


def test_snippets_run_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    for language, text in SNIPPETS:
        if language == "python":
            exec(text, names)
        else:
            for line in text.splitlines():
                run(line)
    assert names["logits"].shape == (2, 10)  # type: ignore[attr-defined]
    assert [tuple(x.shape) for x in (names["maps"][0], names["maps"][-1])] == [(1, 64, 75, 125), (1, 512, 10, 16)]  # type: ignore[index]
    assert names["strides"] == [4, 8, 16, 32]
    assert names["other"].num_classes == 5  # type: ignore[attr-defined]


def run(line: str) -> None:
    program, *arguments = shlex.split(line, comments=True)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(arguments) <= set(targets), f"no such target: {line}"
        return
    assert program == "python", f"no test runs {line!r}"
    if arguments[0] == "train.py":
        arguments += SHORT
    elif arguments[0] == "validate.py":
        arguments += ["-b", "4", "-j", "0", "--device", "cpu"]
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{line}\n{result.stderr[-3000:]}"
