"""README and docs: snippets run as they stand, in order and in one folder; numbers are those of the runs named."""

import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from official import official_shapes, official_state_dict
from PIL import Image

from soft_models.registry import registered_names

ROOT = Path(__file__).parent.parent


def snippets(path: str) -> list[tuple[str, str]]:
    """Language and text of every code block of a page."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


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
    for language, text in snippets("README.md"):
        if language == "python":
            exec(text, names)
        else:
            for line in text.splitlines():
                run(line)
    assert names["logits"].shape == (2, 10)
    assert [tuple(x.shape) for x in (names["maps"][0], names["maps"][-1])] == [(1, 64, 75, 125), (1, 512, 10, 16)]
    assert names["strides"] == [4, 8, 16, 32]
    (scores,) = names["segmenter"].eval()([torch.randn(3, 64, 64)])
    assert scores.shape == (150, 64, 64)
    assert names["other"].num_classes == 5


def test_downstream_snippets_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    pytest.importorskip("transformers")
    fake = types.ModuleType("detectron2.modeling")
    fake.Backbone = torch.nn.Module
    monkeypatch.setitem(sys.modules, "detectron2", types.ModuleType("detectron2"))
    monkeypatch.setitem(sys.modules, "detectron2.modeling", fake)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for _, text in snippets("docs/downstream.md"):
        exec(text, names)
    images = torch.randn(1, 3, 64, 64)
    assert names["unet"].eval()(images).shape == (1, 3, 64, 64)
    assert [x.shape[1] for x in names["hf_backbone"](images).feature_maps] == names["mm_neck"]["in_channels"]
    backbone = names["detectron2_backbone"]("soft_tiny", ("res3", "res5"))
    assert {k: tuple(y.shape) for k, y in backbone(images).items()} == {"res3": (1, 128, 8, 8), "res5": (1, 512, 2, 2)}


def test_every_link_to_a_file_leads_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md", *(f"docs/{file.name}" for file in (ROOT / "docs").iterdir())):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8")):
            assert "://" in target or ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


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


def test_comparison_is_that_of_the_run() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = table(text.partition("<!-- comparison")[2].partition("<!-- end of comparison -->")[0])
    measured = table((ROOT / "benchmarks" / "results" / "attention" / "attention.md").read_text(encoding="utf-8"))
    names = {"top-1 by the paper": "paper's top-1", "digits, 64 px": "digits at 64, top-1"}
    names["a layer's time grows as N to the"] = "time grows as N to the"
    assert len({row for row, _ in shown}) == 12
    for (row, column), value in shown.items():
        assert value == measured.get((row, names.get(column, column)), "-"), f"{column} of {row}"


def table(text: str) -> dict[tuple[str, str], str]:
    """Cells of the tables of a page by row and column, the first of each name."""
    found: dict[tuple[str, str], str] = {}
    columns: list[str] = []
    for line in text.splitlines():
        if line.startswith("| `"):
            row, *values = cells(line)
            for column, value in zip(columns, values, strict=True):
                found.setdefault((row, column), value)
        elif line.startswith("| "):
            columns = cells(line)[1:]
    return found


def test_speeds_are_those_of_the_run() -> None:
    shown, results = (
        {tuple(cells(line)[:2]) for line in text.splitlines() if line.startswith("| ")}
        for text in (
            (ROOT / "README.md").read_text(encoding="utf-8").partition("<!-- speed")[2].partition("<!-- end")[0],
            (ROOT / "benchmarks" / "results" / "speed.md").read_text(encoding="utf-8"),
        )
    )
    assert len(shown) > 20
    assert shown <= results


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_counts_in_words_are_those_of_the_registry() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"[all {len(registered_names())}]" in text
    words = ("six", "seven", "eight", "nine", "ten", "eleven", "twelve")
    others = [name for name in registered_names() if name.startswith("pyramid_tiny_")]
    assert f"SOFT-Tiny's body with {words[len(others) - 6]} other attentions" in text
