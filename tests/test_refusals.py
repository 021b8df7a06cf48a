"""Mistakes, refused in one line before work starts; and numbers that are none, before harm is done."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import BASE, load
from tiny_data import write_folder

from soft_models.training.train import main as train_main
from soft_models.training.validate import main as validate_main

REFUSALS = {
    "model": (["--model", "sofft_tiny"], "unknown model 'sofft_tiny'; did you mean 'soft_tiny'"),
    "tag": (
        ["--model", "resnet18.a1_in1kk"],
        "unknown tag of weights in 'resnet18.a1_in1kk'; did you mean 'resnet18.a1_in1k'",
    ),
    "optimizer": (["--opt", "adamv"], "unknown --opt 'adamv'; did you mean 'adam"),
    "schedule": (["--sched", "cosin"], "got 'cosin'; did you mean 'cosine'"),
    "metric": (["--eval-metric", "top_1"], "got 'top_1'; did you mean 'top1'"),
    "validation batch": (["-vb", "0"], "--validation-batch-size must be at least 1, got 0"),
    "log": (["--log-interval", "0"], "--log-interval must be at least 1, got 0"),
    "dataset": (["--dataset", "cifar10"], "--dataset must start with torch/ or hfds/, got"),
    "split": (
        ["--dataset", "torch/mnist", "--train-split", "trian"],
        "--train-split of torch/mnist must be one of train, training, validation, val,",
    ),
    "no split": (
        ["--dataset", "torch/image_folder", "--val-split", "holdout"],
        "no folder 'holdout' in",
    ),
    "same split": (
        ["--dataset", "torch/image_folder", "--val-split", "training"],
        "--val-split 'training' is the training split; validation needs other images",
    ),
    "stream": (["--dataset", "wds/shards"], "dataset 'wds/shards' is a stream, which cannot be resumed exactly"),
    "flag": (["--epoch", "3"], "unknown flag --epoch; did you mean '--epochs'"),
    "workers": (["-j", "-1"], "--workers must be at least 0, got -1"),
    "batch": (["-b", "64"], "--batch-size 64 is larger than the dataset"),
    "classes": (["--num-classes", "2"], "--num-classes 2 is too small: the data have 3 classes"),
    "folder": (["--data-dir", "/nowhere"], "data folder '/nowhere' does not exist"),
    "folder of a split": (["--val-split", "holdout"], "no folder 'holdout' in"),
    "resume": (["--resume", "none.pth"], "no checkpoint file 'none.pth'"),
    "decay": (["--layer-decay", "0.7", "--sched", "none"], "--layer-decay is applied by the schedule"),
    "epochs": (["--epochs", "0"], "--epochs must be at least 1, got 0"),
    "device": (["--device", "cuda:9x"], "--device must be cpu, cuda, cuda:N or mps, got 'cuda:9x'"),
    "module": (["--device-modules", "no_such_module"], "cannot import 'no_such_module'"),
    "lr": (["--lr", "fast"], "lr must be float, got 'fast'"),
    "rate": (["--lr", "-1"], "--lr must be at least 0, got -1.0"),
    "folder of weights": (["--pretrained-path", "."], "'.' is a folder: name the checkpoint file"),
    "weights": (
        ["--model", "soft_tiny", "--pretrained"],
        "no weights come with soft_tiny: give a file",
    ),
    "kd": (["--kd-model-name", "x"], "distillation is out of scope"),
    "other device": (["--device", "meta"], "--device must be cpu, cuda, cuda:N or mps, got 'meta'"),
    "clipping": (["--clip-grad", "0"], "--clip-grad must be above 0, or none, got 0.0"),
    "mixing": (["--mixup-off-epoch", "-1"], "--mixup-off-epoch must be at least 0, got -1"),
    "recovery": (["--recovery-interval", "-1"], "--recovery-interval must be at least 0, got -1"),
    "base size": (["--lr-base-size", "0"], "--lr-base-size must be at least 1, got 0"),
    "decay epochs": (["--sched", "step", "--decay-epochs", "0"], "--decay-epochs must be above 0, got 0.0"),
    "smoothing": (["--smoothing", "10"], "--smoothing must be at least 0 and below 1, got 10.0"),
    "jitter": (["--color-jitter", "-0.4"], "--color-jitter must be at least 0, got -0.4"),
    "probability": (["--hflip", "50"], "--hflip must lie in 0 to 1, got 50.0"),
    "crop": (["--scale", "1", "0.08"], "--scale takes the smaller number first, both above 0, got (1.0, 0.08)"),
    "cut": (
        ["--cutmix-minmax", "0.2", "0.2"],
        "takes two fractions, the smaller first, got (0.2, 0.2)",
    ),
    "interpolation": (["--interpolation", "random"], "'hamming', got 'random'"),
    "size": (["--img-size", "0"], "--img-size must be at least 1, got 0"),
    "sides": (["--input-size", "3", "0", "32"], "--input-size takes channels, height and width, got [3, 0, 32]"),
    "channels": (["--in-chans", "0"], "--in-chans must be at least 1, got 0"),
}
AFTER_MODEL = {
    "policy": (["--aa", "rand-m9-mst0.5"], "cannot augment by --aa rand-m9-mst0.5: Unknown RandAugment config section"),
    "betas": (["--opt-betas", "0.9"], "cannot create optimizer adamw with --opt-betas [0.9]: "),
    "second order": (["--opt", "adahessian"], "--opt adahessian needs second derivatives"),
    "checkpointing": (["--grad-checkpointing", "--model", "dla34"], "dla34 takes no --grad-checkpointing: "),
    "backend": (["--torchcompile", "indctor"], "cannot compile by --torchcompile indctor: Invalid backend"),
    "mode": (["--torchcompile", "--torchcompile-mode", "fast"], "cannot compile by --torchcompile inductor: "),
    "pixels": (["--crop-pct", "87.5"], "--crop-pct is a fraction above 0, 1 for all, got 87.5"),
    "grey": (["--input-img-mode", "L"], "--input-img-mode L has 1 channels and the model takes 3"),
    "colours": (["--in-chans", "1", "--input-img-mode", "RGB"], "RGB has 3 channels and the model takes 1"),
    "no mode": (["--input-img-mode", "XYZ"], "unknown --input-img-mode 'XYZ'; choose one of Pillow's"),
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


@pytest.mark.parametrize("name", AFTER_MODEL)
def test_what_the_model_does_not_take_is_refused_before_a_folder_is_made(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    argv, message = AFTER_MODEL[name]
    assert train(*argv) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "argv",
    [["--pretrained-path", "none.pth"], ["--initial-checkpoint", "none.pth"], ["--resume", "none.pth"], ["--lr", "-1"]],
)
def test_what_needs_no_data_is_refused_before_they_are_read(
    train: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    monkeypatch.setattr("soft_models.training.plan.open_train_splits", lambda cfg: pytest.fail("data were read"))
    assert train(*argv) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_output_that_cannot_be_written_to_is_refused(
    trained: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_main([str(data), *BASE, "--output", "/dev/null", "--experiment", "run"]) == 2
    assert "cannot write to the folder '/dev/null' (File exists); name another" in capsys.readouterr().err
    argv = [str(data), "-j", "0", "--checkpoint", str(trained / "last.pth.tar"), "--results-file", "/dev/null/x.csv"]
    assert validate_main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "cannot write to the folder '/dev/null'" in captured.err


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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-b", "0"], "--batch-size must be at least 1, got 0"),
        (["-j", "-1"], "--workers must be at least 0, got -1"),
        (["--img-size", "0"], "--img-size must be at least 1, got 0"),
        (["--num-classes", "-1"], "--num-classes must be at least 0, got -1"),
        (["--pretrained"], "--pretrained asks for the published weights and --checkpoint for others"),
    ],
)
def test_mistakes_are_refused_in_validation(
    trained: Path, data: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert validate_main([str(data), "--checkpoint", str(trained / "last.pth.tar"), *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_scores_of_tokens_are_refused(train: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--model", "pyramid_tiny_linformer", "--gp", "") == 2
    assert "the model gives scores of shape (1, 2, 3) for an image; pool its tokens" in capsys.readouterr().err
    assert train("--model", "vvt_tiny", "--gp", "") == 2
    assert "global_pool='' gives a map, which takes num_classes=0, got 3" in capsys.readouterr().err


def test_images_too_small_for_the_model_are_refused_before_training(
    train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--model", "soft_tiny", "--img-size", "16") == 2
    assert (
        "the model cannot take images of 3 x 16 x 16 (--img-size, --input-size): images must be at least 32 x 32"
        in capsys.readouterr().err
    )


class Foreign:
    """A class that a checkpoint of others may hold."""


def test_files_that_run_code_are_refused(
    trained: Path,
    data: Path,
    tmp_path: Path,
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


def test_batch_norm_on_one_value_is_explained(train: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--model", "soft_tiny", "-b", "1", "--epochs", "1") == 1
    assert "batch norm needs a larger --batch-size or --img-size to train" in capsys.readouterr().err
