"""Reading one image file, whatever it holds."""

import warnings
from pathlib import Path
from typing import IO

import numpy as np
from PIL import ExifTags, Image

# Scaling the short side of a thinner image to a model's input takes gigabytes.
MAX_ASPECT = 1000


def read_image(file: str | Path | IO[bytes], mode: str) -> Image.Image:
    """Decode an image wholly and convert it to the PIL ``mode``.

    16-bit images are scaled to 8 bits (PIL would clip them to white), palettes with transparency lose it. The
    orientation that EXIF data ask for is not applied, as in timm's and torchvision's training pipelines; see
    :func:`asks_to_be_turned`.

    Raises:
        OSError: Unreadable, truncated, or not an image; other exceptions where a decoder trips over broken content.
        ValueError: One side is more than 1,000 times the other.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a decoder's remarks about odd files
        with Image.open(file) as image:
            if max(image.size) > MAX_ASPECT * min(image.size):
                raise ValueError(f"{image.width} x {image.height} pixels: sides more than {MAX_ASPECT} times apart")
            return _to_8_bits(image).convert(mode)


def asks_to_be_turned(image: Image.Image) -> bool:
    """Whether the EXIF data that an image was read with ask for another orientation; broken data ask for nothing."""
    if "exif" not in image.info:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return image.getexif().get(ExifTags.Base.Orientation, 1) not in (0, 1)
        except Exception:  # a parser that trips over broken content, as decoders do
            return False


def _to_8_bits(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        values = np.asarray(image, dtype=np.int64)
        deep = "16" in image.mode or values.max() > 255  # older PIL opens 16-bit PNG files as 32-bit ones
        return Image.fromarray((values >> 8 if deep else values).clip(0, 255).astype(np.uint8))
    return image.convert("RGBA") if "transparency" in image.info else image
