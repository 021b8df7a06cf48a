"""Accuracy of every attention on handwritten digits, under one recipe, with ``train.py`` and ``validate.py``."""

import argparse
import contextlib
import io
import json
import logging
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.cells import Samples
from benchmarks.measure import count
from examples.digits import SPLITS, DigitsError, build_digits
from soft_models.commands.files import write_csv
from soft_models.errors import UsageError
from soft_models.layers import MIN_SIZE
from soft_models.training.train import main as train_main
from soft_models.training.validate import main as validate_main

_logger = logging.getLogger("benchmarks")

CONFIG = Path(__file__).parent.parent / "configs/digits.yaml"
TRAIN_SIZE = 64  # pixels
FILE = "accuracy.jsonl"


@dataclass(frozen=True)
class Recipe:
    """What one cell, an attention under one seed, trains on and is evaluated on."""

    epochs: int
    seeds: int
    train_images: int  # per class
    test_images: int  # per class
    sizes: tuple[int, ...]  # pixels per side at evaluation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("accuracy")
    group.add_argument("--data-dir", type=Path, default=Path("data/digits"), help="digits, built where missing")
    group.add_argument("--epochs", type=count, default=3)
    group.add_argument("--seeds", type=count, default=3)
    group.add_argument("--train-images", type=int, default=SPLITS["train"], help="per class")
    group.add_argument("--test-images", type=int, default=50, help="per class")
    group.add_argument("--sizes", type=int, nargs="+", default=[48, 64, 96, 128, 256], help="pixels at evaluation")


def recipe_of(args: argparse.Namespace) -> tuple[Recipe, Path]:
    """The recipe that the flags describe, and the folder of the digits.

    Raises:
        UsageError: More images of a class than there are, or fewer than one, or a size that is too small.
    """
    for split, images in (("train", args.train_images), ("test", args.test_images)):
        if not 1 <= images <= SPLITS[split]:
            raise UsageError(f"--{split}-images must lie in 1 to {SPLITS[split]}, got {images}")
    if min(args.sizes) < MIN_SIZE:
        raise UsageError(f"--sizes must be at least {MIN_SIZE} pixels, got {min(args.sizes)}")
    sizes = tuple(sorted({*args.sizes, TRAIN_SIZE}))
    return Recipe(args.epochs, args.seeds, args.train_images, args.test_images, sizes), args.data_dir


def run(recipe_and_data: tuple[Recipe, Path], models: Sequence[str], output: Path, runs: Path, fresh: bool) -> int:
    """Fill the cells that are missing, seed by seed.

    Returns:
        0; 1 if a training could not go on, whose cell is left open; or the code of a script that was stopped.
    """
    recipe, data_dir = recipe_and_data
    scores = Samples(output / FILE, asdict(recipe), str(date.today()), fresh)
    try:
        data = select_images(build_digits(data_dir), runs / "data", recipe)
    except DigitsError as error:
        raise UsageError(str(error)) from None
    result = 0
    cells = [(seed, name) for seed in range(recipe.seeds) for name in models]
    for number, (seed, name) in enumerate(cells, start=1):
        missing = [size for size in recipe.sizes if not scores[cell(name, seed, size)]]
        if not missing:
            continue
        _logger.info("cell %d of %d: %s, seed %d", number, len(cells), name, seed)
        folder = runs / f"{name}-{seed}-{recipe.train_images}-{recipe.epochs}"
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        code = train(recipe, name, seed, data, folder)
        if code == 1:
            result = 1
            continue
        if code:
            return code
        for size in missing:
            top1 = evaluate(data, folder / "last.pth.tar", size)
            scores.add(cell(name, seed, size), top1)
            _logger.info("%s, seed %d, %d px: %.1f %%", name, seed, size, top1)
        for file in folder.glob("*.pth.tar"):  # one model of each attention is kept, for pictures
            if seed or file.name != "last.pth.tar":
                file.unlink()
    return result


def cell(name: str, seed: int, size: int) -> str:
    return f"{name} {seed} {size}"


def select_images(digits: Path, folder: Path, recipe: Recipe) -> Path:
    """A folder with links to the first images of every class, ``train`` and ``test``."""
    folder = folder / f"{recipe.train_images}-{recipe.test_images}"
    for split, images in (("train", recipe.train_images), ("test", recipe.test_images)):
        for label in sorted((digits / split).iterdir()):
            (folder / split / label.name).mkdir(parents=True, exist_ok=True)
            for file in sorted(label.glob("*.png"))[:images]:
                link = folder / split / label.name / file.name
                if not link.exists():
                    link.unlink(missing_ok=True)  # to where the digits were
                    link.symlink_to(file.resolve())
    return folder


def train(recipe: Recipe, name: str, seed: int, data: Path, folder: Path) -> int:
    """Train one cell, or go on with it."""
    return quietly(train_main, [
        "--config", str(CONFIG), "--data-dir", str(data), "--val-split", "", "--model", name,
        "--img-size", str(TRAIN_SIZE), "--model-kwargs", f"img_size={TRAIN_SIZE}",
        "--epochs", str(recipe.epochs), "--seed", str(seed), "--checkpoint-hist", "1",
        "--output", str(folder.parent), "--experiment", folder.name, "--resume", "auto",
    ])  # fmt: skip


def evaluate(data: Path, checkpoint: Path, size: int) -> float:
    """Top-1 of a checkpoint at another image size, in percent."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        code = quietly(validate_main, [
            "--data-dir", str(data), "--split", "test", "--checkpoint", str(checkpoint), "--img-size", str(size),
            "--batch-size", str(max(1, 50 * TRAIN_SIZE**2 // size**2)), "--workers", "1", "--results-file", str(result),
        ])  # fmt: skip
        if code:
            raise UsageError(f"cannot evaluate {checkpoint} at {size} pixels")
        return float(json.loads(result.read_text(encoding="utf-8"))["top1"])


def quietly(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run the main of a script without what it prints for other programs."""
    with contextlib.redirect_stdout(io.StringIO()):
        return main(arguments)


def mean_top1(scores: Samples, name: str, size: int) -> tuple[float, float, int] | None:
    """Mean and standard deviation (NaN of one seed) in percent, and the number of seeds."""
    values = [value for key, found in scores.values.items() for value in found if is_cell(key, name, size)]
    if not values:
        return None
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else math.nan, len(values)


def is_cell(key: str, name: str, size: int) -> bool:
    own, _, pixels = key.split(" ")
    return (own, pixels) == (name, str(size))


def text(mean: float, deviation: float) -> str:
    return f"{mean:.1f} %" if math.isnan(deviation) else f"{mean:.1f} ± {deviation:.1f} %"


def report(scores: Samples, models: Mapping[str, str], output: Path) -> list[str]:
    """Write CSV and plot; returns the Markdown table: a row for each attention, a column for each image size."""
    sizes: Iterable[int] = sorted({int(key.split(" ")[2]) for key in scores.values})
    rows: list[dict[str, Any]] = []
    for key, values in scores.values.items():
        name, seed, size = key.split(" ")
        attention = next(attention for attention, model in models.items() if model == name)
        rows.append({"attention": attention, "seed": int(seed), "size": int(size), "top1": values[0]})
    write_csv(output / "accuracy.csv", rows)
    recipe, seeds = scores.settings, scores.settings["seeds"]
    of_seeds = f"mean ± standard deviation of {seeds} seeds" if seeds > 1 else "one seed"
    if len(rows) < len(models) * len(recipe["sizes"]) * seeds:
        of_seeds += ", as far as measured"
    what = (
        f"{10 * recipe['train_images']:,} digits, {recipe['epochs']} epochs; top-1 of "
        f"{10 * recipe['test_images']:,} others, {of_seeds}"
    )
    lines = [
        f"`python -m benchmarks.attention --accuracy`, {scores.note}: trained at {TRAIN_SIZE} pixels on {what}, "
        "by pixels at evaluation.", "",
        "| attention | " + " | ".join(map(str, sizes)) + " |", "|---" + "|---:" * len(list(sizes)) + "|",
    ]  # fmt: skip
    series: dict[str, list[tuple[float, ...]]] = {}
    for attention, name in models.items():
        found = {size: mean_top1(scores, name, size) for size in sizes}
        if any(found.values()):
            lines.append(f"| `{attention}` | " + " | ".join(text(*m[:2]) if m else "-" for m in found.values()) + " |")
            series[attention] = [(size, m[0], m[1]) for size, m in found.items() if m]
    if series:
        plots.plot_accuracy(series, TRAIN_SIZE, what, output / "accuracy.png")
    return lines
