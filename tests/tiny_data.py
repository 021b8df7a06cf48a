"""Image folders small enough for tests: three classes told apart by colour."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("a", "b", "c")


def write_image(path: Path, label: int, rng: np.random.Generator) -> None:
    """Save one noisy image of a class."""
    pixels = rng.integers(0, 255, (24, 28, 3), dtype=np.uint8)
    pixels[..., label % 3] = pixels[..., label % 3] // 4 + 190
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_folder(root: Path, train: int = 8, val: int = 3) -> Path:
    """Write ``train`` and ``val`` splits with so many images per class."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for label, name in enumerate(CLASSES):
            for number in range(count):
                write_image(root / split / name / f"{number}.png", label, rng)
    return root
