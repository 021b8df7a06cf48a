"""Going on after every kind of stop: bit by bit as if nothing had been."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import BASE, ROOT, STATEFUL, assert_same, assert_same_run, load, rows, stop_at

from soft_models.commands import files
from soft_models.errors import UsageError
from soft_models.training import run
from soft_models.training.config import TrainConfig
from soft_models.training.engine import EvalResult
from soft_models.training.learner import build_learner
from soft_models.training.resume import find_resume
from soft_models.training.runtime import Runtime
from soft_models.training.train import main as train_main


class Killed(BaseException):
    """Stands for a SIGKILL in this process."""


def kill() -> None:
    raise Killed


@pytest.fixture(scope="module")
def straight(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that nothing stopped."""
    output = tmp_path_factory.mktemp("straight")
    assert train_main([str(data), *BASE, *STATEFUL, "--output", str(output), "--experiment", "run"]) == 0
    return output / "run"


@pytest.mark.parametrize("update", [2, 4, 7])
def test_killed_run_resumes_exactly(
    straight: Path, train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: int
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, update, kill)
        with pytest.raises(Killed):
            train(*STATEFUL, "--resume", "auto")
    assert train(*STATEFUL, "--resume", "auto") == 0
    assert_same_run(straight, tmp_path / "run")


@pytest.mark.parametrize("call", [1, 4, 5, 8])
def test_run_killed_while_saving_resumes_exactly(
    straight: Path, train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Between the files of one save."""
    calls = 0
    original = files._sync_folder

    def sync(folder: Path) -> None:
        nonlocal calls
        calls += 1
        original(folder)
        if calls == call:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(files, "_sync_folder", sync)
        with pytest.raises(Killed):
            train(*STATEFUL, "--resume", "auto")
    assert train(*STATEFUL, "--resume", "auto") == 0
    assert_same_run(straight, tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_resumes_exactly(
    straight: Path, train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    options = [*STATEFUL, "--recovery-interval", "0"]
    with monkeypatch.context() as patch:
        stop_at(patch, 6, lambda: os.kill(os.getpid(), number))
        assert train(*options) == 128 + number
    assert (tmp_path / "run" / "recovery-1-2.pth.tar").exists()
    assert train(*STATEFUL, "--resume", "auto") == 0
    assert_same_run(straight, tmp_path / "run")


def test_signal_during_validation_stops_before_the_next_epoch(
    straight: Path, train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate_epoch = run.validate_epoch

    def interrupted(running: run.Run) -> dict[str, EvalResult]:
        os.kill(os.getpid(), signal.SIGTERM)
        return validate_epoch(running)

    with monkeypatch.context() as patch:
        patch.setattr(run, "validate_epoch", interrupted)
        assert train(*STATEFUL) == 128 + signal.SIGTERM
    assert [path.name for path in (tmp_path / "run").glob("recovery-*")] == ["recovery-1-0.pth.tar"]
    assert train(*STATEFUL, "--resume", "auto") == 0
    assert_same_run(straight, tmp_path / "run")


def test_plateau_with_noise_resumes_exactly(
    train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--sched plateau --lr-noise 0.2 0.6 --lr 0.01 --epochs 6".split()
    assert train(*options, experiment="straight") == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 15, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train(*options) == 128 + signal.SIGTERM
    assert train(*options, "--resume", "auto") == 0
    assert_same_run(tmp_path / "straight", tmp_path / "run")
    rates = {row["lr"] for row in rows(tmp_path / "run")}
    assert len(rates) > 2, "noise"


def test_processes_without_gpus_share_no_statistics() -> None:
    cfg = replace(TrainConfig(), sync_bn=True)
    with pytest.raises(UsageError, match="--sync-bn needs GPUs, the processes are on cpu; leave it out"):
        build_learner(cfg, torch.nn.Linear(2, 2), False, Runtime(torch.device("cpu"), 0, 2), 1)


def test_advice_at_a_stop_names_the_experiment(
    train: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train("--epochs", "2", experiment="pets/first") == 128 + signal.SIGTERM
    assert "the same command with --experiment pets/first --resume auto goes on" in capsys.readouterr().err


def test_image_mode_is_that_of_the_checkpoint(train: Callable[..., int], tmp_path: Path) -> None:
    assert train("--epochs", "1", "--input-img-mode", "HSV") == 0
    first = tmp_path / "run" / "last.pth.tar"
    assert train("--epochs", "1", "--initial-checkpoint", str(first), experiment="again") == 0
    assert train("--epochs", "2", "--resume", "auto") == 0
    for name in ("run", "again"):
        assert load(tmp_path / name / "last.pth.tar")["soft_models"]["input_img_mode"] == "HSV"


def test_sigkill_resumes_exactly(straight: Path, tmp_path: Path, command: list[str]) -> None:
    """Three times at random moments, with loader processes."""
    draws = random.Random(1)
    command = [*command, *STATEFUL, "--log-interval", "1", "-j", "2", "--resume", "auto"]
    for _ in range(3):
        assert kill_somewhere(command, tmp_path / "run", draws, most_lines=4)
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert_same_run_but_workers(straight, tmp_path / "run")


def assert_same_run_but_workers(a: Path, b: Path) -> None:
    assert (a / "summary.csv").read_bytes() == (b / "summary.csv").read_bytes()
    for key in ("state_dict", "state_dict_ema", "optimizer"):
        assert_same(load(a / "last.pth.tar")[key], load(b / "last.pth.tar")[key], key)


def test_finished_run_says_so(trained: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (trained / "last.pth.tar").stat().st_mtime_ns
    options = ["--epochs", "2", "--model-ema", "--resume", "auto", "--output", str(trained.parent)]
    assert train_main([str(data), *BASE, *options, "--experiment", "run"]) == 0
    assert "the run is finished: 2 of 2 epochs are done" in capsys.readouterr().err
    assert (trained / "last.pth.tar").stat().st_mtime_ns == before


def test_changed_schedule_is_named_on_resume(train: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--epochs", "2") == 0
    assert train("--epochs", "4", "--resume", "auto") == 0
    assert "learning rate changes on resume from 0 to 0.0005: schedule options differ" in capsys.readouterr().err


def test_best_is_never_replaced_by_a_worse_one(train: Callable[..., int], tmp_path: Path) -> None:
    assert train("--epochs", "1", "--eval-metric", "loss") == 0
    path = tmp_path / "run" / "model_best.pth.tar"
    best = load(path)
    best["metric"] = 1e-9
    path.unlink()  # a link to other checkpoints
    torch.save(best, path)
    assert train("--epochs", "2", "--eval-metric", "loss", "--resume", "auto") == 0
    assert load(path)["metric"] == 1e-9


@pytest.mark.parametrize("again", ["worse", "unranked"])
def test_best_outlives_its_epoch_trained_again(
    train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    again: str,
) -> None:  # fmt: skip
    assert train("--epochs", "2", "--eval-metric", "loss", "--sched", "constant") == 0
    folder = tmp_path / "run"
    last, before = load(folder / "last.pth.tar"), load(folder / "model_best.pth.tar")
    assert before["epoch"] == 1, "the second epoch is better, and so the one at stake"
    numbered = folder / "checkpoint-1.pth.tar"
    first = numbered.read_bytes()
    capsys.readouterr()
    result = EvalResult(loss=last["metric"] + 1) if again == "worse" else EvalResult()
    monkeypatch.setattr(run, "evaluate", lambda *_: result)
    options = ["--epochs", "2", "--eval-metric", "loss", "--sched", "constant", "--start-epoch", "1"]
    assert train(*options, "--resume", str(folder / "last.pth.tar")) == 0
    assert load(folder / "model_best.pth.tar")["metric"] == before["metric"]
    assert json.loads(capsys.readouterr().out)["metric"] == before["metric"]
    assert numbered.exists() == (again == "worse") and (not numbered.exists() or numbered.read_bytes() != first)


def test_auto_resume_goes_on_behind_a_start_epoch(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--epochs", "3", "--start-epoch", "1", "--resume", "auto"]
    assert train(*options) == 0
    assert train(*options) == 0
    assert "the run is finished: 3 of 3 epochs are done" in capsys.readouterr().err
    assert train("--epochs", "3", "--start-epoch", "2", "--resume", "auto") == 0
    assert "resumed" in capsys.readouterr().err, "another one is asked for"
    assert [row["epoch"] for row in rows(tmp_path / "run")] == ["1", "2"]


def test_auto_resume_goes_on_from_the_run_that_began_alike(tmp_path: Path) -> None:
    """A run that was taken back to epoch 2 and killed within it, beside what its folder held before."""
    for name, start, epoch, step in (("last.pth.tar", None, 6, 0), ("recovery-2-5.pth.tar", 2, 2, 5)):
        extras = {"format": 1, "position": {"epoch": epoch, "step": step}}
        torch.save({"args": {"start_epoch": start}, "soft_models": extras}, tmp_path / name)
    for start, name in ((2, "recovery-2-5.pth.tar"), (None, "last.pth.tar")):
        found = find_resume(TrainConfig(resume="auto", start_epoch=start), tmp_path)
        assert found is not None and found[0].name == name


def test_other_checkpoints_are_refused_on_resume(
    trained: Path, train: Callable[..., int], no_model: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(trained / "last.pth.tar")
    assert train("--resume", path, "--model", "test_resnet") == 2
    assert "is a checkpoint of 'test_byobnet', not of --model 'test_resnet'" in capsys.readouterr().err
    other = load(Path(path))
    other["soft_models"]["classes"] = ["a", "b", "d"]
    torch.save(other, tmp_path / "other.pth.tar")
    assert train("--resume", str(tmp_path / "other.pth.tar")) == 2
    assert "was trained on other classes; not in both: d, c" in capsys.readouterr().err


def test_checkpoint_of_a_later_version_is_refused(
    trained: Path, train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = load(trained / "last.pth.tar")
    later["soft_models"].update(format=99, position="of another kind")
    (tmp_path / "run").mkdir()
    torch.save(later, tmp_path / "run" / "last.pth.tar")
    assert train("--resume", "auto") == 2
    assert "the checkpoint has format 99, this version reads up to 1; update" in capsys.readouterr().err


def test_fine_tuned_model_keeps_architecture_and_images_of_its_file(
    train: Callable[..., int],
    validate: Callable[..., dict[str, Any]],
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kwargs = ["embed_dims=(16,16,32,32)", "num_heads=(1,2,2,2)", "depths=(1,1,1,1)", "landmark_grid=3", "img_size=48"]
    model = ["--model", "soft_tiny", "--model-kwargs", *kwargs, "--in-chans", "1", "--mean", "0.3"]
    assert train(*model, "--epochs", "1", experiment="gray") == 0
    options = "--model soft_tiny -b 6 -j 0 --device cpu --warmup-epochs 0 --opt adamw --lr 1e-3".split()
    source = str(tmp_path / "gray" / "last.pth.tar")
    argv = [str(data), *options, "--output", str(tmp_path), "--experiment", "fine", "--pretrained-path", source]
    for epochs in ("1", "2"):  # the second resumes the first
        capsys.readouterr()
        assert train_main([*argv, "--epochs", epochs, "--resume", "auto"]) == 0
        (taken,) = (line for line in capsys.readouterr().err.splitlines() if "as in the checkpoint" in line)
        assert "landmark_grid 3" in taken and ("in_chans" in taken) == (epochs == "2"), "channels are adapted at first"
        found = load(tmp_path / "fine" / "last.pth.tar")
        extras = found["soft_models"]
        assert (extras["data_config"]["input_size"], extras["data_config"]["mean"]) == ([3, 32, 32], [0.3, 0.3, 0.3])
        assert (extras["model_args"]["landmark_grid"], extras["model_args"]["in_chans"]) == (3, 3)
        assert found["state_dict"]["stages.0.pos_embed"].shape == (1, 12, 12, 16)
    fine = str(tmp_path / "fine" / "last.pth.tar")
    again = [str(data), *options, "--output", str(tmp_path), "--experiment", "again", "--initial-checkpoint", fine]
    assert train_main([*again, "--epochs", "1"]) == 0
    for name in ("model_args", "data_config"):
        assert load(tmp_path / "again" / "last.pth.tar")["soft_models"][name] == extras[name]
    result = validate("--checkpoint", fine)
    assert result["loss"] == pytest.approx(float(rows(tmp_path / "fine")[1]["eval_loss"]), abs=1e-5)


def test_earlier_run_is_not_overwritten(trained: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_main([str(data), *BASE, "--output", str(trained.parent), "--experiment", "run"]) == 2
    assert "holds an earlier run: continue it with --resume auto" in capsys.readouterr().err


def test_two_runs_in_one_folder_are_refused(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    hold = (
        "import pathlib, sys; from soft_models.commands.files import RunLock\n"
        "with RunLock(pathlib.Path('run'), ''): print('held', flush=True); sys.stdin.read()"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with subprocess.Popen([sys.executable, "-c", hold], env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert train("--epochs", "1") == 2
        other.communicate("")
    error = capsys.readouterr().err
    assert re.search("another run is writing to .*; wait for its end, or give --experiment another name", error)


def test_full_disk_leaves_the_last_checkpoint_whole(
    train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--epochs", "1") == 0
    before = (tmp_path / "run" / "last.pth.tar").read_bytes()

    def full(state: Any, file: Any) -> None:
        file.write(b"half a checkpoint")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        assert train("--epochs", "2", "--resume", "auto") == 1
    assert "No space left on device; the file that was there is untouched" in capsys.readouterr().err
    assert (tmp_path / "run" / "last.pth.tar").read_bytes() == before
    assert not list((tmp_path / "run").glob(".tmp-*"))


def test_file_systems_without_links_get_copies(
    train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("not here")

    monkeypatch.setattr(os, "link", refuse)
    assert train("--epochs", "1") == 0
    names = ("last", "model_best", "checkpoint-0")
    assert len({(tmp_path / "run" / f"{name}.pth.tar").read_bytes() for name in names}) == 1


def test_resume_needs_the_same_optimizer_and_ranking(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--epochs", "1") == 0
    again = ["--epochs", "2", "--resume", "auto"]
    assert train(*again, "--opt", "lamb") == 2
    assert "has the state of --opt adamw, not of lamb; give the same, or --no-resume-opt" in capsys.readouterr().err
    for options, own in ((["--eval-metric", "loss"], "validation loss"), (["--val-split", ""], "training loss")):
        assert train(*again, *options) == 2
        assert f"ranks its checkpoints by validation top1, this run by {own}" in capsys.readouterr().err
    path = tmp_path / "run" / "last.pth.tar"
    torch.save({**load(path), "optimizer": {"lr": 0.1}}, tmp_path / "other.pth.tar")
    assert train("--epochs", "2", "--resume", str(tmp_path / "other.pth.tar"), experiment="third") == 2
    assert "the optimizer in" in capsys.readouterr().err
    assert train("--epochs", "2", "--resume", str(path), "--eval-metric", "loss", experiment="fourth") == 0
    assert train(*again, "--opt", "lamb", "--no-resume-opt") == 0


def test_recovery_needs_the_same_steps(
    train: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train("--epochs", "1") == 143
    assert train("--epochs", "1", "--resume", "auto", "-b", "8") == 2
    assert "lies within an epoch of 4 steps, an epoch is now 3" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("workers", "processes"), [(0, 1), (2, 1), (0, 2)])
def test_run_killed_fifty_times_resumes_exactly(
    tmp_path: Path, command: list[str], workers: int, processes: int
) -> None:
    """SIGKILL at random moments, until run after run is through; some of them while a file is written."""
    options = [*STATEFUL, "--epochs", "8", "--log-interval", "1", "-j", str(workers), "--resume", "auto", "-b", "4"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*(launch if processes > 1 else command[:1]), *command[1:], *options]
    assert subprocess.run([*command, "--experiment", "straight"], capture_output=True, check=False).returncode == 0
    draws, kills, inside, runs = random.Random(workers + 10 * processes), 0, 0, 0
    while kills < 50:
        runs += 1
        folder = tmp_path / f"run{runs}"
        while kill_somewhere([*command, "--experiment", folder.name], folder, draws, most_lines=12):
            kills += 1
            inside += any(folder.glob(".tmp-*"))
        assert_same_run(tmp_path / "straight", folder)
    print(f"{workers} workers, {processes} processes: {kills} kills, {inside} inside a save, {runs} runs")  # noqa: T201
    assert inside >= 5


def kill_somewhere(command: list[str], folder: Path, draws: random.Random, most_lines: int) -> bool:
    """Kill a run and all its processes a few log lines from now, half the time inside a save; false if it ended."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = draws.randint(1, most_lines)
        for line in process.stderr:
            lines -= line.startswith(("epoch", "eval"))
            if lines == 0:
                wait_to_kill(folder, draws)
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
                for number in (process.pid, *map(int, children)):
                    os.kill(number, signal.SIGKILL)
                break
        process.stderr.read()
    if lines == 0:
        return True
    assert process.returncode == 0
    return False


def wait_to_kill(folder: Path, draws: random.Random) -> None:
    """Up to 0.2 seconds, or until a file is being written."""
    until_save, deadline = draws.random() < 0.5, time.monotonic() + draws.uniform(0, 0.2)
    while time.monotonic() < deadline and not (until_save and any(folder.glob(".tmp-*"))):
        time.sleep(0.0005)
