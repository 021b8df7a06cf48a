"""How the scripts set up their process: memory, compilation, signals."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from runs import ROOT

from soft_models.training.config import TrainConfig
from soft_models.training.runtime import compile_model


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    env |= {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
# Pages of 4 KiB that come from the system when as many float32 tensors of that size are made for the fourth time.
PAGES = """
import resource, torch
def pages(count, size):
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.empty(size).fill_(1) for _ in range(count)]
        after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        del tensors
    return after - before
"""


@needs_glibc
@pytest.mark.parametrize(("environment", "kept"), [({}, True), ({"MALLOC_ARENA_MAX": "4"}, False)])
def test_freed_memory_is_kept_unless_the_environment_says_how(environment: dict[str, str], kept: bool) -> None:
    code = (
        "from soft_models.training.config import ValidateConfig\n"
        "from soft_models.training.runtime import running\n"
        "with running(ValidateConfig(device='cpu')):\n"
        "    print(pages(1, 2**24))"
    )
    assert (int(run_python(PAGES + code, **environment).stdout) < 1000) == kept


@needs_glibc
def test_models_let_small_buffers_be_kept() -> None:
    code = "import timm, soft_models; timm.create_model('soft_tiny'); print(pages(8, 2**20))"
    assert int(run_python(PAGES + code).stdout) < 1000


@pytest.mark.parametrize(
    ("device", "mode", "expected"),
    [("cpu", None, {"force_layout_optimization": True}), ("cpu", "reduce-overhead", None), ("cuda", None, None)],
)
def test_inductor_lays_out_gradients_of_convolutions_on_a_cpu(
    device: str, mode: str | None, expected: dict[str, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = torch.nn.Identity(), {}
    compile_in_place = model.compile
    monkeypatch.setattr(model, "compile", lambda **options: given.update(options) or compile_in_place(**options))
    cfg = TrainConfig(torchcompile="inductor", torchcompile_mode=mode)
    compile_model(cfg, model, torch.device(device))  # torch refuses options that it does not know
    assert given["options"] == expected


def test_second_signal_stops_at_once() -> None:
    code = (
        "import os, signal; from soft_models.training.runtime import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT); assert stop.number == signal.SIGINT\n"
        "    os.kill(os.getpid(), signal.SIGTERM); print('still here')"
    )
    done = run_python(code)
    assert (done.returncode, done.stdout) == (143, "")
