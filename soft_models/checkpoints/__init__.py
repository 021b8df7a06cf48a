"""Checkpoints of the official code, of training runs and of ours: reading, conversion, command line.

``files`` reads a file and finds the weights in it, ``extras`` what training scripts store beside them; ``renames``
says what the official code calls what our pyramids hold; ``convert`` brings names, pieces and position tables into a
model, all or nothing; ``vit`` does so for timm's plain ViT and DeiT; ``__main__`` converts a file once.
"""

from soft_models.checkpoints.convert import (
    LoadsOfficialWeights,
    check_fit,
    checkpoint_filter_fn,
    convert_state_dict,
    matching_names,
)
from soft_models.checkpoints.files import find_weights, read_checkpoint
from soft_models.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "LoadsOfficialWeights",
    "check_fit",
    "checkpoint_filter_fn",
    "convert_state_dict",
    "find_weights",
    "matching_names",
    "read_checkpoint",
]
