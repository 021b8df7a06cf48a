"""One body, every attention: the comparison of the SOFT paper (arXiv:2110.11945), with timm's models beside it.

    python -m benchmarks.attention                  speed and memory: about 5 minutes on 2 CPU cores
    python -m benchmarks.attention --quick          a look at every part: below 2 minutes
    python -m benchmarks.attention --accuracy       digits, 3 seeds for each attention: about 75 minutes

Every attention sits in SOFT-Tiny's body and takes its turn in every round. What is measured is on disk at once: an
interrupted run goes on where it stopped, and a finished one only writes table and plots again. Freed memory is kept
while speed is measured, as by the scripts. Nothing else should run on the machine. Speeds are medians over the rounds
with the middle half of them, memory is the peak of one step beyond what was taken before it, exponents are least-
squares slopes on log axes.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import accuracy, plots
from benchmarks.cells import Block, Samples, run_blocks
from benchmarks.measure import Step, count, default_device, heading, machine, model_step, peak_memory, versions
from benchmarks.plan import EXPLICIT, HEADS, LAYERS, MODELS, PEERS, QUICK, WIDTH, Plan, memory_cell
from benchmarks.report import report
from soft_models.attention import create_attention
from soft_models.attention.tokens import merge_heads, split_heads
from soft_models.commands.script import run_script, setup_logging
from soft_models.memory import keep_freed_memory

_logger = logging.getLogger("benchmarks")

# Tokens along the side of a first map: what libraries allocate once, for convolutions too, is no part of a step.
WARM = 46


def layer(name: str, side: int, backward: bool) -> Step:
    """A step of one attention layer over a square map: forward, and backward if asked for."""
    torch.manual_seed(0)
    device = default_device()
    attn = create_attention(name.partition(",")[0], WIDTH, num_heads=HEADS, device=device).eval()
    apply = partial(explicit_softmax, attn) if name == EXPLICIT else attn

    def run(x: torch.Tensor, side: int) -> torch.Tensor | None:
        with torch.inference_mode(not backward):
            out = apply(x, (side, side))
            if backward:
                out.sum().backward()
        return x.grad

    small, large = (torch.randn(1, n * n, WIDTH, device=device, requires_grad=backward) for n in (WARM, side))
    run(small, WARM)
    return partial(run, large, side)


def explicit_softmax(attn: Any, x: torch.Tensor, feat_size: tuple[int, int]) -> torch.Tensor:
    """Softmax attention with its N x N weights in memory, as it is without a fused kernel."""
    values = split_heads(attn.qkv(x).chunk(3, dim=-1)[2], attn.num_heads)
    return attn.proj(merge_heads(attn.attention_matrix(x, feat_size) @ values))


def timed_blocks(plan: Plan) -> list[Block]:
    """Speed of layers and of models."""
    blocks = []
    for side in sorted({side for name in LAYERS for side in plan.layer_sides(name)}):
        names = [name for name in LAYERS if side in plan.layer_sides(name)]
        layers = {plan.layer_cell(name, side): partial(layer, name, side, False) for name in names}
        blocks.append(Block(layers, plan.layer_rounds, plan.cell_seconds))
    for kind, sizes in plan.sizes.items():
        for size in sizes:
            makes: dict[str, Callable[[], Step]] = {
                plan.model_cell(kind, name, size): partial(model_step, kind, name, size, plan.batch(size))
                for name in (*MODELS.values(), *PEERS)
            }
            blocks.append(Block(makes, plan.rounds, plan.cell_seconds))
    return blocks


def memory_blocks(plan: Plan, threads: int) -> list[Block]:
    """Peak memory of models and of layers, each sample in a fresh process."""
    peak = partial(peak_memory, threads=threads)
    makes: dict[str, Callable[[], float]] = {}
    for kind, sizes in plan.sizes_for_memory.items():
        for size in sizes:
            for name in (*MODELS.values(), *PEERS):
                cell = memory_cell(plan.model_cell(kind, name, size))
                makes[cell] = partial(peak, model_step, kind, name, size, plan.batch(size))
    for name in LAYERS:
        for side in plan.layer_sides(name):
            makes[memory_cell(plan.layer_cell(name, side))] = partial(peak, layer, name, side, True)
    return [Block(makes, 1, measure=True)]


def run(args: argparse.Namespace) -> int:
    """Measure what is missing and write the report; returns the exit code."""
    plots.require_matplotlib()
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # or what one cell leaves behind would decide how long another waits for the system
    plan = QUICK if args.quick else Plan(images=64 if default_device().type == "cuda" else 8)
    settings = {"versions": versions(), "machine": machine(), "threads": args.threads, "plan": asdict(plan)}
    code, path = 0, args.output / "samples.jsonl"
    # Of any machine, version and plan where nothing is added to them.
    stored = Samples.stored(path) if args.accuracy else None
    samples = stored or Samples(
        path, settings, heading(args.threads, "float32, channels-last, speeds with freed memory kept"), args.fresh
    )
    plan = Plan.of(samples.settings["plan"])
    if args.accuracy:
        code = accuracy.run(accuracy.recipe_of(args), list(MODELS.values()), args.output, args.runs, args.fresh)
    else:
        run_blocks(memory_blocks(plan, args.threads), samples, "memory")
        run_blocks(timed_blocks(plan), samples, "speed")
    text = report(plan, samples, Samples.stored(args.output / accuracy.FILE), args.output)
    _logger.info("%s\nwritten to %s", text, args.output)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention", description=description, epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few and small sizes, to see that all works")
    parser.add_argument("--accuracy", action="store_true", help="train on digits and evaluate, instead of speed")
    parser.add_argument("--output", type=Path, help="folder of samples, tables and plots (output/attention)")
    parser.add_argument("--runs", type=Path, default=Path("output/attention/runs"), help="folder of trained models")
    parser.add_argument("--fresh", action="store_true", help="forget what is measured already")
    parser.add_argument("--threads", type=count, default=2, help="torch threads")
    accuracy.add_arguments(parser)
    args = parser.parse_args(argv)
    args.output = args.output or Path("output/attention-quick" if args.quick else "output/attention")
    setup_logging()
    if not _logger.handlers:
        _logger.addHandler(logging.StreamHandler(sys.stderr))
    _logger.setLevel(logging.INFO)
    try:
        return run_script("benchmarks.attention", lambda: run(args))
    except KeyboardInterrupt:
        _logger.info("interrupted: the same command goes on%s", ", without --fresh" if args.fresh else "")
        return 130


if __name__ == "__main__":
    sys.exit(main())
