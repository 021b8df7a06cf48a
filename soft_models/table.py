"""The table of the registered models, counted from the code."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["MARKERS", "Row", "count_multiply_adds", "describe", "markdown", "replace_table"]

STEPS = ("newton_iters", "pinv_iters")  # what the attentions call the steps of their inverses
MARKERS = ("<!-- models: written by `make table` -->", "<!-- end of models -->")


@dataclass(frozen=True)
class Row:
    """What the table says of one model."""

    name: str
    parameters: int
    multiply_adds: int  # of one image of img_size pixels a side, the iterative inverse included
    inverse_multiply_adds: int  # the part of the iterative inverse, which papers leave out
    img_size: int  # pixels
    published_top1: float | None  # percent on ImageNet-1K, the paper's claim


def count_multiply_adds(model: nn.Module, size: Sequence[int]) -> int:
    """Multiply-adds of the matrix products and convolutions that one image of ``size`` (C, H, W) takes."""
    device = next(model.parameters()).device
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, *size, device=device))
    return counter.get_total_flops() // 2


def describe(name: str) -> Row:
    """Count one model, without memory. The published accuracy is the one in the docstring of its entry point."""
    model = timm.create_model(name, device="meta").eval()
    size = model.pretrained_cfg["input_size"]
    total = count_multiply_adds(model, size)
    inverses = [(module, steps) for module in model.modules() for steps in STEPS if hasattr(module, steps)]
    iters = max((getattr(module, steps) for module, steps in inverses), default=0)
    for module, steps in inverses:
        setattr(module, steps, iters + 1)
    # What one more step costs, each of them costs.
    inverse = iters * (count_multiply_adds(model, size) - total) if inverses else 0
    found = re.search(r"([\d.]+) % ImageNet-1K top-1", timm.model_entrypoint(name).__doc__ or "")
    return Row(
        name=name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        multiply_adds=total,
        inverse_multiply_adds=inverse,
        img_size=size[-1],
        published_top1=float(found[1]) if found else None,
    )


def markdown(rows: Iterable[Row]) -> Iterator[str]:
    """The rows as the lines of a table."""
    yield "| name | parameters | multiply-adds | of which the inverse | image | top-1 as published |"
    yield "|---|---:|---:|---:|---:|---:|"
    for row in rows:
        inverse = f"{row.inverse_multiply_adds / 1e9:.2f} G" if row.inverse_multiply_adds else "-"
        top1 = "-" if row.published_top1 is None else f"{row.published_top1:.1f} %"
        yield (
            f"| `{row.name}` | {row.parameters / 1e6:.2f} M | {row.multiply_adds / 1e9:.2f} G | {inverse} "
            f"| {row.img_size} | {top1} |"
        )


def replace_table(text: str, table: str) -> str:
    """``text`` with the table between its ``MARKERS`` replaced.

    Raises:
        ValueError: The markers are not there, once each and in order.
    """
    start, end = MARKERS
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"the text must hold the markers {start!r} and {end!r} once each, in this order")
    return f"{text.partition(start)[0]}{start}\n{table}\n{end}{text.partition(end)[2]}"
