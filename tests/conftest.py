"""What every test shares: seed, one thread, and the markers ``slow`` and ``gpu``."""

import os

# Before torch and huggingface_hub are imported, which read these once. One thread for each worker: tests are small, and
# workers that share the cores lose more than they gain from more. No test may depend on a network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_slow = pytest.mark.skip(reason="slow: run with --slow, or `make test-all`")
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(skip_slow)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip_gpu)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the largest deviations from the official numbers, which tests record as the property ``deviation``."""
    reports = terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", [])
    lines = [str(value) for report in reports for name, value in report.user_properties if name == "deviation"]
    if lines:
        terminalreporter.section("largest deviations from the official numbers")
        for line in sorted(lines):
            terminalreporter.write_line(line)
