"""Reading checkpoint files: without running code from them, and with one line where they do not fit."""

import argparse
import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from timm.models import clean_state_dict

from .errors import UsageError, some_of

_logger = logging.getLogger(__name__)

RAW_KEYS = ("state_dict", "model")
EMA_KEYS = ("state_dict_ema", "model_ema")
OURS = "soft_models"
FORMAT = 1

Checkpoint = dict[str, Any]


def read_checkpoint(path: str | Path, trust: bool = False) -> Checkpoint:
    """Content of a checkpoint file; tensors are read when they are used.

    Args:
        path: A .pth.tar, .pth or .safetensors file, of ours, of timm or of others.
        trust: Unpickle it even if that can run code.

    Raises:
        UsageError: No such file, not a checkpoint, or one that needs ``trust``.
    """
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"no checkpoint {str(path)!r}")
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file  # comes with timm

        return {"state_dict": load_file(file)}
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(file, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        raise UsageError(_refusal(file, error)) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, ImportError) as error:
        raise UsageError(f"{path} is not a readable checkpoint: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(loaded, dict):
        raise UsageError(f"{path} must hold a dict of tensors, got {type(loaded).__name__}")
    return loaded


def _refusal(file: Path, error: Exception) -> str:
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
    except Exception:
        return f"{file} is not a readable checkpoint: {str(error).splitlines()[0]}"
    return f"{file} needs code to be unpickled ({some_of(names)}); if you trust its origin, add --trust-checkpoint"


def choose_weights(checkpoint: Checkpoint, use_ema: bool | None, path: str | Path) -> tuple[str, dict[str, Any]]:
    """The key and the weights to use.

    Args:
        checkpoint: What ``read_checkpoint`` gave.
        use_ema: Averaged weights or not; None for those that the stored metric came from, else averaged ones if any.
        path: For messages.

    Raises:
        UsageError: The weights asked for are not there.
    """
    present = [key for key in EMA_KEYS + RAW_KEYS if isinstance(checkpoint.get(key), Mapping)]
    if not present and all(isinstance(value, torch.Tensor) for value in checkpoint.values()):
        if use_ema:
            raise UsageError(f"{path} has no averaged weights, which --use-ema asks for")
        return "", clean_state_dict(checkpoint)
    if use_ema is None and checkpoint.get(OURS):
        wanted: tuple[str, ...] = (checkpoint[OURS].get("ranked", "state_dict"),)
    elif use_ema is None:
        wanted = EMA_KEYS + RAW_KEYS
    else:
        wanted = EMA_KEYS if use_ema else RAW_KEYS
    key = next((key for key in wanted if key in present), None)
    if key is None:
        found = some_of(present) or f"the keys {some_of(map(str, checkpoint))}"
        raise UsageError(f"{path} has no weights under {' or '.join(wanted)}; it has {found}")
    return key, clean_state_dict(checkpoint[key])


def check_architecture(checkpoint: Checkpoint, model: str, path: str | Path) -> None:
    """Refuse a checkpoint that says it is of another model.

    Raises:
        UsageError: It does.
    """
    arch = checkpoint.get("arch")
    if isinstance(arch, str) and arch.split(".")[0] != model.split(".")[0]:
        raise UsageError(f"{path} is a checkpoint of {arch!r}, not of --model {model!r}")


def load_exactly(model: torch.nn.Module, weights: Mapping[str, Any], path: str | Path, advice: str = "") -> None:
    """Load weights that must fit the model key by key and shape by shape.

    Args:
        model: Where they go.
        weights: By name.
        path: For messages.
        advice: What to do instead if only the head differs.

    Raises:
        UsageError: They do not fit.
    """
    expected = model.state_dict()
    missing = [name for name in expected if name not in weights]
    unexpected = [name for name in weights if name not in expected]
    misfits = [name for name in expected if name in weights and expected[name].shape != weights[name].shape]
    if missing or unexpected:
        raise UsageError(
            f"{path} does not fit the model: {len(expected) - len(missing)} of {len(expected)} tensors match; "
            f"missing: {some_of(missing, 3) or 'none'}; unexpected: {some_of(unexpected, 3) or 'none'}"
        )
    if misfits:
        name = misfits[0]
        shapes = f"{name} is {tuple(weights[name].shape)}, the model's is {tuple(expected[name].shape)}"
        raise UsageError(f"{path} does not fit the model: {shapes}{advice and '; ' + advice}")
    model.load_state_dict(dict(weights))


def stored_options(checkpoint: Checkpoint) -> dict[str, Any]:
    """The options that a training script of ours or of timm stored."""
    args = checkpoint.get("args") or {}
    return dict(args) if isinstance(args, Mapping) else dict(vars(args))


def stored_extras(checkpoint: Checkpoint) -> dict[str, Any]:
    """What our training stored beyond timm's keys; empty for files of others.

    Raises:
        UsageError: A later version wrote the file.
    """
    extras = checkpoint.get(OURS) or {}
    if extras.get("format", FORMAT) > FORMAT:
        raise UsageError(f"the checkpoint has format {extras['format']}, this version reads up to {FORMAT}; update")
    return extras
