"""Where images come from: the splits of a folder or of a named dataset, opened strictly."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image
from timm.data import create_dataset

from soft_models.errors import UsageError, some_of

from .config import DataConfig, TrainConfig, ValidateConfig
from .folders import SPLITS, SYNONYMS, FolderScan, find_split, label_classes, label_images, read_class_map, scan_folder
from .images import read_image

_logger = logging.getLogger(__name__)


# How timm tells datasets apart; others it takes for folders.
NAMED = ("torch/", "hfds/")
STREAMS = ("hfids/", "tfds/", "wds/")
# Of those of torchvision: where timm takes the folder itself for want of a split, and all but "train" for the test set.
TORCH_FOLDERS = ("folder", "image_folder")
TRAIN_OR_TEST = ("cifar10", "cifar100", "fashion_mnist", "kmnist", "mnist", "qmnist")


class Source(Protocol):
    """Images by index, whatever they are stored in."""

    def __len__(self) -> int: ...

    def load(self, index: int, mode: str) -> tuple[Image.Image, int]:
        """The image in PIL ``mode``, and its label."""

    def name(self, index: int) -> str:
        """What to call the image in messages."""


class FolderSource:
    """Image files with their labels."""

    def __init__(self, images: Sequence[tuple[str, int]]) -> None:
        # Arrays: loader processes that touch a list of a million tuples end up copying it.
        self.paths = np.array([os.fsencode(path) for path, _ in images])
        self.labels = np.array([label for _, label in images])

    def __len__(self) -> int:
        return len(self.paths)

    def load(self, index: int, mode: str) -> tuple[Image.Image, int]:
        return read_image(self.name(index), mode), int(self.labels[index])

    def name(self, index: int) -> str:
        return os.fsdecode(self.paths[index])


class NamedSource:
    """A dataset that timm's ``create_dataset`` makes from a name such as torch/cifar10 or hfds/NAME.

    Args:
        dataset: The dataset.
        title: What to call it in messages.
        labels: By what the dataset gives as a target, where that is not the label.
    """

    def __init__(self, dataset: Any, title: str, labels: Mapping[Any, int]) -> None:
        self.dataset, self.title, self.labels = dataset, title, labels

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, index: int, mode: str) -> tuple[Image.Image, int]:
        # Past timm's own ImageDataset, which puts a neighbour in the place of an image that it cannot read.
        image, target, *_ = self.dataset.reader[index] if hasattr(self.dataset, "reader") else self.dataset[index]
        target = target if isinstance(target, str) else int(target)
        label = int(self.labels.get(target, target))
        return image.convert(mode) if isinstance(image, Image.Image) else read_image(image, mode), label

    def name(self, index: int) -> str:
        return f"{self.title}[{index}]"


@dataclass(frozen=True)
class Split:
    """A split that can be read, and its classes in label order (none where the dataset does not tell)."""

    name: str
    source: Source
    classes: tuple[str, ...] | None


def open_train_splits(cfg: TrainConfig) -> tuple[Split, Split | None]:
    """The training split and, unless ``val_split`` is empty, the validation split with the same labels.

    Raises:
        UsageError: A folder, split or class is missing or wrong.
    """
    _require_data(cfg)
    if cfg.dataset:
        train = _open_named(cfg, cfg.train_split, "--train-split", known=None)
        if not cfg.val_split:
            return train, None
        if any({cfg.train_split, cfg.val_split} <= {*names} for names in (*SYNONYMS, (cfg.train_split,))):
            raise _not_validation(cfg)
        return train, _open_named(cfg, cfg.val_split, "--val-split", known=train.classes)
    folder = find_split(cfg.data_dir, cfg.train_split, "--train-split")
    held_out = _find_val(cfg, folder)
    scan = scan_folder(folder)
    classes = read_class_map(cfg.class_map) if cfg.class_map else scan.classes
    if scan.empty and not cfg.class_map:
        _logger.warning("%s has folders without images, which are no classes: %s", scan.root, some_of(scan.empty))
    train = _folder_split(scan, classes)
    return train, _folder_split(scan_folder(held_out), classes) if held_out else None


def _require_data(cfg: DataConfig) -> None:
    if not cfg.data_dir and not cfg.dataset.startswith("hfds/"):
        raise UsageError("no data: give --data-dir the folder that holds the splits")


def _find_val(cfg: TrainConfig, train_folder: Path) -> Path | None:
    if not cfg.val_split:
        return None
    try:
        folder = find_split(cfg.data_dir, cfg.val_split, "--val-split")
    except UsageError as error:
        raise UsageError(f"{error}, or train without validation: --val-split ''") from None
    if folder.samefile(train_folder):
        raise _not_validation(cfg)
    return folder


def _not_validation(cfg: TrainConfig) -> UsageError:
    return UsageError(f"--val-split {cfg.val_split!r} is the training split; validation needs other images")


def open_eval_split(cfg: ValidateConfig, classes: Sequence[str] | None) -> Split:
    """The split to validate, labelled by the class map, else by ``classes``, the training folder beside it, or itself.

    Raises:
        UsageError: A folder, split or class is missing or wrong.
    """
    _require_data(cfg)
    if cfg.dataset:
        return _open_named(cfg, cfg.split, "--split", known=classes)
    scan = scan_folder(_eval_folder(cfg))
    if cfg.class_map:
        classes = read_class_map(cfg.class_map)
    return _folder_split(scan, classes or _train_classes(cfg) or scan.classes)


def _eval_folder(cfg: ValidateConfig) -> Path:
    """The split's folder; a ``data_dir`` without any split is taken for the split itself."""
    root = Path(cfg.data_dir)
    if root.is_dir() and not any((root / name).is_dir() for name in (cfg.split, *SPLITS)):
        _logger.info("%s has no split folders, its own class folders are validated", root)
        return root
    return find_split(root, cfg.split, "--split")


def _train_classes(cfg: ValidateConfig) -> list[str] | None:
    try:
        return scan_folder(find_split(cfg.data_dir, "train", "--data-dir")).classes
    except UsageError:
        return None


def _folder_split(scan: FolderScan, classes: Sequence[str]) -> Split:
    return Split(str(scan.root), FolderSource(label_images(scan, classes)), tuple(classes))


def _open_named(cfg: DataConfig, split: str, flag: str, known: Sequence[str] | None) -> Split:
    """A named dataset's split, which ``flag`` names, labelled by the class map, else by ``known``, else as it is."""
    if cfg.dataset.lower().startswith(STREAMS):
        raise UsageError(f"dataset {cfg.dataset!r} is a stream, which cannot be resumed exactly; use folders or hfds/")
    if not cfg.dataset.lower().startswith(NAMED):
        raise UsageError(
            f"--dataset must start with {' or '.join(NAMED)}, got {cfg.dataset!r}; leave it out for folders"
        )
    kind = cfg.dataset.lower().removeprefix("torch/")
    if kind in TORCH_FOLDERS:
        find_split(cfg.data_dir, split, flag)
    if kind in TRAIN_OR_TEST and split not in SPLITS:
        raise UsageError(f"{flag} of {cfg.dataset} must be one of {', '.join(SPLITS)}, got {split!r}")
    try:
        dataset = create_dataset(
            cfg.dataset, root=cfg.data_dir or None, split=split, download=cfg.dataset_download
        )  # fmt: skip
    except (OSError, RuntimeError, ValueError, AssertionError, ImportError) as error:
        raise UsageError(f"cannot open dataset {cfg.dataset!r}, split {split!r}: {error}") from None
    title = f"{cfg.dataset}:{split}"
    told = getattr(dataset, "classes", None) or _reader_classes(getattr(dataset, "reader", None))
    names = [str(name) for name in told or ()]
    known = read_class_map(cfg.class_map) if cfg.class_map else known
    labels: Mapping[Any, int] = {}
    if known and (cfg.class_map or not names or not set(names).isdisjoint(known)):
        labels, names = _match_labels(names, known, title), list(known)
    elif known:
        _logger.warning(
            "%s and the model share no class name, labels are taken as they are: %s are %s",
            title, some_of(names), some_of(known),
        )  # fmt: skip
    return Split(title, NamedSource(dataset, cfg.dataset, labels), tuple(names) or None)


def _match_labels(names: Sequence[str], known: Sequence[str], title: str) -> dict[Any, int]:
    """Labels in ``known`` by name, and by what labels mean in a dataset that calls them ``names``, if it tells.

    Raises:
        UsageError: A name is not in ``known``, or one that is there twice stands elsewhere.
    """
    if list(names) == list(known):
        return {}
    for each in (names, known):
        if len(set(each)) < len(each):
            raise UsageError(f"{title} cannot be labelled by name: a class is named twice among {some_of(each)}")
    labels = label_classes(names, known, title)
    by_label = {label: labels[name] for label, name in enumerate(names)}
    return {**by_label, **labels}


def _reader_classes(reader: Any) -> list[str] | None:
    """Classes by label, as timm's readers know them, if they do."""
    labels = getattr(reader, "class_to_idx", None) or {}
    names = sorted(labels, key=labels.__getitem__)
    return names if [labels[name] for name in names] == list(range(len(names))) else None
