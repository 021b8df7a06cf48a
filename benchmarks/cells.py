"""Measurements that outlive an interruption: cells of a table, each filled sample by sample, on disk at once."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Step, seconds
from soft_models.commands.files import make_folder, write_atomic
from soft_models.commands.progress import Progress
from soft_models.errors import UsageError


class Samples:
    """Values by cell, in a file of JSON lines that is appended to; what a file holds already counts as measured.

    Args:
        path: The file, made where it is missing.
        settings: What samples must share to be compared; kept in the file's first line.
        note: Of when and where the first of them were taken; kept beside the settings, not compared.
        fresh: Forget what the file holds.

    Raises:
        UsageError: The file's settings are others.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], note: str = "", fresh: bool = False) -> None:
        self.path, self.values = path, dict[str, list[float]]()
        self.settings = json.loads(json.dumps(settings))
        text = "" if fresh or not path.exists() else path.read_text(encoding="utf-8")
        lines = text[: text.rfind("\n") + 1].splitlines(keepends=True)  # less one that a kill has torn
        if not lines:
            lines = [json.dumps({"settings": settings, "note": note}) + "\n"]
        first = json.loads(lines[0])
        self.note = first["note"]
        if first["settings"] != self.settings:
            raise UsageError(f"{path} was measured under {first['settings']}, not under {settings}; give --fresh")
        for line in lines[1:]:
            cell, value = json.loads(line)
            self.values.setdefault(cell, []).append(math.nan if value is None else value)
        if "".join(lines) != text:
            make_folder(path.parent)
            write_atomic(path, lambda file: file.write("".join(lines).encode()))

    @classmethod
    def stored(cls, path: Path) -> "Samples | None":
        """What a file holds, if there is anything."""
        first = path.read_text(encoding="utf-8").partition("\n") if path.exists() else ("", "", "")
        return cls(path, json.loads(first[0])["settings"]) if first[1] else None

    def __getitem__(self, cell: str) -> list[float]:
        return self.values.get(cell, [])

    def add(self, cell: str, value: float) -> None:
        self.values.setdefault(cell, []).append(value)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([cell, None if math.isnan(value) else value]) + "\n")


@dataclass(frozen=True)
class Block:
    """Cells that are measured in turns, one sample each per round, so that a machine's drift hits all alike.

    Args:
        makes: By cell, what builds the step to time; or, with ``measure``, what gives a sample at once.
        rounds: Samples per cell.
        cell_seconds: A cell whose samples took longer altogether gets no more of them.
        measure: The makes return samples, not steps.
    """

    makes: Mapping[str, Callable[[], Any]]
    rounds: int
    cell_seconds: float = math.inf
    measure: bool = False

    def is_done(self, samples: Samples, cell: str) -> bool:
        values = samples[cell]
        return len(values) >= self.rounds or sum(values) > self.cell_seconds

    def run(self, samples: Samples) -> Iterator[str]:
        """Take the samples that are missing; yields the cell of each."""
        pending = [cell for cell in self.makes if not self.is_done(samples, cell)]
        steps: dict[str, Step] = {}
        if not self.measure:
            for cell in pending:
                steps[cell] = self.makes[cell]()
                steps[cell]()  # the first run allocates, and chooses kernels
        while pending := [cell for cell in pending if not self.is_done(samples, cell)]:
            for cell in pending:
                samples.add(cell, self.makes[cell]() if self.measure else seconds(steps[cell]))
                yield cell


class SampleProgress(Progress):
    """Progress over samples instead of images."""

    def text(self, step: int, values: dict[str, float]) -> str:
        return f"{step}/{self.total} samples, {time.perf_counter() - self.start:.0f} s"


def run_blocks(blocks: Sequence[Block], samples: Samples, title: str) -> None:
    """Run the blocks in order, with a progress bar."""
    progress = SampleProgress(title, sum(len(block.makes) * block.rounds for block in blocks), 50, enabled=True)
    before = 0
    for block in blocks:
        for _ in block.run(samples):
            taken = sum(block.rounds if block.is_done(samples, c) else len(samples[c]) for c in block.makes)
            progress.show(before + taken, 0)
        before += len(block.makes) * block.rounds
    progress.close()
