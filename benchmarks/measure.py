"""What the benchmarks share: models and steps to time, clocks, peak memory in a fresh process, tables."""

import argparse
import ctypes
import logging
import multiprocessing
import platform
import re
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

import soft_models
from soft_models.commands.files import make_folder
from soft_models.errors import UsageError
from soft_models.memory import keep_freed_memory

_logger = logging.getLogger("benchmarks")

Step = Callable[[], object]

# What the programs import: done once, so that a fresh process takes a second and not four.
PRELOAD = ["benchmarks.measure", "soft_models.training.train", "soft_models.training.validate"]
M_MMAP_THRESHOLD = -3  # of glibc's mallopt


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build(name: str, layout: torch.memory_format = torch.channels_last, **kwargs: Any) -> nn.Module:
    """A model for timing: random weights in eval mode, on the default device."""
    torch.manual_seed(0)
    return timm.create_model(name, **kwargs).eval().to(default_device(), memory_format=layout)


def images(size: int, batch: int, model: nn.Module) -> torch.Tensor:
    """Images for ``model``, in the layout of its convolutions."""
    x = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to(default_device())
    convs = [weight for weight in model.parameters() if weight.dim() == 4 and weight.shape[2] > 1]
    channels_last = any(weight.stride(1) == 1 and weight.shape[1] > 1 for weight in convs)
    return x.to(memory_format=torch.channels_last) if channels_last else x


def inference(model: nn.Module, size: int, batch: int) -> Step:
    x = images(size, batch, model)

    def step() -> None:
        with torch.inference_mode():
            model(x)

    return step


def training(model: nn.Module, size: int, batch: int) -> Step:
    x = images(size, batch, model)
    target = torch.arange(batch, device=x.device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()

    return step


KINDS: dict[str, Callable[[nn.Module, int, int], Step]] = {"inference": inference, "training": training}


def model_step(kind: str, name: str, size: int, batch: int, **kwargs: Any) -> Step:
    """A step of ``kind`` of the model ``name``; ``kwargs`` are those of :func:`build`."""
    return KINDS[kind](build(name, **kwargs), size, batch)


class OwnProcess:
    """A step that runs in a process, and so with buffers, of its own.

    Args:
        make: Gives the step; a function at the top of a module.
        args: Of ``make``.
        keep: Keep freed memory, as the scripts do.
    """

    def __init__(self, make: Callable[..., Step], *args: Any, keep: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        options = (theirs, torch.get_num_threads(), keep, make, *args)
        context.Process(target=_time_steps, args=options, daemon=True).start()
        theirs.close()

    def __call__(self) -> float:
        """Seconds of one step."""
        self.connection.send(True)
        return float(self.connection.recv())


def _time_steps(connection: Connection, threads: int, keep: bool, make: Callable[..., Step], *args: Any) -> None:
    torch.set_num_threads(threads)
    if keep:
        keep_freed_memory()
    step = make(*args)
    with suppress(EOFError):  # at the end of the process that asks
        while connection.recv():
            taken = seconds(step)
            time.sleep(0.02)  # until threads that wait for more work have gone to sleep
            connection.send(taken)


def seconds(step: Step) -> float:
    """Time of one step: by events on a GPU, by the wall clock elsewhere."""
    if isinstance(step, OwnProcess):
        return step()
    if default_device().type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def in_turns(steps: Mapping[str, Step], rounds: int, repeats: int = 1) -> dict[str, list[float]]:
    """Seconds of each step, round by round, after two of each to warm up; each the best of ``repeats`` in a row."""
    for step in steps.values():
        step()
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(min(seconds(step) for _ in range(repeats)))
    return times


def peak_memory(make: Callable[..., Step], *args: Any, threads: int = 2) -> float:
    """Most bytes that one step of ``make(*args)`` takes beyond what was taken before it, in a process of its own.

    Resident memory on a CPU, allocated memory on a GPU; NaN where the step does not fit. ``make`` must be a function
    at the top of a module.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_peak, args=(sender, threads, make, *args))
    process.start()
    sender.close()
    try:
        return float(receiver.recv())
    except EOFError:  # killed, for want of memory
        return float("nan")
    finally:
        process.join()


def _send_peak(sender: Connection, threads: int, make: Callable[..., Step], *args: Any) -> None:
    torch.set_num_threads(threads)
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, 64 * 1024)  # memory of a freed tensor goes back at once, and is not counted twice
    try:
        sender.send(_peak(make(*args)))
    except torch.OutOfMemoryError:
        sender.send(float("nan"))


def _peak(step: Step) -> int:
    if default_device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of importing and building
    step()
    peak = int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
    return peak - before


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def growth_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Slope of the least-squares line through ``log costs`` over ``log sizes``: the p of ``cost ~ size ** p``."""
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (sizes, costs))
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def machine() -> str:
    """The processor or GPU by name."""
    if default_device().type == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor()


def heading(threads: int, what: str) -> str:
    """Date, machine and versions of a run, for the head of its table."""
    return f"{date.today()}, {machine()}, {threads} threads, {what}, {versions()}"


def versions() -> str:
    return f"torch {torch.__version__}, timm {timm.__version__}, soft_models {soft_models.__version__}"


def table_file(text: str) -> Path:
    """A file to write to, for argparse; its folder is made at once, before anything is measured."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file")
    try:
        make_folder(path.parent)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def count(text: str) -> int:
    """A number of at least 1, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return int(text)


def show_table(head: Sequence[str], rows: Iterable[str], output: Path | None) -> list[str]:
    """Log a Markdown table row by row, as they are measured, and write it to ``output``; its lines."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    lines = []
    for line in chain(head, rows):
        _logger.info("%s", line)
        lines.append(line)
    if output:
        output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return lines
