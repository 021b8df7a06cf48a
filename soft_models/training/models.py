"""Creating the model that a config names, with the weights that it names."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import timm
import torch
from timm.data import resolve_data_config
from timm.models import get_pretrained_cfg
from torch import nn

from soft_models.checkpoints import read_checkpoint
from soft_models.checkpoints.convert import head_names
from soft_models.checkpoints.extras import constructor_arguments, pretrained_settings
from soft_models.errors import UsageError, some_of
from soft_models.registry import is_ours, require_model

from .config import ModelConfig, TrainConfig, check_least
from .weights import check_architecture, choose_weights, load_exactly

_logger = logging.getLogger(__name__)


def check_model_name(name: str) -> None:
    """Refuse a model that timm does not know.

    Raises:
        UsageError: It does not.
    """
    if not name.startswith(("hf-hub:", "hf_hub:", "local-dir:")):
        require_model(name)


def spatial_size(cfg: ModelConfig) -> tuple[int, int] | None:
    """Height and width asked for, if any.

    Raises:
        UsageError: ``input_size`` is not channels, height and width, or a side is below 1.
    """
    check_least(cfg, 1, "img_size")
    if cfg.input_size is not None:
        if len(cfg.input_size) != 3 or min(cfg.input_size) < 1:
            raise UsageError(f"--input-size takes channels, height and width, got {list(cfg.input_size)}")
        return cfg.input_size[1], cfg.input_size[2]
    return (cfg.img_size, cfg.img_size) if cfg.img_size is not None else None


def asked_channels(cfg: ModelConfig) -> int | None:
    """Image channels asked for, if any."""
    return cfg.input_size[0] if cfg.input_size else cfg.in_chans


def model_arguments(cfg: ModelConfig) -> dict[str, Any]:
    """What ``timm.create_model`` takes to build the architecture; enough to build it again from a checkpoint.

    Raises:
        UsageError: A number of pixels, channels or classes that no model has.
    """
    check_least(cfg, 1, "in_chans")
    check_least(cfg, 0, "num_classes")
    arguments = {
        "num_classes": cfg.num_classes,
        "in_chans": asked_channels(cfg),
        "global_pool": cfg.gp,
        **cfg.model_kwargs,
    }
    size, known = spatial_size(cfg), get_pretrained_cfg(cfg.model, allow_unregistered=True)
    if size and "img_size" not in cfg.model_kwargs and known is not None and known.fixed_input_size:
        arguments["img_size"] = size
    return {name: value for name, value in arguments.items() if value is not None}


def create_model(name: str, arguments: Mapping[str, Any], **more: Any) -> Any:
    """``timm.create_model`` with its complaints as one line.

    Raises:
        UsageError: The model does not take the arguments, or has no published weights.
    """
    if more.get("pretrained") and is_ours(name) and "pretrained_cfg_overlay" not in more:
        raise UsageError(
            f"no weights come with {name}: give a file, by --pretrained-path to train, else by --checkpoint"
        )
    try:
        return timm.create_model(name, **arguments, **more)
    except (TypeError, ValueError, RuntimeError, AssertionError, ArithmeticError, OSError) as error:
        reason = " ".join(str(error).split()) or f"timm's {type(error).__name__}, without a word"
        raise UsageError(f"cannot create {name}: {reason}") from error


def starting_arguments(cfg: TrainConfig, source: Mapping[str, Any] | None) -> dict[str, Any]:
    """Constructor arguments: those given, then those of the checkpoint that training goes on or starts from.

    Args:
        cfg: Options; of a file to fine-tune, whose images may be others, the channels are not taken.
        source: Content of a checkpoint of exactly this model.
    """
    given = model_arguments(cfg)
    if source is None and cfg.pretrained_path:
        source, known = read_checkpoint(cfg.pretrained_path), get_pretrained_cfg(cfg.model, allow_unregistered=True)
        given = {"in_chans": known.input_size[0] if known else 3, **given}
    inherited = constructor_arguments(source, cfg.model) if source is not None else {}
    taken = [f"{name} {value}" for name, value in inherited.items() if name not in given]
    if taken:
        _logger.info("model arguments as in the checkpoint, since not given: %s", ", ".join(taken))
    return {**inherited, **given}


def build_train_model(cfg: TrainConfig, arguments: Mapping[str, Any]) -> Any:
    """The model to train, with the weights that it starts from.

    Raises:
        UsageError: The model or its weights are not as asked for.
    """
    rates = {"drop_rate": cfg.drop, "drop_path_rate": cfg.drop_path, "drop_block_rate": cfg.drop_block}
    model: Any
    if cfg.pretrained_path:
        model = _adapt_weights(cfg, arguments, rates)
    else:
        model = create_model(cfg.model, arguments, pretrained=cfg.pretrained, **rates)
    if cfg.initial_checkpoint:
        _load_initial(cfg, model)
    _scale_head(cfg, model)
    if cfg.grad_checkpointing:
        try:
            model.set_grad_checkpointing(enable=True)
        except (AssertionError, AttributeError) as error:
            raise UsageError(f"{cfg.model} takes no --grad-checkpointing: {error}") from None
    return model


def _load_initial(cfg: TrainConfig, model: nn.Module) -> None:
    path = cfg.initial_checkpoint
    checkpoint = read_checkpoint(path)
    check_architecture(checkpoint, cfg.model, path)
    key, weights = choose_weights(checkpoint, None, path)
    load_exactly(model, weights, path, advice="--pretrained-path adapts head and input channels")
    _logger.info("loaded all %d tensors of %s from %s", len(weights), key or "the weights", path)


def _adapt_weights(cfg: TrainConfig, arguments: Mapping[str, Any], rates: Mapping[str, Any]) -> nn.Module:
    """Load through timm's pretrained path, which renames, resizes, and adapts the input channels; all or nothing.

    A head of other classes stays new. timm would then load whatever fits, so here it is given a head of the right
    classes, the new model's own, and loads strictly. Preprocessing that our training stored in the file comes along.
    """
    path = cfg.pretrained_path
    if is_ours(cfg.model):
        overlay: dict[str, Any] = {"file": path}  # ours see to architecture, head and completeness themselves
    else:
        checkpoint = read_checkpoint(path)
        check_architecture(checkpoint, cfg.model, path)
        model = create_model(cfg.model, arguments, **rates)
        key, weights = choose_weights(checkpoint, None, path)
        own, new = model.state_dict(), []
        for name in sorted(head_names(model)):
            if name in own and (name not in weights or weights[name].shape != own[name].shape):
                weights[name] = own[name]
                new.append(name)
        _logger.info("loading %s of %s; new: %s", key or "the weights", path, some_of(new) or "nothing")
        overlay = {**pretrained_settings(checkpoint), "state_dict": weights}
        overlay |= {"num_classes": model.num_classes, "custom_load": False, "label_names": None}
    model = create_model(cfg.model, arguments, pretrained=True, pretrained_cfg_overlay=overlay, **rates)
    model.pretrained_cfg.pop("state_dict", None)  # or every copy of the model would carry the weights along
    return model


def _scale_head(cfg: TrainConfig, model: Any) -> None:
    head = model.get_classifier() if hasattr(model, "get_classifier") else None
    if not isinstance(head, nn.Linear | nn.Conv2d):
        return
    with torch.no_grad():
        if cfg.head_init_scale is not None:
            head.weight.mul_(cfg.head_init_scale)
            if head.bias is not None:
                head.bias.mul_(cfg.head_init_scale)
        if cfg.head_init_bias is not None and head.bias is not None:
            head.bias.fill_(cfg.head_init_bias)


def input_config(
    cfg: ModelConfig, model: nn.Module, stored: Mapping[str, Any] | None, use_test_size: bool = False
) -> dict[str, Any]:
    """Size, crop and normalisation of the model's images: options given, else those stored, else the model's own.

    Raises:
        UsageError: A mean or deviation for another number of channels, or a crop of more than the image.
    """
    given: dict[str, Any] = {**(stored or {})}
    options = {name: getattr(cfg, name) for name in ("crop_pct", "crop_mode", "mean", "std", "interpolation")}
    given.update({name: value for name, value in options.items() if value})
    in_chans = model_channels(model, cfg)
    if cfg.crop_pct is not None and not 0 < cfg.crop_pct <= 1:
        raise UsageError(f"--crop-pct is a fraction above 0, 1 for all, got {cfg.crop_pct}")
    size = spatial_size(cfg)
    if size:
        given["input_size"] = (in_chans, *size)
    for name in ("mean", "std"):
        if given.get(name) and len(given[name]) not in (1, in_chans):
            raise UsageError(f"--{name} takes one value or one per image channel ({in_chans}), got {list(given[name])}")
    own = dict(getattr(model, "pretrained_cfg", {}))
    resolved = resolve_data_config({**given, "in_chans": in_chans}, pretrained_cfg=own, use_test_size=use_test_size)
    resolved["input_size"] = (in_chans, *resolved["input_size"][1:])
    for name in ("mean", "std"):
        values = resolved[name]
        resolved[name] = tuple(values) if len(values) == in_chans else (sum(values) / len(values),) * in_chans
    return resolved


@torch.no_grad()
def check_input(model: nn.Module, input_size: Sequence[int], flags: str = "--img-size, --input-size") -> None:
    """Try the model on one black image, so that a size it cannot take is refused before work starts.

    Args:
        model: The model.
        input_size: Channels, height and width.
        flags: What sets the size, for the message.

    Raises:
        UsageError: It cannot take such an image, or its classifier scores tokens.
    """
    like = next(model.parameters())
    was_training = model.training
    model.eval()
    try:
        scores = model(torch.zeros(1, *input_size, device=like.device, dtype=like.dtype))
    except (ValueError, RuntimeError, AssertionError) as error:
        size = " x ".join(map(str, input_size))
        raise UsageError(
            f"the model cannot take images of {size} ({flags}): {' '.join(str(error).split())[:300]}"
        ) from None
    finally:
        model.train(was_training)
    if getattr(model, "num_classes", 0) and scores.ndim != 2:
        raise UsageError(f"the model gives scores of shape {tuple(scores.shape)} for an image; pool its tokens (--gp)")


def model_channels(model: nn.Module, cfg: ModelConfig) -> int:
    """Image channels that the model takes."""
    return int(getattr(model, "in_chans", None) or asked_channels(cfg) or 3)
