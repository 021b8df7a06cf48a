"""Checkpoints on disk: timm's names and keys, written whole or not at all, and the bookkeeping to go on with them."""

import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from soft_models.commands.files import publish, write_atomic, write_csv

_logger = logging.getLogger(__name__)

SUFFIX = ".pth.tar"
LAST, BEST = f"last{SUFFIX}", f"model_best{SUFFIX}"
RECOVERY = re.compile(r"recovery-(\d+)-(\d+)\.pth\.tar")


class CheckpointSaver:
    """Writes ``last``, the best ``checkpoint-N``, ``model_best``, ``recovery-E-S`` and ``summary.csv`` of one run.

    ``last`` is written first and holds the bookkeeping of all the others, so that ``reconcile`` can finish what a
    killed process had begun.

    Args:
        folder: The run's.
        decreasing: Whether a lower metric is better.
        max_history: Numbered checkpoints to keep.
    """

    def __init__(self, folder: Path, decreasing: bool, max_history: int) -> None:
        self.folder, self.decreasing, self.max_history = folder, decreasing, max_history
        self.history: list[tuple[str, float]] = []  # best first
        self.rows: list[dict[str, Any]] = []
        self.evicted: list[str] = []
        self.best_epoch: int | None = None
        self.best_metric: float | None = None

    def save_epoch(self, state: dict[str, Any], epoch: int, metric: float | None, row: dict[str, Any]) -> None:
        """Save the end of an epoch; without a finite metric it is ``last`` only, and never best.

        Raises:
            RunStopped: The disk is full or the like; earlier checkpoints are untouched.
        """
        if metric is not None and not math.isfinite(metric):
            _logger.warning("metric %s of epoch %d is not a finite number: not ranked", metric, epoch)
            metric = None
        self.rows = [*(earlier for earlier in self.rows if earlier["epoch"] < epoch), row]
        self._rank(epoch, metric)
        state = {**state, "epoch": epoch, "metric": metric, "saver": self.state_dict(epoch, metric)}
        if metric is None:
            del state["metric"]
        write_atomic(self.folder / LAST, lambda file: torch.save(state, file))
        self.reconcile(epoch)

    def save_recovery(self, state: dict[str, Any], epoch: int, step: int) -> Path:
        """Save a position within an epoch, in place of the one before.

        Raises:
            RunStopped: The disk is full or the like; earlier checkpoints are untouched.
        """
        path = self.folder / f"recovery-{epoch}-{step}{SUFFIX}"
        state = {**state, "epoch": epoch, "saver": self.state_dict(None, None)}
        write_atomic(path, lambda file: torch.save(state, file))
        for other, _ in recovery_files(self.folder):
            if other != path:
                other.unlink(missing_ok=True)
        return path

    def reconcile(self, epoch: int) -> None:
        """Bring all other files in line with ``last``, which holds ``epoch``."""
        last = self.folder / LAST
        name = _numbered(epoch)
        if name in dict(self.history):
            publish(last, self.folder / name)
        if self.best_epoch == epoch:
            publish(last, self.folder / BEST)
        write_csv(self.folder / "summary.csv", self.rows)
        for evicted in self.evicted:
            (self.folder / evicted).unlink(missing_ok=True)
        for path, (recovered, _) in recovery_files(self.folder):
            if recovered <= epoch:
                path.unlink(missing_ok=True)

    def _rank(self, epoch: int, metric: float | None) -> None:
        """Place an epoch among the numbered checkpoints.

        One that is trained again loses its place; its ``model_best`` stands until it is beaten.
        """
        name = _numbered(epoch)
        self.history = [entry for entry in self.history if entry[0] != name]
        self.evicted = [name]  # unless it is ranked anew
        if self.best_epoch == epoch:
            self.best_epoch = None
        if metric is None:
            return
        # Stable: of equals the earlier epoch stays ahead.
        entries = [*self.history, (name, metric)]
        ranked = sorted(entries, key=lambda entry: entry[1] if self.decreasing else -entry[1])
        self.history, self.evicted = ranked[: self.max_history], [name for name, _ in ranked[self.max_history :]]
        if self.best_metric is None or self.is_better(metric, self.best_metric):
            self.best_epoch, self.best_metric = epoch, metric

    def is_better(self, metric: float, other: float) -> bool:
        """Whether ``metric`` beats ``other``."""
        return metric < other if self.decreasing else metric > other

    def state_dict(self, epoch: int | None, metric: float | None) -> dict[str, Any]:
        """The bookkeeping, under timm's names and ours."""
        return {
            "checkpoint_files": [*self.history],
            "best_epoch": self.best_epoch,
            "best_metric": self.best_metric,
            "pending": (epoch, metric),
            "evicted": [*self.evicted],
            "rows": [*self.rows],
        }

    def load_state_dict(self, state: Mapping[str, Any], same_folder: bool) -> None:
        """Go on with the bookkeeping of a checkpoint; files that another folder holds are left to it."""
        self.rows = [dict(row) for row in state.get("rows", [])]
        if not same_folder:
            return
        self.history = [
            (str(name), float(metric)) for name, metric in state.get("checkpoint_files", []) if metric is not None
        ]
        self.evicted = [
            str(name) for name in state.get("evicted", []) if re.fullmatch(r"checkpoint-\d+\.pth\.tar", name)
        ]
        self.best_epoch, self.best_metric = state.get("best_epoch"), state.get("best_metric")

    def keep_better(self, metric: float | None) -> None:
        """Let a ``model_best`` that a later, abandoned stretch of this run wrote stand until it is beaten."""
        if metric is not None and (self.best_metric is None or self.is_better(metric, self.best_metric)):
            self.best_epoch, self.best_metric = None, metric


def _numbered(epoch: int) -> str:
    return f"checkpoint-{epoch}{SUFFIX}"


def recovery_files(folder: Path) -> list[tuple[Path, tuple[int, int]]]:
    """Recovery checkpoints with their epoch and step, newest first."""
    matches = [(path, RECOVERY.fullmatch(path.name)) for path in folder.glob(f"recovery-*{SUFFIX}")]
    found = [(path, (int(match[1]), int(match[2]))) for path, match in matches if match]
    return sorted(found, key=lambda item: item[1], reverse=True)
