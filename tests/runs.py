"""What the tests of the scripts share: options of small runs, and reading and comparing what runs leave."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from soft_models.commands.cli import load_yaml
from soft_models.training import learner
from soft_models.training.config import TrainConfig

ROOT = Path(__file__).parents[1]
BASE = "--model test_byobnet --img-size 32 -b 6 -j 0 --device cpu --warmup-epochs 0 --opt adamw --lr 1e-3".split()
# Everything random or stateful at once.
STATEFUL = (
    "--epochs 3 --mixup 0.2 --cutmix 0.5 --reprob 0.3 --drop 0.2 --drop-path 0.1 --model-ema --model-ema-warmup "
    "--sched-on-updates --clip-grad 1 --recovery-interval 1 --checkpoint-hist 2 --aa rand-m5"
).split()


def load_config(path: Path) -> TrainConfig:
    """The config that a YAML file describes."""
    return TrainConfig(**load_yaml(path, TrainConfig))


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "summary.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


def assert_same(a: Any, b: Any, where: str) -> None:
    """Equal bit by bit, through dicts and lists; names of runs aside."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            if key not in ("output", "experiment", "resume", "recovery_interval"):
                assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            assert_same(left, right, f"{where}/{index}")
    else:
        assert a == b, where


def assert_same_run(a: Path, b: Path) -> None:
    assert (a / "summary.csv").read_bytes() == (b / "summary.csv").read_bytes()
    names = [sorted(path.name for path in folder.glob("*.pth.tar")) for folder in (a, b)]
    assert names[0] == names[1]
    for name in names[0]:
        assert_same(load(a / name), load(b / name), name)


def stop_at(monkeypatch: pytest.MonkeyPatch, update: int, action: Callable[[], None]) -> None:
    """Let ``action`` happen after one optimizer update of the run."""
    original = learner.Learner.update

    def patched(self: learner.Learner, number: int) -> float:
        norm = original(self, number)
        if number == update:
            action()
        return norm

    monkeypatch.setattr(learner.Learner, "update", patched)
