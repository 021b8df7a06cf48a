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


def write_odd_images(folder: Path, whole: Path) -> None:
    """One file of every kind that folders of photographs are known to hold."""
    folder.mkdir(exist_ok=True)
    pixels = np.asarray(Image.open(whole).convert("RGB"))
    image = Image.fromarray(pixels)
    image.convert("CMYK").save(folder / "cmyk.jpg")
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(folder / "deep.png")
    image.quantize(16).save(folder / "palette.png", transparency=0)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(folder / "turned.jpg", exif=exif)
    image.save(folder / "strange.jpg", exif=b"Exif\0\0no TIFF header")
    image.resize((1, 1)).save(folder / "dot.png")
    image.resize((10_000, 10)).save(folder / "strip.png")
    image.resize((2_100, 2)).save(folder / "thread.png")
    data = whole.read_bytes()
    (folder / "cut.png").write_bytes(data[: len(data) // 2])
    (folder / "text.jpg").write_text("no image", encoding="utf-8")
    (folder / "empty.png").write_bytes(b"")
    (folder / "link.png").symlink_to(folder / "gone.png")


BROKEN = {"cut.png", "empty.png", "link.png", "text.jpg", "thread.png"}
