"""The scripts as users run them: files, numbers, refusals, and going on after every kind of stop."""

import argparse
import csv
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from tiny_data import BROKEN, CLASSES, write_folder, write_odd_images

from soft_models.training import files, learner, models
from soft_models.training.config import load_config
from soft_models.training.train import main as train_main
from soft_models.training.validate import main as validate_main

ROOT = Path(__file__).parents[1]
BASE = "--model test_byobnet --img-size 32 -b 6 -j 0 --device cpu --warmup-epochs 0 --opt adamw --lr 1e-3".split()
# Everything random or stateful at once.
STATEFUL = (
    "--epochs 3 --mixup 0.2 --cutmix 0.5 --reprob 0.3 --drop 0.2 --drop-path 0.1 --model-ema --model-ema-warmup "
    "--sched-on-updates --clip-grad 1 --recovery-interval 1 --checkpoint-hist 2 --aa rand-m5"
).split()


class Killed(BaseException):
    """Stands for a SIGKILL in this process."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
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
        return train_main([str(data), *BASE, "--output", str(tmp_path), "--experiment", experiment, *argv])

    return run


@pytest.fixture
def validate(data: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run validate.py on the tiny data and return what it prints."""

    def run(*argv: str) -> dict[str, Any]:
        capsys.readouterr()
        assert validate_main([str(data), "-j", "0", "--device", "cpu", *argv]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make building a model fail the test."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(models.timm, "create_model", refuse)


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


def test_files_are_those_of_timm(trained: Path) -> None:
    names = {path.name for path in trained.iterdir() if "tfevents" not in path.name}
    checkpoints = {"checkpoint-0.pth.tar", "checkpoint-1.pth.tar", "last.pth.tar", "model_best.pth.tar"}
    assert names == checkpoints | {"args.yaml", "summary.csv", ".lock"}
    columns = list(rows(trained)[0])
    assert columns[:5] == ["epoch", "train_loss", "eval_loss", "eval_top1", "eval_top5"]
    assert columns[-1] == "lr"
    cfg = load_config(trained / "args.yaml")
    assert (cfg.num_classes, cfg.lr, cfg.experiment) == (3, 1e-3, "run")
    keys = {"epoch", "arch", "args", "optimizer", "version", "state_dict", "state_dict_ema", "metric", "saver"}
    assert keys <= set(load(trained / "last.pth.tar"))


def test_tensorboard_has_every_epoch(trained: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(trained)).Reload()
    for name in ("train_loss", "eval_loss", "eval_top1", "eval_top5", "lr", "images_per_second"):
        assert [event.step for event in log.Scalars(name)] == [0, 1]
    assert log.Scalars("eval_loss")[1].value == pytest.approx(float(rows(trained)[1]["eval_loss"]))


def test_validation_equals_training(trained: Path, validate: Callable[..., dict[str, Any]]) -> None:
    best = load(trained / "model_best.pth.tar")
    row = rows(trained)[best["epoch"]]
    averaged = validate("--checkpoint", str(trained / "model_best.pth.tar"), "-b", "4")
    assert averaged["weights"] == "ema"
    assert averaged["top1"] == float(row["eval_top1"]) == best["metric"]
    assert averaged["loss"] == pytest.approx(float(row["eval_loss"]), abs=1e-5)
    raw = validate("--checkpoint", str(trained / "model_best.pth.tar"), "--no-use-ema")
    assert raw["weights"] == "raw"
    assert raw["loss"] == pytest.approx(float(row["eval_raw_loss"]), abs=1e-5)
    assert raw["loss"] != averaged["loss"]
    assert averaged["samples"] == 9


def test_validation_takes_everything_from_the_checkpoint(
    train: Callable[..., int], validate: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    kwargs = "--in-chans 1 --mean 0.4 --std 0.3 --crop-pct 0.8 --interpolation bilinear --gp max --epochs 1".split()
    assert train(*kwargs) == 0
    result = validate("--checkpoint", str(tmp_path / "run" / "last.pth.tar"))
    assert (result["model"], result["img_size"], result["crop_pct"]) == ("test_byobnet", 32, 0.8)
    assert result["loss"] == pytest.approx(float(rows(tmp_path / "run")[0]["eval_loss"]), abs=1e-5)
    assert validate("--checkpoint", str(tmp_path / "run" / "last.pth.tar"), "--img-size", "48")["img_size"] == 48


def test_timm_reads_our_checkpoints(trained: Path) -> None:
    from timm.models import load_checkpoint
    from timm.task import ClassificationTask, load_task_ema_checkpoint, resume_task_checkpoint

    path = str(trained / "last.pth.tar")
    model = timm.create_model("test_byobnet", num_classes=3, checkpoint_path=path)
    assert_same(dict(model.state_dict()), dict(load(trained / "last.pth.tar")["state_dict_ema"]), "ema")
    load_checkpoint(model, path, use_ema=False)
    task = ClassificationTask(model, criterion=torch.nn.CrossEntropyLoss(), verbose=False)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=2e-5)
    assert resume_task_checkpoint(task, path, optimizer, log_info=False) == 2
    task.setup_ema()
    load_task_ema_checkpoint(task, path)


def test_checkpoints_of_timm_are_read(
    train: Callable[..., int], validate: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    from timm.utils import CheckpointSaver

    model = timm.create_model("test_byobnet", num_classes=3)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=2e-5)
    args = argparse.Namespace(model="test_byobnet", num_classes=3, img_size=32, in_chans=None, gp=None, model_kwargs={})
    CheckpointSaver(model, optimizer, args=args, checkpoint_dir=str(tmp_path)).save_checkpoint(0, 50.0)
    result = validate("--checkpoint", str(tmp_path / "last.pth.tar"))
    assert (result["model"], result["img_size"], result["weights"]) == ("test_byobnet", 32, "raw")
    assert train("--resume", str(tmp_path / "last.pth.tar"), "--epochs", "2") == 0
    assert [row["epoch"] for row in rows(tmp_path / "run")] == ["1"]


def stop_at(monkeypatch: pytest.MonkeyPatch, update: int, action: Callable[[], None]) -> None:
    """Let ``action`` happen after one optimizer update of the run."""
    original = learner.Learner.update

    def patched(self: learner.Learner, number: int) -> float:
        norm = original(self, number)
        if number == update:
            action()
        return norm

    monkeypatch.setattr(learner.Learner, "update", patched)


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
    """Between the files of one save, and before a file takes its place."""
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


@pytest.fixture
def command(data: Path, tmp_path: Path) -> Iterator[list[str]]:
    yield [sys.executable, str(ROOT / "train.py"), str(data), *BASE, "--output", str(tmp_path), "--experiment", "run"]


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


REFUSALS = {
    "model": (["--model", "sofft_tiny"], "unknown model 'sofft_tiny'; did you mean 'soft_tiny'"),
    "optimizer": (["--opt", "adamv"], "unknown --opt 'adamv'; did you mean 'adam"),
    "schedule": (["--sched", "cosin"], "unknown --sched 'cosin'; did you mean 'cosine'"),
    "metric": (["--eval-metric", "top_1"], "unknown --eval-metric 'top_1'; did you mean 'top1'"),
    "flag": (["--epoch", "3"], "unknown flag --epoch; did you mean '--epochs'"),
    "batch": (["-b", "64"], "--batch-size 64 is larger than the dataset"),
    "classes": (["--num-classes", "2"], "--num-classes 2 is too small: the data have 3 classes"),
    "folder": (["--data-dir", "/nowhere"], "data folder '/nowhere' does not exist"),
    "split": (["--val-split", "holdout"], "no folder 'holdout' in"),
    "resume": (["--resume", "none.pth"], "no checkpoint file 'none.pth'"),
    "decay": (["--layer-decay", "0.7", "--sched", "none"], "--layer-decay is applied by the schedule"),
    "epochs": (["--epochs", "0"], "--epochs must be at least 1, got 0"),
    "device": (["--device", "cuda:9x"], "--device must be cpu, cuda, cuda:N or mps, got 'cuda:9x'"),
    "module": (["--device-modules", "no_such_module"], "cannot import 'no_such_module'"),
    "lr": (["--lr", "fast"], "lr must be float, got 'fast'"),
    "kd": (["--kd-model-name", "x"], "distillation is out of scope"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_mistakes_are_refused_before_the_model_is_built(
    train: Callable[..., int], no_model: None, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    argv, message = REFUSALS[name]
    assert train(*argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.splitlines()[-1].startswith("train.py: error: ")


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


def test_earlier_run_is_not_overwritten(trained: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_main([str(data), *BASE, "--output", str(trained.parent), "--experiment", "run"]) == 2
    assert "holds an earlier run: continue it with --resume auto" in capsys.readouterr().err


def test_two_runs_in_one_folder_are_refused(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    hold = (
        "import pathlib, sys; from soft_models.training.files import RunLock\n"
        "with RunLock(pathlib.Path('run')): print('held', flush=True); sys.stdin.read()"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with subprocess.Popen([sys.executable, "-c", hold], env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert train("--epochs", "1") == 2
        other.communicate("")
    assert "another run is writing to" in capsys.readouterr().err


def test_output_that_cannot_be_written_to_is_refused(
    trained: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_main([str(data), *BASE, "--output", "/dev/null", "--experiment", "run"]) == 2
    assert "cannot write to the folder '/dev/null/run' (Not a directory); name another" in capsys.readouterr().err
    argv = [str(data), "-j", "0", "--checkpoint", str(trained / "last.pth.tar"), "--results-file", "/dev/null/x.csv"]
    assert validate_main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "cannot write to the folder '/dev/null'" in captured.err


def test_workers_may_be_spawned(data: Path, tmp_path: Path) -> None:
    """As where processes cannot be forked: they import everything anew."""
    argv = [str(data), *BASE, "-j", "1", "--epochs", "1", "--output", str(tmp_path), "--experiment", "run"]
    code = (
        "import sys, torch.multiprocessing as mp\n"
        "if __name__ == '__main__':\n"
        "    mp.set_start_method('spawn')\n"
        "    from soft_models.training.train import main\n"
        f"    sys.exit(main({argv}))\n"
    )
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "run")) == 1


def test_head_is_said_to_be_larger_than_the_data(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--num-classes", "5", "--epochs", "1") == 0
    assert "--num-classes 5 is more than the data have: 3" in capsys.readouterr().err
    assert load(tmp_path / "run" / "last.pth.tar")["state_dict"]["head.fc.weight"].shape[0] == 5


def test_pretrained_path_adapts_the_head(
    trained: Path, train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(trained / "model_best.pth.tar")
    assert train("--pretrained-path", path, "--num-classes", "5", "--in-chans", "1", "--lr", "0", "--epochs", "1") == 0
    assert "new: head.fc.weight, head.fc.bias" in capsys.readouterr().err
    ours, theirs = load(tmp_path / "run" / "last.pth.tar")["state_dict"], load(Path(path))["state_dict_ema"]
    name = "stages.1.0.conv1_1x1.conv.weight"
    name = name if name in ours else next(key for key in ours if key.startswith("stages") and ours[key].ndim == 4)
    assert torch.equal(ours[name], theirs[name])


def test_initial_checkpoint_must_fit(
    trained: Path, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(trained / "model_best.pth.tar")
    assert train("--initial-checkpoint", path, "--num-classes", "5") == 2
    error = capsys.readouterr().err
    assert "--pretrained-path adapts head and input channels" in error
    assert train("--initial-checkpoint", path, "--epochs", "1") == 0
    assert train("--initial-checkpoint", path, "--model", "test_resnet", experiment="other") == 2
    assert "is a checkpoint of 'test_byobnet'" in capsys.readouterr().err


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_wrapped_weights_are_unwrapped(
    trained: Path, validate: Callable[..., dict[str, Any]], tmp_path: Path, prefix: str
) -> None:
    weights = load(trained / "model_best.pth.tar")["state_dict"]
    torch.save({"model": {prefix + name: value for name, value in weights.items()}}, tmp_path / "wrapped.pth")
    result = validate(
        "--checkpoint",
        str(tmp_path / "wrapped.pth"),
        "--model",
        "test_byobnet",
        "--num-classes",
        "3",
        "--img-size",
        "32",
    )
    expected = validate("--checkpoint", str(trained / "model_best.pth.tar"), "--no-use-ema")
    assert result["loss"] == pytest.approx(expected["loss"], abs=1e-5)


class Foreign:
    """A class that a checkpoint of others may hold."""


def test_plateau_without_warmup_starts_at_the_rate_asked_for(train: Callable[..., int], tmp_path: Path) -> None:
    assert train("--sched", "plateau", "--epochs", "2", "--lr", "0.01") == 0
    assert [float(row["lr"]) for row in rows(tmp_path / "run")] == [0.01, 0.01]


def test_image_size_stored_as_one_number_is_understood(
    trained: Path, tmp_path: Path, validate: Callable[..., dict[str, Any]]
) -> None:
    weights = load(trained / "last.pth.tar")["state_dict"]
    torch.save({"model": weights, "args": argparse.Namespace(input_size=32)}, tmp_path / "deit.pth")
    result = validate("--checkpoint", str(tmp_path / "deit.pth"), "--model", "test_byobnet", "--num-classes", "3")
    assert result["img_size"] == 32


def test_cosformer_vit_starts_from_a_checkpoint_of_timms_deit(train: Callable[..., int], tmp_path: Path) -> None:
    deit = timm.create_model("deit_tiny_patch16_224")
    torch.save(
        {"arch": "deit_tiny_patch16_224", "state_dict": deit.state_dict()}, tmp_path / "deit_tiny_patch16_224.pth"
    )
    options = ["--model", "cosformer_vit_tiny_patch16_224", "--epochs", "1", "--img-size", "32"]
    assert train(*options, "--pretrained-path", str(tmp_path / "deit_tiny_patch16_224.pth")) == 0


def test_images_too_small_for_the_model_are_refused_before_training(
    train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--model", "soft_tiny", "--img-size", "16") == 2
    assert "the model cannot take images of 3 x 16 x 16: images must be at least 32 x 32" in capsys.readouterr().err


def test_files_that_run_code_are_refused(
    trained: Path,
    data: Path,
    tmp_path: Path,
    validate: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = load(trained / "last.pth.tar")
    torch.save({**checkpoint, "extra": Foreign()}, tmp_path / "foreign.pth")
    argv = [str(data), "-j", "0", "--checkpoint", str(tmp_path / "foreign.pth")]
    assert validate_main(argv) == 2
    error = capsys.readouterr().err
    assert "Foreign" in error
    assert "--trust" in error
    for content, reason in ((b"", "is not a readable checkpoint"), (b"no checkpoint", "is not a readable checkpoint")):
        (tmp_path / "foreign.pth").write_bytes(content)
        assert validate_main(argv) == 2
        assert reason in capsys.readouterr().err


def test_missing_averaged_weights_are_an_error(
    trained: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = load(trained / "last.pth.tar")
    del checkpoint["state_dict_ema"]
    torch.save(checkpoint, tmp_path / "raw.pth")
    assert validate_main([str(data), "--checkpoint", str(tmp_path / "raw.pth"), "--use-ema"]) == 2
    assert "no averaged weights under state_dict_ema, model_ema" in capsys.readouterr().err


def test_other_classes_are_refused_in_validation(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_folder(tmp_path / "other")
    (other / "val" / "b").rename(other / "val" / "dog")
    assert validate_main([str(other), "--checkpoint", str(trained / "last.pth.tar"), "-j", "0"]) == 2
    assert "has classes unknown to the model: dog" in capsys.readouterr().err


def test_nonfinite_loss_stops_the_run_and_is_never_best(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--lr", "1e30", "--epochs", "3", "--opt", "sgd") == 1
    error = capsys.readouterr().err
    assert "look at these images: " in error
    assert ".png" in error
    best = tmp_path / "run" / "model_best.pth.tar"
    assert not best.exists() or math.isfinite(load(best)["metric"])


def test_nonfinite_updates_can_be_left_out(
    train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = learner.Learner.backward

    def poisoned(self: learner.Learner, images: torch.Tensor, *args: Any) -> torch.Tensor:
        poisoned.calls += 1  # type: ignore[attr-defined]
        return original(self, images * (math.inf if poisoned.calls == 2 else 1), *args)  # type: ignore[attr-defined]

    poisoned.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(learner.Learner, "backward", poisoned)
    assert train("--epochs", "1", "--skip-nonfinite", "1", "--model-ema") == 0
    state = load(tmp_path / "run" / "last.pth.tar")
    assert all(value.isfinite().all() for key in ("state_dict", "state_dict_ema") for value in state[key].values())
    assert math.isfinite(float(rows(tmp_path / "run")[0]["train_loss"]))


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
    assert not list((tmp_path / "run").glob(".*.tmp"))


def test_file_systems_without_links_get_copies(
    train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("not here")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "rename", refuse)
    assert train("--epochs", "1") == 0
    names = ("last", "model_best", "checkpoint-0")
    assert len({(tmp_path / "run" / f"{name}.pth.tar").read_bytes() for name in names}) == 1


def test_training_without_validation_ranks_by_training_loss(train: Callable[..., int], tmp_path: Path) -> None:
    assert train("--val-split", "", "--epochs", "2") == 0
    losses = [float(row["train_loss"]) for row in rows(tmp_path / "run")]
    assert list(rows(tmp_path / "run")[0]) == ["epoch", "train_loss", "lr"]
    assert load(tmp_path / "run" / "model_best.pth.tar")["metric"] == min(losses)


def test_only_the_best_numbered_checkpoints_are_kept(train: Callable[..., int], tmp_path: Path) -> None:
    assert train("--epochs", "4", "--checkpoint-hist", "2", "--eval-metric", "loss", "--val-interval", "1") == 0
    losses = sorted((float(row["eval_loss"]), int(row["epoch"])) for row in rows(tmp_path / "run"))
    kept = {f"checkpoint-{epoch}.pth.tar" for _, epoch in losses[:2]}
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == kept
    assert load(tmp_path / "run" / "model_best.pth.tar")["metric"] == losses[0][0]


def test_accumulated_steps_equal_a_larger_batch(train: Callable[..., int], tmp_path: Path) -> None:
    same = "--model test_vit --no-aug --opt sgd --lr 0.1 --epochs 1 --smoothing 0".split()
    assert train(*same, "-b", "12", experiment="large") == 0
    assert train(*same, "-b", "6", "--grad-accum-steps", "2", experiment="small") == 0
    large, small = (load(tmp_path / name / "last.pth.tar")["state_dict"] for name in ("large", "small"))
    for name in large:
        torch.testing.assert_close(small[name], large[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        "--amp --amp-dtype bfloat16 --channels-last",
        "--model test_vit --grad-checkpointing --layer-decay 0.7 --clip-grad 0.1 --clip-mode agc",
        "--bce-loss --mixup 0.1 --aug-repeats 2 --sched plateau",
        "--amp --amp-dtype float16 --grad-accum-steps 3",
        "--torchcompile eager --sync-bn --head-init-scale 0.1 --head-init-bias -2",
    ],
)
def test_options_train_and_resume(train: Callable[..., int], tmp_path: Path, options: str) -> None:
    assert train(*options.split(), "--epochs", "1") == 0
    assert train(*options.split(), "--epochs", "2", "--resume", "auto") == 0
    assert [row["epoch"] for row in rows(tmp_path / "run")] == ["0", "1"]
    assert all(math.isfinite(float(row["eval_loss"])) for row in rows(tmp_path / "run"))


def test_short_runs_are_told_about_the_average(train: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--epochs", "1", "--model-ema") == 0
    assert "add --model-ema-warmup" in capsys.readouterr().err


def test_soft_trains_and_validates_at_another_size(
    train: Callable[..., int], validate: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    assert train("--model", "soft_tiny", "--input-size", "3", "32", "64", "-b", "8", "--epochs", "1") == 0
    path = str(tmp_path / "run" / "model_best.pth.tar")
    result = validate("--checkpoint", path)
    assert result["loss"] == pytest.approx(float(rows(tmp_path / "run")[0]["eval_loss"]), abs=1e-5)
    assert validate("--checkpoint", path, "--img-size", "64")["img_size"] == 64


def test_batch_norm_on_one_value_is_explained(train: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--model", "soft_tiny", "-b", "1", "--epochs", "1") == 2
    assert "batch norm needs a larger --batch-size or --img-size to train" in capsys.readouterr().err


def test_two_processes_count_every_image_once(
    trained: Path, data: Path, command: list[str], tmp_path: Path, validate: Callable[..., dict[str, Any]]
) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    options = ["--epochs", "1", "-b", "4", "--model-ema", "--model-ema-warmup"]
    done = subprocess.run(
        [*launch, "--standalone", *command[1:], *options], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    row = rows(tmp_path / "run")[0]
    for column, flag in (("eval", "--use-ema"), ("eval_raw", "--no-use-ema")):
        alone = validate("--checkpoint", str(tmp_path / "run" / "last.pth.tar"), flag)
        assert alone["samples"] == 9
        assert alone["top1"] == pytest.approx(float(row[f"{column}_top1"]))
        assert alone["loss"] == pytest.approx(float(row[f"{column}_loss"]), abs=1e-5)


def test_recovery_needs_the_same_steps(
    train: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train("--epochs", "1") == 143
    assert train("--epochs", "1", "--resume", "auto", "-b", "8") == 2
    assert "lies within an epoch of 4 steps, an epoch is now 3" in capsys.readouterr().err


def test_broken_images_do_not_stop_a_run(
    tmp_path: Path, validate: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_folder(tmp_path / "data")
    for split in ("train", "val"):
        path = data / split / "b" / "1.png"
        path.write_bytes(path.read_bytes()[:200])
    argv = [str(data), *BASE, "--mixup", "0.2", "--epochs", "2", "--output", str(tmp_path), "--experiment", "run"]
    assert train_main(argv) == 0
    error = capsys.readouterr().err
    for split in ("train", "val"):
        assert error.count(f"skipped unreadable image {data / split / 'b' / '1.png'}") == 1
        assert f"1 unreadable images of {data / split} were skipped" in error
    result = validate("--data-dir", str(data), "--checkpoint", str(tmp_path / "run" / "last.pth.tar"))
    assert (result["samples"], result["skipped"]) == (8, 1)
    assert result["loss"] == pytest.approx(float(rows(tmp_path / "run")[1]["eval_loss"]), abs=1e-5)


def test_odd_images_are_trained_on_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_folder(tmp_path / "data")
    for split in ("train", "val"):
        write_odd_images(data / split / "a", data / split / "b" / "0.png")
    argv = [str(data), *BASE, "--epochs", "1", "-b", "5", "--output", str(tmp_path), "--experiment", "run"]
    assert train_main(argv) == 0
    error = capsys.readouterr().err
    for split in ("train", "val"):
        assert f"{len(BROKEN)} unreadable images of {data / split} were skipped" in error
        for name in BROKEN:
            assert error.count(f"skipped unreadable image {data / split / 'a' / name} (") == 1
        assert f"1 images of {data / split} are shown by viewers in another orientation" in error
    assert math.isfinite(float(rows(tmp_path / "run")[0]["train_loss"]))


def test_image_that_vanishes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_folder(tmp_path / "data")
    gone = data / "train" / "b" / "1.png"
    argv = [str(data), *BASE, "--epochs", "2", "--output", str(tmp_path), "--experiment", "run"]
    with monkeypatch.context() as patch:
        stop_at(patch, 3, gone.unlink)
        assert train_main(argv) == 0
    assert f"skipped unreadable image {gone} (FileNotFoundError" in capsys.readouterr().err


def test_split_of_which_nothing_can_be_read_gives_no_number(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in CLASSES:
        (tmp_path / "val" / name).mkdir(parents=True)
        (tmp_path / "val" / name / "0.png").write_bytes(b"")
    assert validate_main([str(tmp_path), "-j", "0", "--checkpoint", str(trained / "last.pth.tar")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"none of the 3 images of {tmp_path / 'val'} can be read" in captured.err


def test_processes_stop_together_at_a_batch_without_images(tmp_path: Path, command: list[str]) -> None:
    data = write_folder(tmp_path / "data")
    for path in (data / "train").rglob("*.png"):
        path.write_bytes(b"")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    argv = [*launch, *command[1:], "--data-dir", str(data), "--epochs", "1", "-b", "4"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "train.py: stopped: no image of a batch can be read, and the other processes wait for it: " in done.stderr
    assert "RunStopped" not in done.stderr


@pytest.mark.parametrize("suffix", ["json", "csv"])
def test_result_is_written_to_a_file(
    trained: Path, validate: Callable[..., dict[str, Any]], tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / "new" / f"result.{suffix}"
    result = validate("--checkpoint", str(trained / "last.pth.tar"), "--results-file", str(path), "--no-ema")
    if suffix == "json":
        assert json.loads(path.read_text(encoding="utf-8")) == result
    else:
        (row,) = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
        assert (float(row["top1"]), row["weights"]) == (result["top1"], "raw")


def test_second_signal_stops_at_once(tmp_path: Path) -> None:
    code = (
        "import os, signal; from soft_models.training.runtime import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT); assert stop.number == signal.SIGINT\n"
        "    os.kill(os.getpid(), signal.SIGTERM); print('still here')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (143, b"")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("workers", "processes"), [(0, 1), (2, 1), (0, 2)])
def test_run_killed_fifty_times_resumes_exactly(
    data: Path, tmp_path: Path, command: list[str], workers: int, processes: int
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
            inside += any(folder.glob(".*.tmp"))
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
    while time.monotonic() < deadline and not (until_save and any(folder.glob(".*.tmp"))):
        time.sleep(0.0005)
