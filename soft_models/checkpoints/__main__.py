"""Convert a checkpoint of the official code, or of any training run, to plain weights by our names::

python -m soft_models.checkpoints official.pth out.safetensors
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from soft_models.checkpoints.convert import (
    check_fit,
    free_names,
    head_names,
    matching_names,
    native_weights,
    strip_prefixes,
)
from soft_models.checkpoints.extras import constructor_arguments, pretrained_settings
from soft_models.checkpoints.files import find_weights, naming, read_checkpoint
from soft_models.commands.files import make_folder, replacing
from soft_models.commands.script import run_script, setup_logging
from soft_models.errors import CheckpointError, some_of
from soft_models.registry import is_ours, require_model
from soft_models.training.models import create_model

_logger = logging.getLogger("soft_models.checkpoints")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code, 2 where the file cannot be converted."""
    setup_logging()
    return run_script("convert", lambda: convert(parse_arguments(argv)))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m soft_models.checkpoints",
        description="Convert a checkpoint to plain weights by the names of our models, and verify what was written.",
    )
    parser.add_argument("source", type=Path, help="checkpoint: .pth, .pth.tar, .bin or .safetensors, however wrapped")
    parser.add_argument("target", type=Path, help="file to write: .safetensors or .pth")
    parser.add_argument("--model", help="name of the model; found from the file's names and shapes when left out")
    parser.add_argument("--use-ema", action=argparse.BooleanOptionalAction, help="averaged weights; default: if any")
    parser.add_argument("--trust", action="store_true", help="run the code that the file brings along to be unpickled")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing target")
    return parser.parse_args(argv)


def convert(args: argparse.Namespace) -> int:
    """Read, convert, check, write, read back."""
    if args.target.suffix not in (".safetensors", ".pth"):
        raise CheckpointError(f"the target must end in .safetensors or .pth, got {str(args.target)!r}")
    if args.target.exists() and not args.overwrite:
        raise CheckpointError(f"{args.target} exists; choose another name or add --overwrite")
    make_folder(args.target.parent)
    content = read_checkpoint(args.source, weights_only=not args.trust)
    with naming(args.source):
        key, found = find_weights(content, args.use_ema)
        _logger.info("weights: %s", f"under {key!r}" if key else "the file itself")
        weights = native_weights(found)
    names = [args.model] if args.model else matching_names(weights)
    stored = str(content.get("arch"))
    if stored in names or (not names and is_ours(stored)):
        names = [stored]
    if not names:
        raise CheckpointError(
            f"{args.source} fits no model of ours (it has {some_of(weights)}): give --model to see what does not "
            "fit. Files of timm's ViT and DeiT need no conversion, train.py --pretrained-path takes them"
        )
    require_model(names[0])
    with naming(args.source):
        arguments = constructor_arguments(content, names[0])
        check_weights(names[0], weights, arguments)
    used = len(strip_prefixes(found))
    _logger.info("matched: %d of %d tensors, as %d of %s", used, len(found), len(weights), " or ".join(names))
    _logger.info("dropped: %s", f"{len(found) - used} tensors" if used < len(found) else "nothing")
    if pretrained_settings(content):
        _logger.info("preprocessing and class names stay behind: a loader finds them in %s only", args.source)
    # The image size is that of the position tables.
    if left := [f"{name}={value!r}" for name, value in arguments.items() if name != "img_size"]:
        _logger.info("arguments of the model stay behind, and have to be given again: %s", ", ".join(left))
    if len(names) > 1:
        _logger.info("which of these it is cannot be told from the names of the weights: ask who trained them")
    write({key: tensor.contiguous() for key, tensor in weights.items()}, args.target)
    _logger.info("wrote %s, read back and found equal", args.target)
    return 0


def check_weights(name: str, weights: dict[str, Tensor], arguments: dict[str, Any]) -> None:
    """Refuse weights that do not fill the model ``name``, whatever their classes, channels and image size."""
    model = create_model(name, arguments, device="meta")
    tables = {key for key in weights if key.endswith("pos_embed")}
    check_fit(weights, model, reshaped=free_names(model) | tables, absent=head_names(model))


def write(weights: dict[str, Tensor], target: Path) -> None:
    """Write next to the target, read back, and only then put it in place."""
    with replacing(target) as temporary:
        try:
            if target.suffix == ".safetensors":
                save_file(weights, temporary, metadata={"format": "pt"})
            else:
                torch.save(weights, temporary)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"cannot write {target}: {' '.join(str(error).split())}") from error
        again = read_checkpoint(temporary)
        if again.keys() != weights.keys() or not all(torch.equal(again[key], weights[key]) for key in weights):
            raise CheckpointError(f"what was read back from {target} is not what was written; is the disk full?")


if __name__ == "__main__":
    sys.exit(main())
