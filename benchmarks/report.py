"""Tables and pictures of the comparison, from its samples."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from benchmarks import accuracy, plots
from benchmarks.cells import Samples
from benchmarks.measure import growth_exponent, quartiles
from benchmarks.plan import HEADS, LAYERS, MODELS, PEERS, QUICK, WIDTH, Plan, memory_cell
from soft_models.attention.linformer import LinformerAttention
from soft_models.attention.performer import PerformerAttention
from soft_models.commands.files import write_atomic, write_csv
from soft_models.table import count_multiply_adds
from soft_models.table import describe as describe_model

# Multiply-adds in G, arXiv:2110.11945, the table of attentions inside SOFT-Tiny.
PAPER = {"softmax": 3.9, "linformer": 1.9, "performer": 2.2, "nystromformer": 2.0, "soft": 1.9}
FIT = 4  # largest maps that an exponent is fitted to

describe = functools.cache(describe_model)


@functools.cache
def counted_as_in_paper(attention: str) -> int:
    """Multiply-adds of SOFT-Tiny's body at 224 pixels under the conventions that give the paper's table.

    What differs from ours: iterative inverses are left out; softmax sits in the released pre-norm block, whose MLPs are
    8 C wide in stages 1 and 2; Linformer projects keys and values of all tokens and pools then; Performer has
    ``d ln d`` features per head of width d, where ours has ``2 d``.
    """
    own = describe(MODELS[attention])
    if own.inverse_multiply_adds:
        return own.multiply_adds - own.inverse_multiply_adds
    kwargs = {"mlp_ratios": (8, 8, 4, 4)} if attention == "softmax" else {}
    model = timm.create_model(own.name, device="meta", **kwargs).eval()
    for module in list(model.modules()):
        if isinstance(module, LinformerAttention):
            module.pool, module.kv = ProjectThenPool(module.kv, module.pool), nn.Identity()  # type: ignore[assignment]
        elif isinstance(module, PerformerAttention):
            width = module.directions.shape[1]
            module.directions = torch.empty(int(width * math.log(width)), width, device="meta")
    return count_multiply_adds(model, (3, 224, 224))


class ProjectThenPool(nn.Module):
    """Linformer's order: keys and values of all tokens, then their reduction."""

    def __init__(self, project: nn.Module, pool: nn.Module) -> None:
        super().__init__()
        self.project, self.pool = project, pool

    def forward(self, x: torch.Tensor, feat_size: tuple[int, int]) -> torch.Tensor:
        return self.pool(self.project(x), feat_size)


def model_rows(plan: Plan, samples: Samples, scores: Samples | None) -> list[dict[str, Any]]:
    """One row per model, in plain numbers: images per second with quartiles, bytes, percent."""
    rows = []
    for attention, name in [*MODELS.items(), *((peer, peer) for peer in PEERS)]:
        own = describe(name)
        row: dict[str, Any] = {
            "attention": attention,
            "model": name,
            "parameters": own.parameters,
            "multiply_adds": own.multiply_adds,
        }
        if attention in PAPER:
            row["counted_as_in_paper"] = counted_as_in_paper(attention)
            row["paper_multiply_adds"] = PAPER[attention] * 1e9
            row["paper_top1"] = own.published_top1
        for kind, sizes in plan.sizes.items():
            for size in sizes:
                if times := samples[plan.model_cell(kind, name, size)]:
                    low, middle, high = quartiles([plan.batch(size) / value for value in times])
                    column = f"{kind}_{size}_images_per_s"
                    row |= {column: middle, f"{column}_low": low, f"{column}_high": high}
        for kind, sizes in plan.sizes_for_memory.items():
            for size in sizes:
                if peak := samples[memory_cell(plan.model_cell(kind, name, size))]:
                    row[f"memory_{kind}_{size}_bytes"] = peak[0]
        if scores is not None and (mean := accuracy.mean_top1(scores, name, accuracy.TRAIN_SIZE)):
            row["digits_top1"], row["digits_top1_sd"], row["digits_seeds"] = mean
        rows.append(row)
    return rows


def layer_rows(plan: Plan, samples: Samples) -> list[dict[str, Any]]:
    """One row per attention layer and map size: tokens, seconds with quartiles, bytes."""
    rows = []
    for name in LAYERS:
        for side in plan.layer_sides(name):
            row: dict[str, Any] = {"attention": name, "tokens": side * side}
            if times := samples[plan.layer_cell(name, side)]:
                low, middle, high = quartiles(times)
                row |= {"seconds": middle, "seconds_low": low, "seconds_high": high}
            if peak := samples[memory_cell(plan.layer_cell(name, side))]:
                row["bytes"] = peak[0]
            rows.append(row)
    return rows


@dataclass(frozen=True)
class Fit:
    """A fitted exponent and the range of tokens that it was fitted over."""

    exponent: float
    first: int
    last: int


def fit(rows: Sequence[Mapping[str, Any]], attention: str, cost: str) -> Fit | None:
    """Growth of a column of :func:`layer_rows` over its largest ``FIT`` maps; None with fewer than two of them."""
    points = [(row["tokens"], row[cost]) for row in rows if row["attention"] == attention and row.get(cost, 0) > 0]
    points = points[-FIT:]
    if len(points) < 2:
        return None
    tokens, costs = zip(*points, strict=True)
    return Fit(growth_exponent(tokens, costs), tokens[0], tokens[-1])


Form = Callable[[Mapping[str, Any]], str]


def counts_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sizes, the paper's numbers and the digits, of :func:`model_rows`, in Markdown."""
    columns: dict[str, Form] = {
        "parameters": lambda row: f"{row['parameters'] / 1e6:.2f} M",
        "multiply-adds": lambda row: f"{row['multiply_adds'] / 1e9:.2f} G",
        "as the paper counts": lambda row: f"{row['counted_as_in_paper'] / 1e9:.2f} G",
        "paper": lambda row: f"{row['paper_multiply_adds'] / 1e9:.1f} G",
        "paper's top-1": lambda row: f"{row['paper_top1']:.1f} %",
    }
    if any("digits_top1" in row for row in rows):
        columns[f"digits at {accuracy.TRAIN_SIZE}, top-1"] = lambda row: accuracy.text(
            row["digits_top1"], row["digits_top1_sd"]
        )
    return markdown(rows, columns)


def speed_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Speeds and memory of :func:`model_rows` in Markdown."""
    columns: dict[str, Form] = {}
    for column in dict.fromkeys(column for row in rows for column in row):
        words = column.split("_")
        if column.endswith("images_per_s"):
            columns[f"{words[0]} {words[1]}, img/s"] = partial(speed_text, column)
        elif column.endswith("bytes"):
            columns[f"{words[1]} {words[2]}, MB"] = partial(memory_text, column)
    return markdown(rows, columns)


def markdown(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Form]) -> list[str]:
    lines = ["| attention | " + " | ".join(columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    for row in rows:
        lines.append(f"| `{row['attention']}` | " + " | ".join(filled(form, row) for form in columns.values()) + " |")
    return lines


def filled(form: Form, row: Mapping[str, Any]) -> str:
    try:
        return form(row)
    except KeyError:  # not measured
        return "-"


def speed_text(column: str, row: Mapping[str, Any]) -> str:
    middle = row[column]
    spread = (row[f"{column}_high"] - row[f"{column}_low"]) / 2 / middle
    return f"{middle:.{0 if middle >= 100 else 1 if middle >= 10 else 2}f} ± {spread:.0%}".replace("%", " %")


def memory_text(column: str, row: Mapping[str, Any]) -> str:
    return f"{row[column] / 1e6:,.0f}" if math.isfinite(row[column]) else "does not fit"


def growth_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Fitted exponents of the rows of :func:`layer_rows` in Markdown."""
    lines = ["| attention layer | time grows as N to the | fitted over N | memory as N to the | fitted over N |",
             "|---|---:|---:|---:|---:|"]  # fmt: skip
    for name in dict.fromkeys(row["attention"] for row in rows):
        texts = [f"`{name}`"]
        for cost in ("seconds", "bytes"):
            found = fit(rows, name, cost)
            texts += [f"{found.exponent:.2f}", f"{found.first:,} to {found.last:,}"] if found else ["-", "-"]
        lines.append("| " + " | ".join(texts) + " |")
    return lines


def report(plan: Plan, samples: Samples, scores: Samples | None, output: Path) -> str:
    """Write CSV files, Markdown and plots of all that is measured; returns the Markdown."""
    models, layers = model_rows(plan, samples, scores), layer_rows(plan, samples)
    write_csv(output / "models.csv", models)
    write_csv(output / "layers.csv", layers)
    command = "python -m benchmarks.attention" + (" --quick" if plan == QUICK else "")
    lines = [f"`{command}`, {samples.note}: every attention in SOFT-Tiny's body, and models of timm.", ""]
    lines += [*counts_table(models), ""]
    if samples.values:
        lines += [
            f"{plan.images} images a step at 224 pixels, fewer at larger sizes by their area; median, plus or minus "
            "half the width of the middle half.", "",
            *speed_table(models), "",
            f"One attention layer of width {WIDTH} with {HEADS} heads and 7 x 7 landmarks, over one map of N tokens; "
            "time forward, memory forward and backward.", "",
            *growth_table(layers), "",
        ]  # fmt: skip
    subtitle = ", ".join(samples.note.split(", ")[:3])
    throughput = {kind: throughput_series(models, kind) for kind in ("inference", "training")}
    throughput = {kind: series for kind, series in throughput.items() if series}
    if throughput:
        plots.plot_throughput(throughput, PEERS, subtitle, output / "throughput.png")
    axes = {"forward (ms)": ("seconds", 1e3), "peak memory, forward and backward (MB)": ("bytes", 1e-6)}
    costs = {axis: cost_series(layers, column, unit) for axis, (column, unit) in axes.items()}
    if all(costs.values()):
        fits = {axis: {name: fit(layers, name, column) for name in costs[axis]} for axis, (column, _) in axes.items()}
        exponents = {axis: {n: found.exponent for n, found in by.items() if found} for axis, by in fits.items()}
        plots.plot_growth(costs, exponents, f"width {WIDTH}, {HEADS} heads, {subtitle}", output / "growth.png")
    if scores is not None:
        lines += accuracy.report(scores, MODELS, output)
    text = "\n".join(lines) + "\n"
    write_atomic(output / "attention.md", lambda file: file.write(text.encode()))
    return text


def throughput_series(rows: Sequence[Mapping[str, Any]], kind: str) -> dict[str, list[tuple[float, ...]]]:
    series: dict[str, list[tuple[float, ...]]] = {}
    for row in rows:
        for column, value in row.items():
            if column.startswith(kind) and column.endswith("images_per_s"):
                point = (float(column.split("_")[1]), row[f"{column}_low"], value, row[f"{column}_high"])
                series.setdefault(row["attention"], []).append(point)
    return series


def cost_series(rows: Sequence[Mapping[str, Any]], column: str, unit: float) -> dict[str, list[tuple[float, ...]]]:
    series: dict[str, list[tuple[float, ...]]] = {}
    for row in rows:
        if row.get(column, 0) > 0:
            series.setdefault(row["attention"], []).append((row["tokens"], row[column] * unit))
    return series
