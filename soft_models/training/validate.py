"""Validate an image classifier: ``soft-validate``, or ``validate.py`` in the repository.

    validate.py --data-dir /data/pets --checkpoint output/train/pets/model_best.pth.tar
    validate.py --data-dir /data/pets --split test --checkpoint ...
    validate.py --data-dir /data/imagenet --model resnet18          published weights

Model, classes and preprocessing come from the checkpoint unless options say otherwise. The result is one JSON line on
stdout; the log goes to stderr.
"""

import csv
import io
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from soft_models.checkpoints import read_checkpoint

from .augment import BatchTransform
from .checkpoints import (
    check_architecture,
    choose_weights,
    load_exactly,
    stored_extras,
    stored_options,
)
from .cli import parse_config
from .config import ValidateConfig
from .data import BrokenImages, ImageSamples, build_loader, eval_transform, image_mode
from .engine import EvalResult, evaluate
from .errors import UsageError
from .files import write_atomic
from .models import (
    check_input,
    check_model_name,
    create_model,
    input_config,
    model_arguments,
    rebuild_arguments,
    spatial_size,
)
from .runtime import Runtime, build_autocast, running
from .sampling import EvalBatches
from .script import run_script
from .sources import Split, open_eval_split

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stored:
    """What a checkpoint says about its model; all of it empty without one."""

    weights: Mapping[str, Any] | None = None
    key: str = ""
    arguments: Mapping[str, Any] | None = None
    classes: list[str] | None = None
    data_config: Mapping[str, Any] | None = None
    input_img_mode: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Validate as the command line says; returns the exit code."""
    return run_script("validate.py", lambda: run(parse_config(ValidateConfig, argv, __doc__ or "")))


def run(cfg: ValidateConfig) -> int:
    """Validate as configured and print the result."""
    with running(cfg) as runtime:
        result = validate(cfg, runtime)
        if runtime.is_primary:
            sys.stdout.write(json.dumps(result) + "\n")
            if cfg.results_file:
                write_result(Path(cfg.results_file), result)
    return 0


def validate(cfg: ValidateConfig, runtime: Runtime) -> dict[str, Any]:
    """Validate as configured.

    Returns:
        Model, weights used, loss, accuracies and errors in percent, counts, parameters in millions, and preprocessing.

    Raises:
        UsageError: Something in the configuration, the data or the checkpoint is wrong.
    """
    cfg, stored = read_stored(cfg)
    check_model_name(cfg.model)
    split = open_eval_split(cfg, stored.classes)
    model = build_model(cfg, stored)
    check_classes(model, split)
    data_config = input_config(
        cfg, model, stored.data_config, use_test_size=not stored.weights and not cfg.use_train_size
    )
    check_input(model, data_config["input_size"])
    model = prepare(cfg, model, runtime)
    broken = BrokenImages()
    mode = image_mode(data_config["input_size"][0], cfg.input_img_mode or stored.input_img_mode)
    samples = ImageSamples(split.source, eval_transform(data_config), mode)
    batches = EvalBatches(len(samples), cfg.batch_size, runtime.rank, runtime.world_size)
    result = evaluate(
        model, build_loader(samples, batches, cfg, runtime.device),
        BatchTransform(runtime.device, data_config, channels_last=cfg.channels_last), runtime,
        build_autocast(cfg, runtime.device), broken, split.name, cfg.log_interval,
    )  # fmt: skip
    broken.report(split.name)
    return summary(cfg, stored, model, result, data_config)


def read_stored(cfg: ValidateConfig) -> tuple[ValidateConfig, Stored]:
    """Read the checkpoint, if one is given, and complete the config with the model that it names."""
    if not cfg.checkpoint:
        if not cfg.model:
            raise UsageError("nothing to validate: give --checkpoint, or --model for published weights")
        return cfg, Stored()
    checkpoint = read_checkpoint(cfg.checkpoint)
    options, extras = stored_options(checkpoint), stored_extras(checkpoint)
    if isinstance(options.get("input_size"), int):  # as DeiT's and PVT's training code stores it
        options["img_size"] = options.pop("input_size")
    name = cfg.model or options.get("model") or checkpoint.get("arch")
    if not name:
        raise UsageError(f"{cfg.checkpoint} does not name its model: give --model")
    check_architecture(checkpoint, name, cfg.checkpoint)
    key, weights = choose_weights(checkpoint, cfg.use_ema, cfg.checkpoint)
    stored = Stored(
        weights, key, rebuild_arguments(checkpoint, options), extras.get("classes"),
        extras.get("data_config") or {key: options[key] for key in _INPUT_OPTIONS if options.get(key)},
        extras.get("input_img_mode"),
    )  # fmt: skip
    return replace(cfg, model=name), stored


_INPUT_OPTIONS = ("img_size", "input_size", "crop_pct", "crop_mode", "mean", "std", "interpolation")


def build_model(cfg: ValidateConfig, stored: Stored) -> Any:
    """The model with its weights, for the size asked for.

    Raises:
        UsageError: The weights do not fit the model.
    """
    if stored.weights is None:
        return create_model(cfg.model, model_arguments(cfg, cfg.num_classes), pretrained=True)
    own = replace(cfg, img_size=None, input_size=None)
    arguments = {**(stored.arguments or {}), **model_arguments(own, cfg.num_classes)}
    model = create_model(cfg.model, arguments)
    load_exactly(model, stored.weights, cfg.checkpoint, advice="--num-classes or --in-chans are not the checkpoint's")
    _logger.info("%s: weights %s of %s", cfg.model, stored.key or "of the file", cfg.checkpoint)
    size, known = spatial_size(cfg), getattr(model, "pretrained_cfg", {})
    if size and known.get("fixed_input_size") and hasattr(model, "set_input_size"):
        model.set_input_size(size)
    return model


def prepare(cfg: ValidateConfig, model: nn.Module, runtime: Runtime) -> nn.Module:
    """The model on the device, in the layout asked for, compiled where asked for."""
    model.to(runtime.device)
    if cfg.channels_last:
        model.to(memory_format=torch.channels_last)
    if cfg.torchcompile:
        model.compile(backend=cfg.torchcompile, mode=cfg.torchcompile_mode)
    return model


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
    _logger.warning("%s: folders in alphabetical order are taken for its first classes", count)


def summary(
    cfg: ValidateConfig, stored: Stored, model: nn.Module, result: EvalResult, data_config: Mapping[str, Any]
) -> dict[str, Any]:
    """The result as it is printed, with timm's names."""
    weights = stored.key or ("file" if stored.weights is not None else "pretrained")
    return {
        "model": cfg.model,
        "weights": {"state_dict_ema": "ema", "model_ema": "ema", "state_dict": "raw", "model": "raw"}.get(
            weights, weights
        ),
        "loss": result.loss,
        "top1": result.top1,
        "top1_err": 100 - result.top1,
        "top5": result.top5,
        "top5_err": 100 - result.top5,
        "samples": result.samples,
        "skipped": result.skipped,
        "param_count": round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2),
        "img_size": data_config["input_size"][-1],
        "crop_pct": data_config["crop_pct"],
        "interpolation": data_config["interpolation"],
    }


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write the result as JSON, or as CSV for any other suffix than .json."""
    text = io.StringIO(newline="")
    if path.suffix == ".json":
        text.write(json.dumps(result, indent=2) + "\n")
    else:
        table = csv.DictWriter(text, list(result), lineterminator="\n")
        table.writeheader()
        table.writerow(dict(result))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda file: file.write(text.getvalue().encode()))


if __name__ == "__main__":
    sys.exit(main())
