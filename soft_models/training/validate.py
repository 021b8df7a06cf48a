"""Validate an image classifier: ``soft-validate``, or ``validate.py`` in the repository.

    validate.py --data-dir /data/pets --checkpoint output/train/pets/model_best.pth.tar
    validate.py --data-dir /data/pets --split test --checkpoint ...
    validate.py --data-dir /data/imagenet --model resnet18          published weights

Model, classes and preprocessing come from the checkpoint unless options say otherwise. The result is one JSON line on
stdout; the log goes to stderr.
"""

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from soft_models.checkpoints.files import EMA_KEYS, RAW_KEYS
from soft_models.commands.cli import parse_config
from soft_models.commands.files import make_folder, write_results
from soft_models.commands.script import run_script
from soft_models.errors import RunStopped, UsageError

from .augment import BatchTransform
from .config import ValidateConfig, check_least
from .data import ImageReport, ImageSamples, build_loader, eval_transform
from .engine import EvalResult, evaluate
from .runtime import Runtime, build_autocast, running
from .sampling import EvalBatches
from .sources import Split, open_eval_split
from .trained import Stored, load_trained, prepare, read_stored, resolve_input

_logger = logging.getLogger("soft_models.training.validate")  # also when run as __main__


def main(argv: Sequence[str] | None = None) -> int:
    """Validate as the command line says; returns the exit code."""
    return run_script("validate.py", lambda: run(parse_config(ValidateConfig, argv, __doc__ or "")))


def run(cfg: ValidateConfig) -> int:
    """Validate as configured and print the result."""
    with running(cfg) as runtime:
        if cfg.results_file and runtime.is_primary:
            make_folder(Path(cfg.results_file).parent)
        result = validate(cfg, runtime)
        if runtime.is_primary:
            sys.stdout.write(json.dumps(result) + "\n")
            if cfg.results_file:
                write_results(Path(cfg.results_file), result, [result])
    return 0


def validate(cfg: ValidateConfig, runtime: Runtime) -> dict[str, Any]:
    """Validate as configured.

    Returns:
        Model, weights used, loss, accuracies and errors in percent, counts, parameters in millions, and preprocessing.

    Raises:
        UsageError: Something in the configuration, the data or the checkpoint is wrong.
        CheckpointError: The checkpoint cannot be read.
        RunStopped: No image can be read.
    """
    check_least(cfg, 1, "log_interval")
    cfg, stored = read_stored(cfg)
    split = open_eval_split(cfg, stored.classes)
    model = load_trained(cfg, stored)
    check_classes(model, split)
    data_config, mode = resolve_input(cfg, model, stored)
    model = prepare(cfg, model, runtime)
    report = ImageReport(split.source, split.name, getattr(model, "num_classes", None))
    samples = ImageSamples(split.source, eval_transform(data_config), mode)
    batches = EvalBatches(len(samples), cfg.batch_size, runtime.rank, runtime.world_size)
    result = evaluate(
        model, build_loader(samples, batches, cfg, runtime.device),
        BatchTransform(runtime.device, data_config, channels_last=cfg.channels_last), runtime,
        build_autocast(cfg, runtime.device), report, split.name, cfg.log_interval,
    )  # fmt: skip
    report.log(runtime)
    if result.samples == 0:
        raise RunStopped(f"none of the {result.skipped} images of {split.name} can be read")
    return summary(cfg, stored, model, result, data_config)


def check_classes(model: nn.Module, split: Split) -> None:
    """Refuse data whose labels the model cannot give, and point out a model with more classes than the data.

    Raises:
        UsageError: More classes in the data than in the head.
    """
    head = getattr(model, "num_classes", None)
    if head is None or split.classes is None or len(split.classes) == head:
        return
    count = f"{split.name} has {len(split.classes)} classes, the model knows {head}"
    if len(split.classes) > head:
        raise UsageError(f"{count}: they do not belong together")
    _logger.warning("%s: those of the data, in label order, are taken for its first ones", count)


def summary(
    cfg: ValidateConfig, stored: Stored, model: nn.Module, result: EvalResult, data_config: Mapping[str, Any]
) -> dict[str, Any]:
    """The result as it is printed, with timm's names."""
    kind = "pretrained" if stored.weights is None else "file"
    for name, keys in (("raw", RAW_KEYS), ("ema", EMA_KEYS)):  # averaged ones may lie below, under a raw one's key
        if not {*stored.key.split(".")}.isdisjoint(keys):
            kind = name
    return {
        "model": cfg.model,
        "weights": kind,
        "loss": result.loss,
        "top1": result.top1,
        "top1_err": round(100 - result.top1, 10),
        "top5": result.top5,
        "top5_err": round(100 - result.top5, 10),
        "samples": result.samples,
        "skipped": result.skipped,
        "param_count": round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2),
        "img_size": data_config["input_size"][-1],
        "crop_pct": data_config["crop_pct"],
        "interpolation": data_config["interpolation"],
    }


if __name__ == "__main__":
    sys.exit(main())
