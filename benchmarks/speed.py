"""Speed and memory against timm's models, every row in one run, ours and the peer taking turns.

    python -m benchmarks.speed                             every row, about 15 minutes on 2 CPU cores
    python -m benchmarks.speed --rows "cosformer|vvt"      rows whose name matches
    python -m benchmarks.speed --output table.md           write the table as well

Models are as timm creates them, in torch's default layout, unless the row says otherwise. Every row has a process of
its own, and so has each model in the rows against timm's pyramids, the released arithmetic, float32 and eager: what
ran before leaves memory behind that later steps need not fetch from the system. Such fetching is part of the times but
where a row says "freed memory kept". A ratio is the median over the rounds, its spread the middle half of them.
Nothing else should run on the machine.
"""

import argparse
import multiprocessing
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.layers import set_fused_attn
from timm.utils import reparameterize_model
from torch import nn

from benchmarks.measure import (
    KINDS,
    OwnProcess,
    Step,
    build,
    count,
    default_device,
    heading,
    images,
    in_turns,
    inference,
    model_step,
    peak_memory,
    quartiles,
    show_table,
    table_file,
    training,
)
from benchmarks.plain_soft import make_plain
from soft_models.attention import soft
from soft_models.layers import ConvBNReLU
from soft_models.table import count_multiply_adds
from soft_models.training.config import TrainConfig
from soft_models.training.runtime import compile_model

OURS, PVT, EFFICIENTVIT = "soft_tiny", "pvt_v2_b1", "efficientvit_b1"
PLAIN, LAST = torch.contiguous_format, torch.channels_last


class Unavailable(Exception):
    """What a row needs and the machine lacks."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    work: str
    measure: Callable[[int], list[float]]  # ratios, one for each round
    must: float | None = None
    at_most: bool = False  # whether a smaller ratio is better


def plain(name: str, **kwargs: Any) -> nn.Module:
    """A model in torch's default layout."""
    return build(name, PLAIN, **kwargs)


def alternate(rounds: int, ours: Step, peer: Step, repeats: int = 1) -> list[float]:
    """Time of the peer over ours, round by round."""
    times = in_turns({"ours": ours, "peer": peer}, rounds, repeats)
    return [peer / ours for ours, peer in zip(times["ours"], times["peer"], strict=True)]


def against(
    peer: str,
    size: int,
    batch: int,
    kind: str = "inference",
    *,
    ours: str = OURS,
    layout: torch.memory_format = PLAIN,
    keep: bool = False,
    repeats: int = 1,
) -> Callable[[int], list[float]]:
    """Ratio of img/s, ours over the peer's, each in a process of its own as its users have it.

    ``keep`` is for processes that keep freed memory, as those of our scripts do.
    """

    def measure(rounds: int) -> list[float]:
        rounds = max(rounds, 5 * rounds // batch)  # small batches scatter more
        make = partial(model_step, layout=layout)
        mine, theirs = (OwnProcess(make, kind, name, size, batch, keep=keep) for name in (ours, peer))
        return alternate(rounds, mine, theirs, repeats)

    return measure


def vit_peer(ours: str, size: int, batch: int, fused: bool = True) -> Callable[[int], list[float]]:
    """Ratio of img/s over timm's ViT of the same shape, with torch's fused attention or with its N x N weights."""

    def measure(rounds: int) -> list[float]:
        set_fused_attn(fused)
        try:
            peer = plain("vit_small_patch16_224", img_size=size, global_pool="avg", class_token=False)
        finally:
            set_fused_attn(True)
        return alternate(rounds, inference(plain(f"{ours}_patch16_224"), size, batch), inference(peer, size, batch))

    return measure


def vit_rows(ours: str, bound: float) -> list[Row]:
    """Rows of a cosFormer-ViT; its bound at 1024 pixels is against explicit weights, as without a fused kernel."""
    return [
        Row(f"{ours} 224, batch 8, img/s over timm's ViT", vit_peer(ours, 224, 8), bound),
        Row(f"{ours} 1024, batch 1, img/s over timm's ViT, explicit", vit_peer(ours, 1024, 1, fused=False), 3.0),
        Row(f"{ours} 1024, batch 1, img/s over timm's ViT, fused", vit_peer(ours, 1024, 1)),
    ]


def memory(kind: str, size: int, batch: int, layout: torch.memory_format) -> Callable[[int], list[float]]:
    """Ratio of peak resident memory above that before the step, in fresh processes, ours over the peer's."""

    def peak(name: str) -> float:
        return peak_memory(partial(model_step, layout=layout), kind, name, size, batch, threads=torch.get_num_threads())

    def measure(rounds: int) -> list[float]:
        return [peak(OURS) / peak(PVT) for _ in range(min(rounds, 3))]

    return measure


def time_per_pixel(rounds: int) -> list[float]:
    model = plain(OURS, stage4_attention="soft")
    small_over_large = alternate(rounds, inference(model, 2048, 1), inference(model, 512, 1))
    return [1 / (16 * ratio) for ratio in small_over_large]


def achieved_flops(rounds: int) -> list[float]:
    """GFLOP/s of the model over those of a large float32 matrix product."""
    model, side = plain(OURS), 3072
    work = 8 * count_multiply_adds(model, (3, 224, 224))
    a, b = torch.randn(side, side), torch.randn(side, side)
    ratios = alternate(rounds, inference(model, 224, 8), lambda: a @ b)
    return [ratio * work / side**3 for ratio in ratios]


def released_step() -> Step:
    return inference(make_plain(plain("soft_conv_tiny")), 224, 8)


def released(rounds: int) -> list[float]:
    ours = OwnProcess(partial(model_step, layout=PLAIN), "inference", "soft_conv_tiny", 224, 8)
    return alternate(rounds, ours, OwnProcess(released_step))


def conv_grid(rounds: int) -> list[float]:
    free = plain("soft_conv_tiny", landmark_grid=7)
    return alternate(min(rounds, 2), inference(free, 1024, 1), inference(plain("soft_conv_tiny"), 1024, 1))


def reparameterized(rounds: int) -> list[float]:
    """Ratio of img/s, norms in the convolutions' weights for good over norms apart, as where something looks inside."""
    ours, apart = reparameterize_model(plain(OURS)), plain(OURS)
    for module in apart.modules():
        if isinstance(module, ConvBNReLU):
            module.__dict__["merges"] = lambda _: False
    return alternate(rounds, inference(ours, 224, 8), inference(apart, 224, 8))


def autocast(rounds: int) -> list[float]:
    info = Path("/proc/cpuinfo")
    if not (info.exists() and "bf16" in info.read_text()):
        raise Unavailable("the processor names no bfloat16 units")
    return alternate(
        rounds, OwnProcess(autocast_step), OwnProcess(partial(model_step, layout=PLAIN), "inference", OURS, 224, 8)
    )


def autocast_step() -> Step:
    """As ``validate.py --amp`` does: autocast is entered once, and keeps the weights that it has converted."""
    model = plain(OURS)
    x = images(224, 8, model)
    torch.autocast("cpu", torch.bfloat16).__enter__()  # for as long as the process lives

    def step() -> None:
        with torch.no_grad():
            model(x)

    return step


def compiled(kind: str, batch: int, keep: bool = False) -> Callable[[int], list[float]]:
    """Ratio of img/s, compiled as ``train.py --torchcompile`` does over eager; ``keep`` as in :func:`against`."""

    def measure(rounds: int) -> list[float]:
        if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
            raise Unavailable("there is no C++ compiler")
        eager = OwnProcess(partial(model_step, layout=PLAIN), kind, OURS, 224, batch, keep=keep)
        return alternate(rounds, OwnProcess(compiled_step, kind, batch, keep=keep), eager)

    return measure


def compiled_step(kind: str, batch: int) -> Step:
    model = plain(OURS)
    compile_model(TrainConfig(torchcompile="inductor"), model, default_device())
    return KINDS[kind](model, 224, batch)


def inverses(kind: Callable[[nn.Module, int, int], Step], batch: int) -> Callable[[int], list[float]]:
    """Ratio of img/s, Cholesky factorisation over Newton steps."""

    def measure(rounds: int) -> list[float]:
        solve, newton = (kind(plain(OURS, inverse=inverse), 224, batch) for inverse in ("solve", "newton"))
        return alternate(rounds, solve, newton)

    return measure


def inverse_share(inverse: str) -> Callable[[int], list[float]]:
    """Part of a training step that the inverse takes: 1 - (time with the identity in its place / time).

    The kernel keeps a gradient, of zero, so that the rest of the backward pass stays.
    """

    def measure(rounds: int) -> list[float]:
        whole, without = (training(plain(OURS, inverse=inverse), 224, 16) for _ in range(2))
        original = soft.soft_inverse_apply

        def identity() -> None:
            soft.soft_inverse_apply = lambda kernel, x, *args: x + 0 * kernel.sum()
            try:
                without()
            finally:
                soft.soft_inverse_apply = original

        return [1 - ratio for ratio in alternate(rounds, whole, identity)]

    return measure


ROWS = (
    Row(f"{OURS} inference 224, batch 8, img/s over {PVT}", against(PVT, 224, 8), 1.5),
    Row(f"{OURS} inference 224, batch 8, both channels-last", against(PVT, 224, 8, layout=LAST)),
    Row(f"{OURS} inference 224, batch 8, freed memory kept", against(PVT, 224, 8, keep=True)),
    Row(f"{OURS} inference 224, batch 1, img/s over {PVT}", against(PVT, 224, 1), 1.7),
    Row(f"{OURS} inference 224, batch 1, both channels-last", against(PVT, 224, 1, layout=LAST)),
    Row(
        f"{OURS} inference 224, batch 1, both channels-last, five of each in a row",
        against(PVT, 224, 1, layout=LAST, repeats=5),
    ),
    Row(f"{OURS} training 224, batch 16, img/s over {PVT}", against(PVT, 224, 16, "training"), 1.4),
    Row(f"{OURS} training 224, batch 16, freed memory kept", against(PVT, 224, 16, "training", keep=True)),
    Row(f"{OURS} training 224, batch 16, peak memory over {PVT}", memory("training", 224, 16, PLAIN), 0.95, True),
    Row(f"{OURS} inference 1024, batch 1, img/s over {PVT}", against(PVT, 1024, 1), 3.5),
    Row(f"{OURS} inference 1024, batch 1, both channels-last", against(PVT, 1024, 1, layout=LAST)),
    Row(f"{OURS} inference 1024, batch 1, peak memory over {PVT}", memory("inference", 1024, 1, PLAIN), 0.45, True),
    Row(f"{OURS} inference 1024, batch 1, peak memory, both channels-last", memory("inference", 1024, 1, LAST)),
    Row(f"{OURS} inference 224, batch 8, img/s over {EFFICIENTVIT}", against(EFFICIENTVIT, 224, 8)),
    Row(f"{OURS} inference 1024, batch 1, img/s over {EFFICIENTVIT}", against(EFFICIENTVIT, 1024, 1)),
    Row(f"{OURS} (stage 4 soft too) time per pixel, 2048 over 512", time_per_pixel, 1.15, True),
    Row(f"{OURS} 224, batch 8, GFLOP/s over a large matrix product's", achieved_flops, 0.7),
    Row("soft_conv_tiny 224, batch 8, img/s over the released arithmetic", released, 2.0),
    Row("soft_conv_tiny 1024, img/s, landmark_grid=7 over None", conv_grid, 20.0),
    Row(f"{OURS} 224, batch 8, convolution and norm fused over apart", reparameterized),
    Row(f"{OURS} 224, batch 8, bfloat16 autocast over float32", autocast, 1.6),
    Row(f"{OURS} inference 224, batch 8, compiled over eager", compiled("inference", 8), 1.15),
    Row(f"{OURS} training 224, batch 16, compiled over eager", compiled("training", 16), 1.15),
    Row(f"{OURS} training 224, batch 16, compiled over eager, freed memory kept", compiled("training", 16, keep=True)),
    Row(f"{OURS} training 224, batch 16, the inverse's share", inverse_share("solve"), 0.10, True),
    Row(f"{OURS} training 224, batch 16, the share of inverse='newton'", inverse_share("newton")),
    Row(f"{OURS} inference 224, batch 8, inverse='solve' over 'newton'", inverses(inference, 8)),
    *vit_rows("cosformer_vit_small", 0.95),
    *vit_rows("cosformer2d_vit_small", 0.9),
    # VVT-Tiny has 1.42 times the multiply-adds of PVTv2-B1, and may take as much more time.
    Row(f"vvt_tiny 224, batch 8, img/s over {PVT}", against(PVT, 224, 8, ours="vvt_tiny"), 1 / 1.42),
)


def line(row: Row, ratios: list[float]) -> str:
    """The row as a line of a Markdown table."""
    low, ratio, high = quartiles(ratios)
    if row.must is None:
        return f"| {row.work} | {ratio:.2f} | {low:.2f} to {high:.2f} | - | - |"
    sign, good = ("<=", ratio <= row.must) if row.at_most else (">=", ratio >= row.must)
    return f"| {row.work} | {ratio:.2f} | {low:.2f} to {high:.2f} | {sign} {row.must:.2f} | {'yes' if good else 'NO'} |"


def measure_line(number: int, rounds: int, threads: int) -> str:
    """Measure the row of that number; its line of the table."""
    torch.set_num_threads(threads)
    row = ROWS[number]
    try:
        return line(row, row.measure(rounds))
    except Unavailable as reason:
        return f"| {row.work} | n/a | {reason} | - | - |"


def in_own_process(number: int, rounds: int, threads: int) -> str:
    """``measure_line`` in a fresh process, in which no other row has left its buffers."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(measure_line, number, rounds, threads).result()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if a row misses its bound."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="", help="regular expression: only rows whose name matches")
    parser.add_argument("--rounds", type=count, default=7, help="turns that ours and the peer take")
    parser.add_argument("--threads", type=count, default=2, help="torch threads")
    parser.add_argument("--output", type=table_file, help="file for the table, in Markdown")
    args = parser.parse_args(argv)
    try:
        chosen = [number for number, row in enumerate(ROWS) if re.search(args.rows, row.work)]
    except re.error as error:
        parser.error(f"--rows is no regular expression: {error}")
    if not chosen:
        parser.error(f"no row matches {args.rows!r}")
    head = [
        f"`python -m benchmarks.speed`, {heading(args.threads, 'float32')}",
        "",
        "| work | ratio | middle half | bound | kept |",
        "|---|---:|---:|---:|---|",
    ]
    lines = show_table(head, (in_own_process(number, args.rounds, args.threads) for number in chosen), args.output)
    return int(any(text.endswith("| NO |") for text in lines))


if __name__ == "__main__":
    sys.exit(main())
