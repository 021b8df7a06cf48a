"""What every test shares: seed, one thread, the marker ``slow``, and small runs of the scripts."""

import os

# Before torch and huggingface_hub are imported, which read these once. One thread for each worker: tests are small, and
# workers that share the cores lose more than they gain from more. No test may depend on a network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import BASE, ROOT
from tiny_data import write_folder

from soft_models.training import models
from soft_models.training.train import main as train_main
from soft_models.training.validate import main as validate_main

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random state, alone or among others."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before counts, and nothing compiled here later."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of two epochs, with averaged weights."""
    output = tmp_path_factory.mktemp("output")
    options = "--epochs 2 --model-ema --model-ema-decay 0.9".split()
    assert train_main([str(data), *BASE, *options, "--output", str(output), "--experiment", "run"]) == 0
    return output / "run"


@pytest.fixture
def train(data: Path, tmp_path: Path) -> Callable[..., int]:
    """Run train.py on the tiny data with an output folder of this test."""

    def run(*argv: str, experiment: str = "run") -> int:
        run_of = ["--data-dir", str(data), "--output", str(tmp_path), "--experiment", experiment]
        return train_main([*BASE, *run_of, *argv])

    return run


@pytest.fixture
def validate(data: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run validate.py on the tiny data and return what it prints."""

    def run(*argv: str) -> dict[str, Any]:
        capsys.readouterr()
        assert validate_main(["--data-dir", str(data), "-j", "0", "--device", "cpu", *argv]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make building a model fail the test."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(models.timm, "create_model", refuse)


@pytest.fixture
def command(data: Path, tmp_path: Path) -> list[str]:
    run_of = ["--data-dir", str(data), "--output", str(tmp_path), "--experiment", "run"]
    return [sys.executable, str(ROOT / "train.py"), *BASE, *run_of]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_slow = pytest.mark.skip(reason="slow: run with --slow, or `make test-all`")
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(skip_slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the largest deviations from the official numbers, which tests record as the property ``deviation``."""
    reports = terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", [])
    lines = [str(value) for report in reports for name, value in report.user_properties if name == "deviation"]
    if lines:
        terminalreporter.section("largest deviations from the official numbers")
        for line in sorted(lines):
            terminalreporter.write_line(line)
