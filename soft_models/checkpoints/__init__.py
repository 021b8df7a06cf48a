"""Checkpoints of the official code, of training runs and of ours: reading, conversion, command line."""

from soft_models.checkpoints.convert import (
    LoadsOfficialWeights,
    check_fit,
    checkpoint_filter_fn,
    convert_state_dict,
    matching_names,
)
from soft_models.checkpoints.files import CheckpointError, find_weights, read_checkpoint, some_of

__all__ = [
    "CheckpointError",
    "LoadsOfficialWeights",
    "check_fit",
    "checkpoint_filter_fn",
    "convert_state_dict",
    "find_weights",
    "matching_names",
    "read_checkpoint",
    "some_of",
]
