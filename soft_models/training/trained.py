"""A trained model as its checkpoint, or its published weights, describe it: architecture, classes, preprocessing."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from soft_models.checkpoints import read_checkpoint
from soft_models.checkpoints.extras import PREPROCESSING, constructor_arguments, stored_extras, stored_options
from soft_models.errors import UsageError

from .config import TrainedConfig, check_least
from .data import image_mode
from .models import (
    asked_channels,
    check_input,
    check_model_name,
    create_model,
    input_config,
    model_arguments,
    spatial_size,
)
from .runtime import Runtime, compile_model
from .weights import check_architecture, choose_weights, load_exactly

_logger = logging.getLogger(__name__)
TrainedT = TypeVar("TrainedT", bound=TrainedConfig)


@dataclass(frozen=True)
class Stored:
    """What a checkpoint says about its model; all of it empty without one."""

    weights: Mapping[str, Any] | None = None
    key: str = ""
    arguments: Mapping[str, Any] | None = None
    classes: list[str] | None = None
    data_config: Mapping[str, Any] | None = None
    input_img_mode: str | None = None


@dataclass(frozen=True)
class Loaded:
    """A model by name, and the images and classes that it is for."""

    name: str
    model: Any
    classes: list[str] | None
    data_config: dict[str, Any]
    image_mode: str


def read_stored(cfg: TrainedT) -> tuple[TrainedT, Stored]:
    """Read the checkpoint, if one is given, and complete the config with the model that it names.

    Raises:
        UsageError: Neither checkpoint nor model is given, the checkpoint cannot be used, or timm knows no such model.
        CheckpointError: The checkpoint cannot be read.
    """
    check_least(cfg, 1, "batch_size")
    check_least(cfg, 0, "workers")
    if cfg.checkpoint and cfg.pretrained:
        raise UsageError("--pretrained asks for the published weights and --checkpoint for others: give one of them")
    if not cfg.checkpoint:
        if not cfg.model:
            raise UsageError("no model: give --checkpoint, or --model for published weights")
        check_model_name(cfg.model)
        return cfg, Stored()
    checkpoint = read_checkpoint(cfg.checkpoint)
    options, extras = stored_options(checkpoint), stored_extras(checkpoint)
    if isinstance(options.get("input_size"), int):  # as DeiT's and PVT's training code stores it
        options["img_size"] = options.pop("input_size")
    name = cfg.model or options.get("model") or checkpoint.get("arch")
    if not name:
        raise UsageError(f"{cfg.checkpoint} does not name its model: give --model")
    check_architecture(checkpoint, name, cfg.checkpoint)
    check_model_name(name)
    key, weights = choose_weights(checkpoint, cfg.use_ema, cfg.checkpoint)
    stored = Stored(
        weights, key, constructor_arguments(checkpoint, name), extras.get("classes"),
        extras.get("data_config") or {key: options[key] for key in ("img_size", *PREPROCESSING) if options.get(key)},
        extras.get("input_img_mode"),
    )  # fmt: skip
    return replace(cfg, model=name), stored


def load_trained(cfg: TrainedConfig, stored: Stored) -> Any:
    """The model with its weights, for the size asked for.

    Raises:
        UsageError: The weights do not fit the model.
    """
    if stored.weights is None:
        return create_model(cfg.model, model_arguments(cfg), pretrained=True)
    own = replace(cfg, img_size=None, input_size=None, in_chans=asked_channels(cfg))
    arguments = {**(stored.arguments or {}), **model_arguments(own)}
    model = create_model(cfg.model, arguments)
    load_exactly(model, stored.weights, cfg.checkpoint, advice="are --num-classes and --model-kwargs the checkpoint's?")
    _logger.info("%s: weights %s of %s", cfg.model, stored.key or "of the file", cfg.checkpoint)
    size, known = spatial_size(cfg), getattr(model, "pretrained_cfg", {})
    if size and known.get("fixed_input_size") and hasattr(model, "set_input_size"):
        model.set_input_size(size)
    return model


def load_or_random(cfg: TrainedConfig) -> Loaded:
    """The model of a checkpoint, or one with random weights where none is given, for what needs no trained one.

    Raises:
        UsageError: As in :func:`read_stored` and :func:`resolve_input`.
    """
    stored = Stored()
    if cfg.checkpoint:
        cfg, stored = read_stored(cfg)
        model = load_trained(cfg, stored)
    else:
        if not cfg.model:
            raise UsageError("no model: name one, or give --checkpoint")
        check_model_name(cfg.model)
        _logger.warning("%s: random weights, since there is no --checkpoint", cfg.model)
        torch.manual_seed(0)
        model = create_model(cfg.model, model_arguments(cfg))
    return Loaded(cfg.model, model, stored.classes, *resolve_input(cfg, model, stored))


def resolve_input(cfg: TrainedConfig, model: nn.Module, stored: Stored) -> tuple[dict[str, Any], str]:
    """Preprocessing and PIL mode of the model's images.

    Raises:
        UsageError: The model cannot take such images.
    """
    published = stored.weights is None and not cfg.use_train_size
    data_config = input_config(cfg, model, stored.data_config, use_test_size=published)
    check_input(model, data_config["input_size"])
    return data_config, image_mode(data_config["input_size"][0], cfg.input_img_mode or stored.input_img_mode)


def prepare(cfg: TrainedConfig, model: nn.Module, runtime: Runtime) -> nn.Module:
    """The model on the device, in the layout asked for, compiled where asked for."""
    model.to(runtime.device)
    if cfg.channels_last:
        model.to(memory_format=torch.channels_last)
    compile_model(cfg, model, runtime.device)
    return model
