"""The machine a script runs on: device, processes, precision, log and signals."""

import importlib
import logging
import os
import signal
from argparse import Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from timm.utils import init_distributed_device

from soft_models.commands.script import setup_logging
from soft_models.errors import UsageError
from soft_models.memory import keep_freed_memory

from .config import ModelConfig

_logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Runtime:
    """This process: its device and its place among the others."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_primary(self) -> bool:
        """Whether this process writes the files and the log."""
        return self.rank == 0

    @property
    def precise(self) -> torch.dtype:
        """The most precise type for sums on the device."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is set in any process; all of them must ask."""
        return self.gather([float(flag)]).amax().item() > 0

    def gather(self, values: list[float]) -> torch.Tensor:
        """The values of every process, one row each, on the CPU; all of them must call."""
        row = torch.tensor(values, dtype=self.precise, device=self.device)
        if self.world_size == 1:
            return row.cpu()[None]
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        dist.all_gather(rows, row)
        return torch.stack(rows).cpu()

    def gather_objects(self, value: T) -> list[T]:
        """What each process has; all of them must call."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values


def choose_device(name: str) -> str:
    """The device asked for, or the best there is.

    Raises:
        UsageError: No such device here.
    """
    mps = torch.backends.mps.is_available()
    if not name:
        return "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise UsageError(f"--device must be cpu, cuda, cuda:N or mps, got {name!r}")
    kind, count = device.type, torch.cuda.device_count()
    if (kind == "cuda" and not torch.cuda.is_available()) or (kind == "mps" and not mps):
        raise UsageError(f"--device {name} is not available here; leave it out to use {choose_device('')}")
    if kind == "cuda" and (device.index or 0) >= count:
        raise UsageError(f"--device {name} does not exist: there are {count}, counted from cuda:0")
    return name


@contextmanager
def running(cfg: ModelConfig) -> Iterator[Runtime]:
    """Set up this process as configured, and tear down what has to be.

    Raises:
        UsageError: A device or module is missing.
    """
    setup_logging(int(os.environ.get("RANK", 0)))
    import_modules(cfg.device_modules)
    name = choose_device(cfg.device)
    info = Namespace(device=name)
    device = init_distributed_device(info)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
    elif device.type == "cpu":
        keep_freed_memory()
    try:
        yield Runtime(device, info.rank, info.world_size)
    finally:
        if info.distributed and dist.is_initialized():
            dist.destroy_process_group()


def import_modules(names: tuple[str, ...]) -> None:
    """Import what --device-modules names, which may register models with timm.

    Raises:
        UsageError: A module is missing.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UsageError(f"cannot import {name!r} of --device-modules: {error}") from None


def build_autocast(cfg: ModelConfig, device: torch.device) -> AbstractContextManager[object]:
    """Context of mixed precision, or an empty one; it can be entered again and again."""
    if not cfg.amp:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, cfg.amp_dtype))


def compile_model(cfg: ModelConfig, model: torch.nn.Module, device: torch.device) -> None:
    """Compile the model in place, if the configuration asks for it.

    Raises:
        UsageError: torch knows no such backend or mode.
    """
    if not cfg.torchcompile:
        return
    options: dict[str, Any] | None = None
    if device.type == "cpu" and cfg.torchcompile == "inductor" and cfg.torchcompile_mode is None:
        options = {"force_layout_optimization": True}  # or the backward pass of depthwise convolutions is slow
    try:
        model.compile(backend=cfg.torchcompile, mode=cfg.torchcompile_mode, options=options)
    except RuntimeError as error:
        raise UsageError(f"cannot compile by --torchcompile {cfg.torchcompile}: {error}") from None


class StopRequest:
    """SIGINT and SIGTERM as a wish that the training loop asks about; a second signal ends the process at once."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number
        _logger.warning("%s: finishing the step and saving; a second one stops at once", signal.Signals(number).name)
