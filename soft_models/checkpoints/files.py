"""Checkpoint files: read without running code from them, and the weights found inside."""

import argparse
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from soft_models.errors import CheckpointError, some_of

__all__ = ["EMA_KEYS", "RAW_KEYS", "find_weights", "naming", "read_checkpoint", "require_file"]

EMA_KEYS = ("state_dict_ema", "model_ema")
RAW_KEYS = ("state_dict", "model")


def read_checkpoint(path: str | Path, weights_only: bool = True) -> dict[str, Any]:
    """Content of a ``.pth``, ``.pth.tar``, ``.bin`` or ``.safetensors`` file, on the CPU.

    Args:
        path: The file.
        weights_only: Refuse a file that needs more than tensors, numbers and texts to be unpickled (an
            ``argparse.Namespace`` is allowed, as training scripts store one). False runs code that the file brings
            along: only for files whose origin you trust.

    Raises:
        CheckpointError: There is no such file, it is damaged, holds no dict, or needs ``weights_only=False``.
    """
    file = require_file(path)
    try:
        damaged = damaged_parts(file)
        if file.suffix == ".safetensors":
            content: Any = load_file(file)
        else:
            with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
                warnings.simplefilter("ignore")  # remarks about the file, of which the user can change nothing
                content = torch.load(file, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError:
        raise CheckpointError(_why_refused(file)) from None
    except Exception as error:  # damaged files raise what they like, down to AssertionError and struct.error
        raise CheckpointError(_unreadable(file, error)) from None
    if damaged:
        raise CheckpointError(f"{file} is damaged ({some_of(damaged)}); copy or download it again")
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} must hold a dict of tensors, got {type(content).__name__}")
    return dict(content)


def require_file(path: str | Path) -> Path:
    """The path of a checkpoint file.

    Raises:
        CheckpointError: There is no such file.
    """
    file = Path(path)
    if file.is_dir():
        raise CheckpointError(f"{str(path)!r} is a folder: name the checkpoint file")
    if not file.is_file():
        raise CheckpointError(f"no checkpoint file {str(path)!r}")
    return file


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Put the file's name before what is said to be wrong with its weights."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def damaged_parts(file: Path) -> list[str]:
    """Parts of an archive of ``torch.save`` that differ from their checksums, which ``torch.load`` does not look at.

    None where none agrees: ``torch.serialization.set_crc32_options`` leaves checksums out.
    """
    if not zipfile.is_zipfile(file):
        return []
    with zipfile.ZipFile(file) as archive:
        parts = [part for part in archive.infolist() if part.file_size]
        damaged = [part.filename for part in parts if not _agrees(archive, part)]
    return damaged if len(damaged) < len(parts) else []


def _agrees(archive: zipfile.ZipFile, part: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(part) as content:
            while content.read(2**24):
                pass
    except zipfile.BadZipFile:
        return False
    return True


def _unreadable(file: Path, error: BaseException) -> str:
    text = " ".join(str(error).split()).split(". ")[0]
    reason = f" ({text[:200]})" if any(map(str.isalpha, text)) and not isinstance(error, LookupError) else ""
    return f"{file} is not a readable checkpoint{reason}; is the download complete?"


def _why_refused(file: Path) -> str:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
    except Exception:  # not an archive at all: any error tells that
        names = []
    if not names:  # torch's own words ask to switch the check off
        return f"{file} is not a readable checkpoint; is the download complete?"
    return (
        f"{file} needs code to be unpickled ({some_of(names)}), which is refused; if you trust its origin, convert it "
        f"once: python -m soft_models.checkpoints {file} out.safetensors --trust"
    )


def find_weights(content: Mapping[str, Any], use_ema: bool | None = None) -> tuple[str, dict[str, Tensor]]:
    """The weights in a checkpoint, however deep training code has wrapped them.

    Args:
        content: What :func:`read_checkpoint` gave.
        use_ema: Averaged weights or not; None for the averaged ones where there are any.

    Returns:
        The dotted path of the keys that were followed, ``""`` for none, and the tensors by name.

    Raises:
        CheckpointError: There are no weights, or not those asked for.
    """
    keys = {None: EMA_KEYS + RAW_KEYS, True: EMA_KEYS, False: RAW_KEYS}[use_ema]
    path: list[str] = []
    ema_found = False
    while not (content and all(isinstance(value, Tensor) for value in content.values())):
        key = next((key for key in keys if isinstance(content.get(key), Mapping)), None)
        if key is None:
            key = next((key for key in RAW_KEYS if ema_found and isinstance(content.get(key), Mapping)), None)
        if key is None:
            wanted = "averaged weights" if use_ema else "weights"
            raise CheckpointError(f"no {wanted} under {', '.join(keys)}; the file has {some_of(content) or 'nothing'}")
        ema_found = ema_found or key in EMA_KEYS
        path.append(key)
        content = content[key]
    if use_ema and not ema_found:
        raise CheckpointError(f"no averaged weights under {', '.join(EMA_KEYS)}; the file has one set of weights")
    return ".".join(path), dict(content)
