"""The scripts as users run them: files, numbers, options, starting points."""

import argparse
import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from runs import BASE, ROOT, assert_same, load, load_config, rows

from soft_models.commands import progress
from soft_models.training import learner, models, run
from soft_models.training.engine import EvalResult


def test_reader_that_has_enough_ends_a_command_without_a_word(tmp_path: Path) -> None:
    code = (
        "import sys; from soft_models.commands.script import run_script\n"
        "work = lambda: sum(sys.stdout.write('line\\n') for _ in range(100_000))\n"
        "sys.exit(run_script('work', work))"
    )
    line = f'{sys.executable} -c "$CODE" | head -1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, "CODE": code},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (141, "line\n", "")


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


@pytest.mark.parametrize(("wrap", "kind"), [
    (lambda weights: {"model_ema": {"state_dict": weights}}, "ema"),
    (lambda weights: {"state_dict": {"model": weights}}, "raw"),
    (lambda weights: weights, "file"),
], ids=["ema", "raw", "file"])  # fmt: skip
def test_weights_are_named_however_wrapped(
    trained: Path, validate: Callable[..., dict[str, Any]], tmp_path: Path, wrap: Callable[[Any], Any], kind: str
) -> None:
    weights = load(trained / "last.pth.tar")["state_dict"]
    torch.save(wrap(weights), tmp_path / "wrapped.pth")
    options = ["--model", "test_byobnet", "--num-classes", "3", "--img-size", "32"]
    assert validate("--checkpoint", str(tmp_path / "wrapped.pth"), *options)["weights"] == kind


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
    torch.save({"args": ["--lr", "1"], "state_dict": model.state_dict()}, tmp_path / "plain.pth")
    options = ["--model", "test_byobnet", "--num-classes", "3", "--img-size", "32"]
    assert validate("--checkpoint", str(tmp_path / "plain.pth"), *options)["loss"] == pytest.approx(result["loss"])


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


def test_model_that_does_not_tell_its_classes_is_trained(
    train: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(name: str, arguments: object, **more: object) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 3))

    monkeypatch.setattr(models, "create_model", build)
    assert train("--epochs", "1", "--mean", "0.5", "--std", "0.5") == 0


def test_label_that_only_one_process_meets_is_told(command: list[str], tmp_path: Path) -> None:
    """Of a dataset that has the label in its last image alone, which goes to the second process."""
    (tmp_path / "odd.py").write_text(
        "from soft_models.training import sources\n"
        "load = sources.FolderSource.load\n"
        "def odd(self, index, mode):\n"
        "    image, label = load(self, index, mode)\n"
        "    return image, 3 if index == len(self) - 1 and 'val' in self.name(index) else label\n"
        "sources.FolderSource.load = odd\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    argv = [*launch, *command[1:], "--device-modules", "odd", "--epochs", "1", "-b", "4", "-vb", "4"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode != 0
    assert "has label 3, and the model 3 classes, from 0 on" in done.stderr


def test_head_is_said_to_be_larger_than_the_data(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--num-classes", "5", "--epochs", "1") == 0
    assert "--num-classes 5 is more than the data have: 3" in capsys.readouterr().err
    assert load(tmp_path / "run" / "last.pth.tar")["state_dict"]["head.fc.weight"].shape[0] == 5


def test_pretrained_path_adapts_the_head(
    trained: Path, train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, path = load(trained / "model_best.pth.tar"), str(tmp_path / "source.pth.tar")
    source["soft_models"]["data_config"]["mean"] = [0.1, 0.2, 0.3]
    torch.save(source, path)
    assert train("--pretrained-path", path, "--num-classes", "5", "--in-chans", "1", "--lr", "0", "--epochs", "1") == 0
    assert "new: head.fc.bias, head.fc.weight" in capsys.readouterr().err
    found = load(tmp_path / "run" / "last.pth.tar")
    assert found["soft_models"]["data_config"]["mean"] == pytest.approx([0.2]), "the source's, as its weights expect"
    ours, theirs = found["state_dict"], source["state_dict_ema"]
    name = "stages.1.0.conv1_1x1.conv.weight"
    assert torch.equal(ours[name], theirs[name])


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


def test_rate_in_the_log_is_the_one_asked_for(train: Callable[..., int], tmp_path: Path) -> None:
    assert train("--layer-decay", "0.5", "--sched", "constant", "--epochs", "1", "--lr", "0.01") == 0
    assert [float(row["lr"]) for row in rows(tmp_path / "run")] == [0.01]


def test_few_updates_and_epochs_beyond_those_asked_for_are_told(
    train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--epochs", "1", "--cooldown-epochs", "2") == 0
    error = capsys.readouterr().err
    assert "3 epochs (--epochs 1, and 2 of cooldown, warm-up prefix or more cycles) of 4 steps" in error
    assert "12 updates in all, in which a model may learn little: raise --epochs or --lr" in error
    assert learner.few_note(500) == ""


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


def test_nonfinite_updates_can_be_left_out(
    train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = learner.Learner.backward

    def poisoned(self: learner.Learner, images: torch.Tensor, *args: Any) -> torch.Tensor:
        poisoned.calls += 1
        return original(self, images * (math.inf if poisoned.calls == 2 else 1), *args)

    poisoned.calls = 0
    monkeypatch.setattr(learner.Learner, "backward", poisoned)
    assert train("--epochs", "1", "--skip-nonfinite", "1", "--model-ema") == 0
    state = load(tmp_path / "run" / "last.pth.tar")
    assert all(value.isfinite().all() for key in ("state_dict", "state_dict_ema") for value in state[key].values())
    assert math.isfinite(float(rows(tmp_path / "run")[0]["train_loss"]))


def test_training_without_validation_ranks_by_training_loss(train: Callable[..., int], tmp_path: Path) -> None:
    assert train("--val-split", "", "--epochs", "2") == 0
    losses = [float(row["train_loss"]) for row in rows(tmp_path / "run")]
    assert list(rows(tmp_path / "run")[0]) == ["epoch", "train_loss", "lr"]
    assert load(tmp_path / "run" / "model_best.pth.tar")["metric"] == min(losses)


def test_only_the_best_numbered_checkpoints_are_kept(train: Callable[..., int], tmp_path: Path) -> None:
    assert train("--epochs", "4", "--checkpoint-hist", "2", "--eval-metric", "loss") == 0
    losses = sorted((float(row["eval_loss"]), int(row["epoch"])) for row in rows(tmp_path / "run"))
    kept = {f"checkpoint-{epoch}.pth.tar" for _, epoch in losses[:2]}
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == kept
    assert load(tmp_path / "run" / "model_best.pth.tar")["metric"] == losses[0][0]


def test_a_run_ends_with_its_best_epoch_as_json(
    train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # a finished run has nothing to do, and says the same
        assert train("--epochs", "1", "--resume", "auto") == 0
        best = json.loads(capsys.readouterr().out)
        assert best["checkpoint"] == str(tmp_path / "run" / "model_best.pth.tar")
        assert (best["best_epoch"], best["metric"]) == (0, float(rows(tmp_path / "run")[0]["eval_top1"]))
    monkeypatch.setattr(run, "evaluate", lambda *_: EvalResult())
    assert train("--epochs", "1", experiment="unranked") == 0
    assert json.loads(capsys.readouterr().out) == {"best_epoch": None, "metric": None, "checkpoint": None}


def test_epochs_between_validations_are_not_ranked(train: Callable[..., int], tmp_path: Path) -> None:
    assert train("--epochs", "3", "--val-interval", "2") == 0
    assert [bool(row["eval_top1"]) for row in rows(tmp_path / "run")] == [False, True, True]


def test_start_epoch_and_fresh_optimizer(train: Callable[..., int], trained: Path, tmp_path: Path) -> None:
    path = str(trained / "last.pth.tar")
    options = ["--epochs", "4", "--start-epoch", "3", "--no-resume-opt", "--mixup", "0.2", "--mixup-off-epoch", "3"]
    assert train("--resume", path, *options) == 0
    assert [row["epoch"] for row in rows(tmp_path / "run")] == ["0", "1", "3"]
    steps = {int(state["step"]) for state in load(tmp_path / "run" / "last.pth.tar")["optimizer"]["state"].values()}
    assert steps == {4}, "the optimizer must have begun anew"


def test_what_is_odd_about_the_epochs_is_said(train: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--epochs", "1", "--warmup-epochs", "1") == 0
    error = capsys.readouterr().err
    assert "--warmup-epochs 1 fills all 1 epochs: the learning rate only rises" in error
    assert "--num-classes not given: 3, as in the data: a, b, c" in error
    assert train("--epochs", "2", "--lr", "2e-3", "--resume", "auto") == 0
    assert "options that change on resume: lr 0.001 to 0.002, epochs 1 to 2" in capsys.readouterr().err
    assert train("--epochs", "3", "--lr", "2e-3", "--warmup-epochs", "1", "-j", "1", "--resume", "auto") == 0
    assert "options that change on resume: epochs 2 to 3, warmup_epochs 0 to 1" in capsys.readouterr().err


def test_epochs_trained_again_take_the_place_of_their_rows(train: Callable[..., int], tmp_path: Path) -> None:
    assert train("--epochs", "2") == 0
    assert train("--epochs", "2", "--start-epoch", "1", "--resume", str(tmp_path / "run" / "last.pth.tar")) == 0
    assert [row["epoch"] for row in rows(tmp_path / "run")] == ["0", "1"]


def test_images_per_second_count_every_accumulated_step(
    train: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[int, int]] = []
    original = progress.Progress.show

    def show(self: progress.Progress, step: int, images: int, **values: float) -> None:
        if self.title.startswith("epoch"):
            shown.append((step, images))
        original(self, step, images, **values)

    monkeypatch.setattr(progress.Progress, "show", show)
    assert train("--epochs", "1", "-b", "4", "--grad-accum-steps", "4") == 0
    assert shown == [(4, 16), (6, 8)]


def test_a_log_of_slow_steps_is_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "soft_models")
    bar = progress.Progress("epoch 0", 12, interval=50, enabled=True)
    bar.show(1, 4)
    assert not caplog.records
    bar.shown -= progress.PATIENCE
    for step in (2, 3):
        bar.show(step, 4)
    assert [record.getMessage()[:13] for record in caplog.records] == ["epoch 0: 2/12"]


def test_a_log_has_a_line_for_each_interval_passed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "soft_models")
    bar = progress.Progress("epoch 0", 12, interval=5, enabled=True)
    for step in range(3, 13, 3):  # as with three accumulated steps
        bar.show(step, 8)
    assert [record.getMessage().split(", ")[0] for record in caplog.records] == ["epoch 0: 6/12", "epoch 0: 12/12"]


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


def test_two_processes_count_every_image_once(
    command: list[str], tmp_path: Path, validate: Callable[..., dict[str, Any]]
) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    options = ["--epochs", "1", "-b", "4", "--model-ema", "--model-ema-warmup"]
    done = subprocess.run([*launch, *command[1:], *options], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    row = rows(tmp_path / "run")[0]
    for column, flag in (("eval", "--use-ema"), ("eval_raw", "--no-use-ema")):
        alone = validate("--checkpoint", str(tmp_path / "run" / "last.pth.tar"), flag)
        assert alone["samples"] == 9
        assert alone["top1"] == pytest.approx(float(row[f"{column}_top1"]))
        assert alone["loss"] == pytest.approx(float(row[f"{column}_loss"]), abs=1e-5)


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
