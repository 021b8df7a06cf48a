"""Speed and memory on a GPU, every model in turn: bfloat16 autocast, channels-last, eager and compiled.

    python -m benchmarks.gpu                                     the whole table
    python -m benchmarks.gpu --output benchmarks/results/gpu.md  write the table as well

Medians over the rounds, with the middle half. On a machine without a GPU it runs on the CPU, to be tested there:
``--work 64x2 --rounds 1 --compiled``.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from benchmarks.measure import (
    KINDS,
    Step,
    build,
    count,
    default_device,
    heading,
    in_turns,
    peak_memory,
    quartiles,
    show_table,
    table_file,
)
from soft_models.errors import UsageError
from soft_models.layers import MIN_SIZE
from soft_models.training.models import check_model_name

MODELS = (
    "soft_tiny",
    "soft_norm_tiny",
    "pvt_v2_b1",
    "twins_svt_small",
    "swin_tiny_patch4_window7_224",
    "convnext_tiny",
)
COMPILED = ("soft_tiny", "pvt_v2_b1")
WORK = ("224x128", "1024x8")
BOUND_TO_SIZE = ("swin",)  # models that are built for one image size


def half_step(kind: str, name: str, size: int, batch: int, compiled: bool = False) -> Step:
    """A step under bfloat16 autocast."""
    kwargs: dict[str, Any] = {"img_size": size} if name.startswith(BOUND_TO_SIZE) else {}
    model = build(name, **kwargs)
    if compiled:
        model.compile()
    step = KINDS[kind](model, size, batch)

    def half() -> None:
        with torch.autocast(default_device().type, torch.bfloat16):
            step()

    return half


def measure(kind: str, size: int, batch: int, names: dict[str, tuple[str, bool]], rounds: int) -> Iterator[str]:
    """Rows of the table: models by title, in turns."""
    steps = {title: half_step(kind, name, size, batch, compiled) for title, (name, compiled) in names.items()}
    times = in_turns(steps, rounds)
    for title, (name, compiled) in names.items():
        low, middle, high = quartiles([batch / value for value in times[title]])
        # In a fresh process, which would have to compile again.
        peak = "-" if compiled else f"{peak_memory(half_step, kind, name, size, batch) / 1e6:,.0f}"
        yield f"| {kind} {size}, batch {batch} | {title} | {middle:.1f} | {low:.1f} to {high:.1f} | {peak} |"


def parse_work(text: str) -> tuple[int, int]:
    """Image side and batch of a text such as 224x128, for argparse."""
    size, _, batch = text.partition("x")
    if not (size.isdigit() and batch.isdigit()):
        raise argparse.ArgumentTypeError(f"must be side and batch such as 224x128, got {text!r}")
    if int(size) < MIN_SIZE or int(batch) < 1:
        raise argparse.ArgumentTypeError(f"must be a side from {MIN_SIZE} and a batch from 1, got {text!r}")
    return int(size), int(batch)


def model_name(text: str) -> str:
    """A name that timm knows, for argparse."""
    try:
        check_model_name(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", nargs="+", type=parse_work, default=list(map(parse_work, WORK)), help="side x batch")
    parser.add_argument("--models", nargs="+", type=model_name, default=list(MODELS), help="timm's names and ours")
    parser.add_argument("--compiled", nargs="*", default=list(COMPILED), help="those of them to compile as well")
    parser.add_argument("--rounds", type=count, default=10, help="turns that each model takes")
    parser.add_argument("--output", type=table_file, help="file for the table, in Markdown")
    args = parser.parse_args(argv)
    head = [
        f"`python -m benchmarks.gpu`, {heading(torch.get_num_threads(), 'bfloat16 autocast, channels-last')}", "",
        "| work | model | img/s | middle half | peak memory, MB |", "|---|---|---:|---:|---:|",
    ]  # fmt: skip
    eager = {name: (name, False) for name in args.models}
    compiled = {f"{name}, compiled": (name, True) for name in args.compiled if name in args.models}
    parts = [measure("inference", size, batch, eager | compiled, args.rounds) for size, batch in args.work]
    size, batch = args.work[0]
    parts.append(measure("training", size, batch, eager, args.rounds))
    show_table(head, chain.from_iterable(parts), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
