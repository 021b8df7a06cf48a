"""Image folders: where a split lies, which images and classes it holds, and what is wrong with it."""

import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from timm.data import get_img_extensions
from timm.utils import natural_key

from soft_models.errors import UsageError, some_of, suggestion

_logger = logging.getLogger(__name__)

SYNONYMS = (("train", "training"), ("validation", "val", "valid", "eval", "evaluation"))
SPLITS = (*itertools.chain.from_iterable(SYNONYMS), "test")


@dataclass(frozen=True)
class FolderScan:
    """What a split's folder holds: its images with their class names, and class folders without images."""

    root: Path
    images: list[tuple[str, str]]
    empty: list[str]

    @property
    def classes(self) -> list[str]:
        """Names of the classes that have images, in timm's order (2 before 10)."""
        return sorted({name for _, name in self.images}, key=natural_key)


def image_extensions() -> set[str]:
    """Suffixes of image files: timm's, and others that folders of photographs have."""
    return get_img_extensions(as_set=True) | {".bmp", ".gif", ".tif", ".tiff", ".webp"}


def find_split(root: str | Path, split: str, flag: str) -> Path:
    """Folder of a split in ``root``, by its name or one of its ``SYNONYMS``; ``flag`` is what names it, for messages.

    Raises:
        UsageError: No such folder, or no such split in it.
    """
    base = Path(root)
    if not base.is_dir():
        what = "is not a folder" if base.exists() else "does not exist"
        raise UsageError(f"data folder {str(root)!r} {what}; give --data-dir the folder that holds the splits")
    alike = next((names for names in SYNONYMS if split in names), ())
    for name in dict.fromkeys((split, *alike)):
        if (base / name).is_dir():
            return base / name
    present = sorted(path.name for path in base.iterdir() if path.is_dir())
    tried = " or ".join(repr(name) for name in dict.fromkeys((split, *alike)))
    raise UsageError(f"no folder {tried} in {root}, which holds {some_of(present) or 'no folders'}; choose with {flag}")


def leads_back(folder: str, name: str) -> bool:
    """Whether a subfolder is a link to a folder above it, which would be walked for ever."""
    path = Path(folder, name)
    return path.is_symlink() and Path(folder).resolve().is_relative_to(path.resolve())


def walk(root: Path) -> Iterator[tuple[str, list[str], list[str], list[str]]]:
    """Every folder from ``root`` down: its path, its subfolders and images by name, and its other files' suffixes.

    Links are followed, but not back to where they lie; hidden files and folders, whose names begin with a dot, are
    passed over.
    """
    extensions = image_extensions()
    for folder, subfolders, files in os.walk(root, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and not leads_back(folder, name)]
        images, others = [], []
        for name in files:
            if not name.startswith("."):
                extension = os.path.splitext(name)[1].lower()  # noqa: PTH122 (speed)
                if extension in extensions:
                    images.append(name)
                else:
                    others.append(extension or "none")
        yield folder, subfolders, images, others


def scan_folder(root: Path) -> FolderScan:
    """Find the images below ``root``; as in timm, an image's class is the name of the folder that it lies in.

    Raises:
        UsageError: No images, or images that lie in no class folder.
    """
    images: list[tuple[str, str]] = []
    empty: list[str] = []
    others: Counter[str] = Counter()
    deep: list[str] = []
    for folder, subfolders, found, other in walk(root):
        others.update(other)
        where = Path(folder).relative_to(root)
        if found and not where.parts:
            raise UsageError(f"{root} holds images outside class folders: {some_of(sorted(found))}; sort them by class")
        if found and len(where.parts) > 1:
            deep.append(str(where))
        if not found and not subfolders:
            empty.append(Path(folder).name)
        label = Path(folder).name
        images.extend((os.path.join(folder, name), label) for name in found)  # noqa: PTH118 (speed)
    if not images:
        known = some_of(sorted(image_extensions()))
        raise UsageError(f"{root} holds no images; it needs one folder per class with {known}")
    if deep:
        _logger.warning("%s has images below class folders, whose last folder is their class: %s", root, some_of(deep))
    if others:
        kinds = some_of(f"{count} of suffix {suffix}" for suffix, count in sorted(others.items()))
        _logger.info("%s: not taken for images: %s", root, kinds)
    images.sort(key=lambda image: natural_key(image[0]))
    return FolderScan(root, images, sorted(empty, key=natural_key))


def read_class_map(path: str) -> list[str]:
    """Class names in label order from a text file with one name per line.

    Raises:
        UsageError: The file cannot be read, is empty, or names a class twice.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the class map {path!r}: {error}") from None
    names = [line.strip() for line in lines if line.strip()]
    if not names or len(set(names)) != len(names):
        raise UsageError(
            f"class map {path!r} must name each class once, got {len(names)} lines, {len(set(names))} names"
        )
    return names


def label_classes(present: Sequence[str], classes: Sequence[str], title: str) -> dict[str, int]:
    """Labels by name: positions in ``classes``, whatever the split called ``title`` itself holds.

    Raises:
        UsageError: A class that is ``present`` is not among ``classes``.
    """
    labels = {name: label for label, name in enumerate(classes)}
    unknown = [name for name in present if name not in labels]
    if unknown:
        raise UsageError(
            f"{title} has classes unknown to the model: {some_of(unknown)}{suggestion(unknown[0], classes)}; "
            f"it knows {len(classes)}: {some_of(classes)}"
        )
    return labels


def label_images(scan: FolderScan, classes: Sequence[str]) -> list[tuple[str, int]]:
    """Images of a split with their labels, see :func:`label_classes`; classes without images are pointed out."""
    present = scan.classes
    labels = label_classes(present, classes, str(scan.root))
    absent = sorted(labels.keys() - set(present), key=labels.__getitem__)
    if absent:
        _logger.warning("%s has no images of class %s; labels stay", scan.root, some_of(absent))
    return [(path, labels[name]) for path, name in scan.images]
