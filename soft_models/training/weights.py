"""Choosing the weights in a checkpoint, and putting them into a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from timm.models import clean_state_dict

from soft_models.checkpoints import LoadsOfficialWeights, check_fit, find_weights
from soft_models.checkpoints.extras import stored_extras
from soft_models.checkpoints.files import EMA_KEYS
from soft_models.errors import CheckpointError, UsageError

Checkpoint = dict[str, Any]


def choose_weights(checkpoint: Checkpoint, use_ema: bool | None, path: str | Path) -> tuple[str, dict[str, Any]]:
    """The key and the weights to use.

    Args:
        checkpoint: Content of the file.
        use_ema: Averaged weights or not; None for averaged ones where the file has any.
        path: For messages.

    Raises:
        UsageError: The weights asked for are not there.
    """
    if use_ema is None and (extras := stored_extras(checkpoint)):
        use_ema = extras.get("ranked") in EMA_KEYS
    try:
        key, weights = find_weights(checkpoint, use_ema)
    except CheckpointError as error:
        raise UsageError(f"{path}: {error}") from None
    return key, clean_state_dict(weights)


def check_architecture(checkpoint: Checkpoint, model: str, path: str | Path) -> None:
    """Refuse a checkpoint that says it is of another model.

    Raises:
        UsageError: It does.
    """
    arch = checkpoint.get("arch")
    if isinstance(arch, str) and arch.split(".")[0] != model.split(".")[0]:
        raise UsageError(f"{path} is a checkpoint of {arch!r}, not of --model {model!r}")


def load_exactly(model: torch.nn.Module, weights: Mapping[str, Any], path: str | Path, advice: str = "") -> None:
    """Load weights that must fit the model key by key and shape by shape; our models take official names too.

    Args:
        model: Where they go.
        weights: By name.
        path: For messages.
        advice: What to do instead, if they do not fit.

    Raises:
        UsageError: They do not fit.
    """
    try:
        if not isinstance(model, LoadsOfficialWeights):  # which checks by itself, after renaming
            check_fit(weights, model)
        model.load_state_dict(dict(weights))
    except CheckpointError as error:
        raise UsageError(f"{path}: {error}{advice and '; ' + advice}") from None
