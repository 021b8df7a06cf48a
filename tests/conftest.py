"""What every test shares: seed, one thread, tolerances by dtype, and the markers ``slow`` and ``gpu``."""

import os

# Before torch and huggingface_hub are imported, which read these once. One thread for each worker: tests are small, and
# workers that share the cores lose more than they gain from more. No test may depend on a network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import random

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


# Rounding alone, as torch.testing.assert_close takes it: a test that allows more says why.
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-10},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 1e-2, "atol": 1e-2},
}


@pytest.fixture
def tolerances() -> dict[torch.dtype, dict[str, float]]:
    """Relative and absolute tolerance by dtype: ``assert_close(actual, expected, **tolerances[dtype])``."""
    return TOLERANCES


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random state, alone or among others."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


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
