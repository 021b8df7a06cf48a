"""Scenes to detect and segment: handwritten digits on photographs, with their boxes and masks.

Three to eight digits, 20 to 96 pixels tall, are written in light colours over dimmed crops of 256 x 256 pixels from the
photographs that scikit-image ships. The digits are those of ``examples/digits.py``. Scenes to test on have digits and
photographs of their own.
"""

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from examples.digits import CLASSES, DigitsError, build_digits
from soft_models.errors import UsageError

SIDE = 256  # pixels of a scene
COUNTS = (3, 8)  # digits of a scene
HEIGHTS = (20, 96)  # pixels of a digit
GAP = 2  # pixels between the boxes of two digits
PHOTOGRAPHS = {
    "train": (
        "astronaut", "brick", "camera", "cell", "coins", "grass", "hubble_deep_field", "immunohistochemistry", "moon",
        "retina",
    ),
    "test": ("chelsea", "coffee", "gravel", "rocket"),
}  # fmt: skip
# To paint what is found with, digit by digit.
COLORS = (
    "tomato", "orange", "yellow", "lime", "turquoise", "cyan", "dodgerblue", "violet", "magenta", "pink",
)  # fmt: skip


@dataclass(frozen=True)
class Scene:
    """One image and what it shows.

    Args:
        image: ``(3, SIDE, SIDE)``, 0 to 255.
        boxes: ``(n, 4)``, left, top, right and bottom in pixels.
        digits: ``(n,)``, 0 to 9.
        masks: ``(n, SIDE, SIDE)``, the strokes.
    """

    image: Tensor
    boxes: Tensor
    digits: Tensor
    masks: Tensor

    def class_map(self) -> Tensor:
        """``(SIDE, SIDE)``: 0 for the photograph, 1 + digit for its strokes."""
        return (self.masks * (1 + self.digits[:, None, None])).amax(dim=0)


class Scenes:
    """Scenes by number, the same ones every time.

    Args:
        folder: Of the digits; built where it is missing.
        split: ``"train"`` or ``"test"``: of the digits and of the photographs.
        seed: Of all scenes.

    Raises:
        UsageError: The digits cannot be built, or scikit-image is missing.
    """

    def __init__(self, folder: Path, split: str, seed: int) -> None:
        self.name = f"{split}/{seed}"
        try:
            digits = build_digits(folder) / split
        except DigitsError as error:
            raise UsageError(str(error)) from None
        self.digits = [[_read_digit(path) for path in sorted((digits / str(i)).iterdir())] for i in range(CLASSES)]
        self.photographs = [_photograph(name) for name in PHOTOGRAPHS[split]]

    def __getitem__(self, index: int) -> Scene:
        rng = random.Random(f"{self.name}/{index}")
        canvas = np.asarray(_crop(rng.choice(self.photographs), rng), dtype=np.float32) * rng.uniform(0.3, 0.7)
        boxes: list[tuple[int, int, int, int]] = []
        digits, masks = [], []
        for _ in range(rng.randint(*COUNTS)):
            digit = rng.randrange(CLASSES)
            strokes, box = _place(rng.choice(self.digits[digit]), boxes, rng)
            left, top, right, bottom = box
            color = np.array([rng.uniform(190, 255) for _ in range(3)], dtype=np.float32)
            patch = canvas[top:bottom, left:right]
            patch += strokes[..., None] * (color - patch)
            mask = np.zeros((SIDE, SIDE), dtype=bool)
            mask[top:bottom, left:right] = strokes > 0.5
            boxes.append(box)
            digits.append(digit)
            masks.append(mask)
        image = torch.from_numpy(canvas.round().astype(np.uint8)).permute(2, 0, 1).contiguous()
        tensors = torch.tensor(boxes, dtype=torch.float32), torch.tensor(digits), torch.from_numpy(np.stack(masks))
        return Scene(image, *tensors)


def _place(
    digit: Image.Image, taken: list[tuple[int, int, int, int]], rng: random.Random
) -> tuple[np.ndarray, tuple[int, int, int, int]]:
    """Strokes 0 to 1 of the digit at a size and place where it touches no other, and its box."""
    while True:
        height = rng.randint(*HEIGHTS)
        width = max(round(height * digit.width / digit.height), 4)
        left, top = rng.randint(0, SIDE - width), rng.randint(0, SIDE - height)
        box = (left, top, left + width, top + height)
        if not any(_touch(box, other) for other in taken):
            return np.asarray(digit.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32) / 255, box


def _touch(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> bool:
    return a[0] < b[2] + GAP and b[0] < a[2] + GAP and a[1] < b[3] + GAP and b[1] < a[3] + GAP


def _read_digit(path: Path) -> Image.Image:
    """The digit without its margin."""
    with Image.open(path) as image:
        return image.crop(image.point(lambda value: 255 if value > 127 else 0).getbbox())


def _crop(photograph: Image.Image, rng: random.Random) -> Image.Image:
    """A square of the photograph, at random place and scale, perhaps mirrored."""
    side = rng.randint(min(SIDE, *photograph.size) * 3 // 4, min(photograph.size))
    left, top = rng.randint(0, photograph.width - side), rng.randint(0, photograph.height - side)
    box = (left, top, left + side, top + side)
    square = photograph.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)
    return square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else square


@cache
def _photograph(name: str) -> Image.Image:
    try:
        from skimage import data
    except ImportError as error:
        raise UsageError(f"the photographs come with scikit-image: pip install scikit-image ({error})") from None
    return Image.fromarray(getattr(data, name)()).convert("RGB")
