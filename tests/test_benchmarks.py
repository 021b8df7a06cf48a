"""The comparison of attentions: fits, cells that survive an interruption, and tables that say what was measured."""

import csv
import math
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_data import write_folder
from torch.testing import assert_close

from benchmarks import accuracy, attention, cells, gpu, inverse, measure, report, speed
from benchmarks.cells import Block, Samples, run_blocks
from benchmarks.plan import LAYERS, Plan
from benchmarks.report import PAPER
from soft_models.attention import create_attention
from soft_models.errors import UsageError

MODELS = {"softmax": "pyramid_tiny_softmax", "soft": "soft_tiny"}
PLAN = Plan((32, 64), (32,), (64,), 1, 2, 2, 5.0, (4, 8, 16), (4, 8))


class Interrupted(BaseException):
    """Stands for a key press."""


# Steps, fits and counts.


def test_step_in_a_process_of_its_own_is_timed(tmp_path: Path) -> None:
    step = measure.OwnProcess(partial, Path.write_text, tmp_path / "out", "done")
    assert not (tmp_path / "out").exists()
    times = measure.in_turns({"theirs": step, "here": lambda: None}, rounds=2)
    assert (tmp_path / "out").read_text() == "done"
    assert len(times["theirs"]) == 2 and min(times["theirs"]) > 0


@pytest.mark.parametrize("power", [0.0, 1.0, 1.7, 2.0])
def test_growth_exponent_recovers_the_power(power: float) -> None:
    sizes = [1024, 2025, 4096, 16384]
    assert measure.growth_exponent(sizes, [3e-5 * size**power for size in sizes]) == pytest.approx(power, abs=1e-9)


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0], [1.0, 2.0, 4.0]])
def test_quartiles_lie_within_what_was_measured(values: list[float]) -> None:
    low, middle, high = measure.quartiles(values)
    assert min(values) <= low <= middle <= high <= max(values)
    assert len(values) == 1 or low < middle < high
    assert middle == median(values)


def test_fit_takes_the_largest_maps_and_says_which() -> None:
    rows = [{"attention": "soft", "tokens": n, "seconds": 1.0 + 1e-3 * max(n, 400) ** 2} for n in (4, 16, 400, 900)]
    rows += [{"attention": "soft", "tokens": n, "seconds": 1e-3 * n**2} for n in (1600, 2500)]
    found = report.fit(rows, "soft", "seconds")
    assert found is not None
    assert (found.first, found.last) == (400, 2500)
    assert found.exponent == pytest.approx(2.0, abs=0.01)
    assert report.fit(rows[:1], "soft", "seconds") is None


@pytest.mark.parametrize("name", sorted(PAPER))
def test_multiply_adds_are_the_papers_within_5_percent(name: str) -> None:
    ours, papers = report.counted_as_in_paper(name) / 1e9, PAPER[name]
    assert ours == pytest.approx(papers, rel=0.05), f"{name}: {ours:.2f} G, the paper says {papers} G"


def test_explicit_softmax_is_the_fused_one() -> None:
    attn = create_attention("softmax", 16, num_heads=2)
    x = torch.randn(2, 15, 16)
    assert_close(attention.explicit_softmax(attn, x, (5, 3)), attn(x, (5, 3)))


@pytest.mark.parametrize("name", LAYERS)
def test_layer_step_runs_forward_and_backward(name: str) -> None:
    for backward in (False, True):
        gradient = attention.layer(name, 9, backward)()
        assert (gradient is not None) == backward


def fill_64_mb() -> measure.Step:
    return lambda: torch.ones(16 * 2**20).mul_(2)


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_peak_memory_is_that_of_the_step() -> None:
    assert measure.peak_memory(fill_64_mb, threads=1) == pytest.approx(64 * 2**20, rel=0.1)


# Cells.


def makes_of(log: list[str], stop_after: int = 1000) -> dict[str, Callable[[], float]]:
    def sample(name: str) -> float:
        if len(log) == stop_after:
            raise Interrupted
        log.append(name)
        return float(len(log))

    return {name: lambda name=name: sample(name) for name in "abc"}


def test_interrupted_run_keeps_its_samples_and_goes_on(tmp_path: Path) -> None:
    path, first, second = tmp_path / "samples.jsonl", list[str](), list[str]()
    with pytest.raises(Interrupted):
        run_blocks([Block(makes_of(first, 4), 3, measure=True)], Samples(path, {}), "")
    assert first == ["a", "b", "c", "a"], "in turns"
    samples = Samples(path, {})
    assert [len(samples[name]) for name in "abc"] == [2, 1, 1]
    block = Block(makes_of(second), 3, measure=True)
    run_blocks([block], samples, "")
    assert sorted(second) == ["a", "b", "b", "c", "c"]
    assert [len(Samples(path, {})[name]) for name in "abc"] == [3, 3, 3]
    run_blocks([block], samples, "")
    assert len(second) == 5, "nothing is left to measure"


def test_slow_cell_gets_no_further_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "seconds", lambda step: step())
    times = {"slow": 3.0, "quick": 0.1}
    block = Block({name: lambda t=t: lambda: t for name, t in times.items()}, 4, cell_seconds=5.0)
    samples = Samples(tmp_path / "samples.jsonl", {})
    run_blocks([block], samples, "")
    assert samples.values == {"slow": [3.0, 3.0], "quick": [0.1] * 4}


def test_torn_line_is_dropped_and_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    samples = Samples(path, {"threads": 2})
    samples.add("a", 1.5)
    samples.add("a", math.nan)
    with path.open("a") as file:
        file.write('["a", 2.')
    again = Samples(path, {"threads": 2})
    assert again["a"][0] == 1.5 and math.isnan(again["a"][1]) and len(again["a"]) == 2
    again.add("b", 1.0)
    assert Samples(path, {"threads": 2})["b"] == [1.0]
    with pytest.raises(UsageError, match=r"measured under .*2.*, not under .*1.*give --fresh"):
        Samples(path, {"threads": 1})
    assert Samples(path, {"threads": 1}, fresh=True).values == {}


def test_what_was_measured_is_only_read_where_nothing_is_added(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    assert Samples.stored(path) is None
    Samples(path, {"threads": 2}).add("a", 1.5)
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    before = path.stat().st_mtime_ns, path.stat().st_ino
    stored = Samples.stored(path)
    assert stored is not None and stored.values == {"a": [1.5]}
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before
    tmp_path.chmod(0o755)
    for text in ("", '{"settings": {'):
        (tmp_path / "torn.jsonl").write_text(text)
        assert Samples.stored(tmp_path / "torn.jsonl") is None


# Tables and pictures.


def synthetic(tmp_path: Path) -> tuple[Samples, Samples]:
    """A finished run: every cell has two samples, made up."""
    samples = Samples(tmp_path / "samples.jsonl", {})
    for block in [*attention.timed_blocks(PLAN), *attention.memory_blocks(PLAN, 1)]:
        for number, key in enumerate(block.makes):
            side = int(key.split(" ")[-1])
            growth = side**4 if "softmax" in key else side**2
            for k in range(block.rounds):
                samples.add(key, 1e-5 * growth * (1 + 0.1 * k) * (1 if "layer" in key else number + 1))
    return samples, synthetic_scores(tmp_path)


def synthetic_scores(folder: Path) -> Samples:
    """Of two seeds, made up."""
    recipe = accuracy.Recipe(1, 2, 7, 5, (48, 64))
    scores = Samples(folder / accuracy.FILE, asdict(recipe))
    for name in MODELS.values():
        for seed in range(2):
            for size in recipe.sizes:
                scores.add(accuracy.cell(name, seed, size), 90 + seed + size / 64)
    return scores


def tables(text: str) -> list[list[dict[str, str]]]:
    """The Markdown tables in ``text``, their rows by column."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines()]
        found.append([dict(zip(header, row, strict=True)) for row in rows])
    return found


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention, report):
        monkeypatch.setattr(module, "MODELS", MODELS)
        monkeypatch.setattr(module, "PEERS", ("test_byobnet",))


def test_markdown_says_what_the_csv_says_and_plots_are_there(two_models: None, tmp_path: Path) -> None:
    samples, scores = synthetic(tmp_path)
    report.report(PLAN, samples, scores, tmp_path)
    counts, speeds, growth, digits = tables((tmp_path / "attention.md").read_text(encoding="utf-8"))
    models = read(tmp_path / "models.csv")
    assert [row["attention"] for row in counts] == [f"`{row['attention']}`" for row in models]
    for count, rates, row in zip(counts, speeds, models, strict=True):
        assert count["parameters"] == f"{float(row['parameters']) / 1e6:.2f} M"
        assert count["multiply-adds"] == f"{float(row['multiply_adds']) / 1e9:.2f} G"
        for kind, size in (("inference", 32), ("inference", 64), ("training", 32)):
            middle, spread = rates[f"{kind} {size}, img/s"].removesuffix(" %").split(" ± ")
            column = f"{kind}_{size}_images_per_s"
            low, high = float(row[f"{column}_low"]), float(row[f"{column}_high"])
            assert float(middle) == pytest.approx(float(row[column]), rel=0.06)
            assert float(spread) == pytest.approx(50 * (high - low) / float(row[column]), abs=0.5)
        assert rates["training 32, MB"] == f"{float(row['memory_training_32_bytes']) / 1e6:,.0f}"
        if row["digits_top1"]:
            assert (
                count["digits at 64, top-1"]
                == f"{float(row['digits_top1']):.1f} ± {float(row['digits_top1_sd']):.1f} %"
            )
            assert float(row["digits_top1"]) == 91.5
    exponents = {row["attention layer"]: row["time grows as N to the"] for row in growth}
    assert exponents["`softmax`"] == "2.00" and exponents["`soft`"] == "1.00"
    assert next(row for row in growth if row["attention layer"] == "`soft`")["fitted over N"] == "16 to 256"
    assert {row["64"] for row in digits} == {"91.5 ± 0.7 %"}
    assert len(read(tmp_path / "accuracy.csv")) == len(MODELS) * 2 * 2
    for name in ("throughput", "growth", "accuracy"):
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert min(picture.size) > 300


def test_accuracy_of_some_seeds_is_not_called_that_of_all(tmp_path: Path) -> None:
    def heading(scores: Samples) -> str:
        text, *table = accuracy.report(scores, MODELS, tmp_path)
        tables_of.append(tables("\n".join([*table, ""]))[0])
        return text

    tables_of: list[list[dict[str, str]]] = []
    scores = synthetic_scores(tmp_path)
    assert "mean ± standard deviation of 2 seeds, by pixels" in heading(scores)
    for size in (48, 64):
        del scores.values[accuracy.cell("soft_tiny", 1, size)]
    assert "of 2 seeds, as far as measured, by pixels" in heading(scores)
    assert [row["64"] for row in tables_of[-1]] == ["91.5 ± 0.7 %", "91.0 %"]
    with Image.open(tmp_path / "accuracy.png") as picture:
        assert min(picture.size) > 300


def test_command_measures_once_and_then_only_reports(
    two_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "QUICK", Plan((32,), (32,), (), 1, 1, 1, 5.0, (4, 8), (4, 8)))
    monkeypatch.setattr(attention, "peak_memory", lambda make, *args, threads: 1e6 * len(args))
    argv = ["--quick", "--threads", "1", "--output", str(tmp_path)]
    assert attention.main(argv) == 0
    assert [row["model"] for row in read(tmp_path / "models.csv")] == [*MODELS.values(), "test_byobnet"]
    before = (tmp_path / "samples.jsonl").read_text()
    monkeypatch.setattr(attention, "model_step", lambda *_: pytest.fail("measured again"))
    assert attention.main(argv) == 0
    assert (tmp_path / "samples.jsonl").read_text() == before
    assert "| `soft` |" in caplog.text


def test_accuracy_is_reported_beside_speeds_of_another_plan(
    two_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--threads", "1", "--output", str(tmp_path)]
    monkeypatch.setattr(attention, "QUICK", Plan((32,), (32,), (), 1, 1, 1, 5.0, (4, 8), (4, 8)))
    monkeypatch.setattr(attention, "peak_memory", lambda make, *args, threads: 1e6 * len(args))
    assert attention.main([*argv, "--quick"]) == 0
    counts, *speeds = tables((tmp_path / "attention.md").read_text(encoding="utf-8"))
    monkeypatch.setattr(accuracy, "run", lambda *_: 0 if synthetic_scores(tmp_path) else 1)
    assert attention.main([*argv, "--accuracy"]) == 0
    reported, *others, by_size = tables((tmp_path / "attention.md").read_text(encoding="utf-8"))
    assert others == speeds
    column = "digits at 64, top-1"
    assert [row.pop(column) for row in reported] == ["91.5 ± 0.7 %"] * len(MODELS) + ["-"]
    assert {row.pop(column, "-") for row in counts} == {"-"} and reported == counts
    assert {row["64"] for row in by_size} == {"91.5 ± 0.7 %"}


def test_table_is_written_to_a_new_folder(tmp_path: Path) -> None:
    path = measure.table_file(str(tmp_path / "new" / "table.md"))
    assert path.parent.exists(), "before anything is measured"
    assert measure.show_table(["head"], ["row"], path) == ["head", "row"]
    assert path.read_text(encoding="utf-8") == "head\nrow\n"


@pytest.mark.parametrize(
    ("program", "argv", "message"),
    [
        (speed, ["--rows", "nosuchrow"], "no row matches 'nosuchrow'"),
        (speed, ["--rows", "(cosformer"], "--rows is no regular expression: missing )"),
        (speed, ["--rounds", "0"], "must be a number of at least 1, got '0'"),
        (speed, ["--output", "."], ". is a folder: name a file"),
        (inverse, ["--output", "."], ". is a folder: name a file"),
        (inverse, ["--output", "/dev/null/table.md"], "cannot write to the folder '/dev/null'"),
        (attention, ["--threads", "0"], "must be a number of at least 1, got '0'"),
        (attention, ["--accuracy", "--seeds", "0"], "must be a number of at least 1, got '0'"),
        (gpu, ["--work", "16x1"], "must be a side from 32 and a batch from 1, got '16x1'"),
        (gpu, ["--output", "."], ". is a folder: name a file"),
        (gpu, ["--models", "soft_tinny"], "unknown model 'soft_tinny'; did you mean 'soft_tiny'"),
    ],
)
def test_what_cannot_be_measured_or_written_is_refused(
    program: Any, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(argv)
    assert message in capsys.readouterr().err


# Accuracy.


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--train-images=351", "--train-images must lie in 1 to 350, got 351"),
        ("--test-images=0", "--test-images must lie in 1 to"),
        ("--sizes=0", "--sizes must be at least 32 pixels, got 0"),
    ],
)
def test_digits_that_there_are_not_are_refused(
    option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attention.main(["--accuracy", option, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_digits_that_have_moved_are_linked_anew(digits: Path, tmp_path: Path) -> None:
    recipe = accuracy.Recipe(1, 1, 2, 2, (64,))
    accuracy.select_images(digits, tmp_path / "runs", recipe)
    moved = digits.rename(tmp_path / "moved")
    links = list(accuracy.select_images(moved, tmp_path / "runs", recipe).rglob("*.png"))
    assert len(links) == 12 and all(link.exists() for link in links)


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_folder(tmp_path / "digits", train=24, val=3)
    (folder / "val").rename(folder / "test")
    monkeypatch.setattr(accuracy, "build_digits", lambda folder: folder)
    return folder


def test_accuracy_fills_its_cells_once(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, out, runs = accuracy.Recipe(1, 1, 22, 2, (48, 64)), tmp_path / "out", tmp_path / "runs"
    asked: list[int] = []

    def interrupt_at_64(data: Path, checkpoint: Path, size: int) -> float:
        asked.append(size)
        if size == 64:
            raise Interrupted
        return evaluate(data, checkpoint, size)

    evaluate = accuracy.evaluate
    with monkeypatch.context() as patch:
        patch.setattr(accuracy, "evaluate", interrupt_at_64)
        with pytest.raises(Interrupted):
            accuracy.run((recipe, digits), ["soft_tiny"], out, runs, False)
    assert asked == [48, 64]
    caplog.clear()
    assert accuracy.run((recipe, digits), ["soft_tiny"], out, runs, False) == 0
    assert "the run is finished" in caplog.text, "it is not trained again"
    scores = Samples.stored(out / accuracy.FILE)
    assert scores is not None
    assert set(scores.values) == {"soft_tiny 0 48", "soft_tiny 0 64"}
    assert all(0 <= value[0] <= 100 and len(value) == 1 for value in scores.values.values())
    assert [path.name for path in runs.glob("*/*.pth.tar")] == ["last.pth.tar"], "kept for pictures"
    caplog.clear()
    assert accuracy.run((recipe, digits), ["soft_tiny"], out, runs, True) == 0
    other = accuracy.Recipe(1, 1, 23, 2, (64,))
    assert accuracy.run((other, digits), ["soft_tiny"], tmp_path / "other", runs, False) == 0
    assert "the run is finished" not in caplog.text, "both are trained"
    monkeypatch.setattr(accuracy, "train_main", None)
    assert accuracy.run((recipe, digits), ["soft_tiny"], out, runs, False) == 0


@pytest.mark.parametrize(("code", "trained"), [(130, 1), (1, 2)], ids=["interrupted", "diverged"])
def test_only_an_interruption_stops_the_other_cells(
    code: int, trained: int, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(accuracy, "train_main", lambda argv: asked.append(argv) or code)
    recipe, runs = accuracy.Recipe(1, 1, 2, 2, (64,)), tmp_path / "runs"
    assert accuracy.run((recipe, digits), ["soft_tiny", "vvt_tiny"], tmp_path / "out", runs, False) == code
    assert len(asked) == trained
    links = sorted((runs / "data/2-2").rglob("*.png"))
    assert len(links) == 12 and all(link.is_symlink() for link in links)


def test_gpu_script_runs_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of it, at a size for a CPU; the process that measures memory would take most of the time."""
    monkeypatch.setattr(gpu, "peak_memory", lambda *args: 2.5e6)
    path = tmp_path / "gpu.md"
    options = ["--work", "64x2", "--rounds", "2", "--models", "soft_tiny", "swin_tiny_patch4_window7_224"]
    options += ["--compiled", "vvt_tiny"]  # not among them
    assert gpu.main([*options, "--output", str(path)]) == 0
    lines = path.read_text(encoding="utf-8").splitlines()
    assert "bfloat16 autocast" in lines[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[4:]]
    assert [row[0] for row in rows] == ["inference 64, batch 2"] * 2 + ["training 64, batch 2"] * 2
    assert all(float(row[2]) > 0 and row[4] == "2" for row in rows)
