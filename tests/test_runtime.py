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
# Pages that the system clears for a step that is done for the fourth time.
PAGES = """
import resource, torch
def pages(step):
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""


@needs_glibc
@pytest.mark.parametrize(("environment", "kept"), [({}, True), ({"MALLOC_ARENA_MAX": "4"}, False)])
def test_freed_memory_is_kept_unless_the_environment_says_how(environment: dict[str, str], kept: bool) -> None:
    code = (
        "from soft_models.training.config import ValidateConfig\n"
        "from soft_models.training.runtime import running\n"
        "with running(ValidateConfig(device='cpu')):\n"
        "    print(pages(lambda: torch.empty(2**24).fill_(1)))"  # 64 MiB, 16,384 pages
    )
    assert (int(run_python(PAGES + code, **environment).stdout) < 1000) == kept


@needs_glibc
def test_models_let_small_buffers_be_kept() -> None:
    code = (
        "import timm, soft_models\n"
        "with torch.device('meta'):\n"
        "    timm.create_model('soft_tiny')\n"
        "model, x = timm.create_model('soft_tiny').eval(), torch.randn(1, 3, 224, 224)\n"
        "with torch.inference_mode():\n"
        "    print(pages(lambda: model(x)))"
    )
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
