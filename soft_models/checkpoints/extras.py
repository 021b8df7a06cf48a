"""What training scripts, ours and timm's, store in a checkpoint beside the weights."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from soft_models.checkpoints.convert import native_weights
from soft_models.checkpoints.files import find_weights
from soft_models.errors import CheckpointError
from soft_models.registry import is_ours

__all__ = ["EXTRAS_KEY", "FORMAT", "constructor_arguments", "pretrained_settings", "stored_extras", "stored_options"]

EXTRAS_KEY = "soft_models"  # of what ours store beyond timm's keys
FORMAT = 1
PREPROCESSING = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")
STRIDE = 4  # image pixels per cell of the first position table
UNSAFE = ("pretrained", "checkpoint_path", "cache_dir")  # beginnings of arguments that name files


def stored_options(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a training script of ours or of timm stored."""
    args = checkpoint.get("args")
    if isinstance(args, Namespace):
        return dict(vars(args))
    return dict(args) if isinstance(args, Mapping) else {}  # others store a command line, or text


def stored_extras(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What our training stored beyond timm's keys; empty for files of others.

    Raises:
        CheckpointError: A later version wrote the file.
    """
    extras = checkpoint.get(EXTRAS_KEY) or {}
    if extras.get("format", FORMAT) > FORMAT:
        raise CheckpointError(
            f"the checkpoint has format {extras['format']}, this version reads up to {FORMAT}; update"
        )
    return extras


def constructor_arguments(checkpoint: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What builds model ``name`` as a checkpoint holds it; names of files in it are left out, and never followed.

    The arguments that a training script stored, if they are of this model, and in any case the image size that the
    position tables are made for: resized to another grid and back they would change.
    """
    arguments: dict[str, Any] = {}
    if is_ours(name):
        table = native_weights(find_weights(checkpoint)[1]).get("stages.0.pos_embed")
        if table is not None and table.ndim == 4:
            arguments["img_size"] = tuple(STRIDE * side for side in table.shape[1:3])
    options = stored_options(checkpoint)
    own = checkpoint.get("arch") or options.get("model") or name
    if str(own).split(".")[0] != name.split(".")[0]:
        return arguments
    stored = stored_extras(checkpoint).get("model_args")
    if stored is None:
        stored = {
            "num_classes": options.get("num_classes"),
            "in_chans": options.get("in_chans"),
            "global_pool": options.get("gp"),
            **(more if isinstance(more := options.get("model_kwargs"), Mapping) else {}),
        }
    known = {key: value for key, value in stored.items() if value is not None and not key.startswith(UNSAFE)}
    return arguments | known


def pretrained_settings(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Preprocessing and class names that our training stored, as entries of timm's ``pretrained_cfg``."""
    extras = stored_extras(checkpoint)
    stored = {**(extras.get("data_config") or {}), "label_names": extras.get("classes")}
    return {
        name: tuple(stored[name]) if isinstance(stored[name], list) else stored[name]
        for name in (*PREPROCESSING, "label_names")
        if stored.get(name)
    }
