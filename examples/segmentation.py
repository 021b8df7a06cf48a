"""Segment handwritten digits on photographs: UPerNet on a SOFT backbone, trained on composed scenes.

Usage::

    pip install ".[demo,downstream]"
    python -m examples.segmentation --output output/segmentation --checkpoint output/demo/digits/model_best.pth.tar

The folder gets ``last.pth.tar``, a TensorBoard log, ``metrics.json`` (intersection over union, its mean over background
and ten digits, on 100 scenes of other digits and photographs) and ``scenes.png``, sixteen of these scenes beside their
classes as predicted.
"""

import argparse
import math
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torchvision.transforms.functional import normalize, to_pil_image
from torchvision.utils import draw_segmentation_masks

from examples.digits import CLASSES
from examples.fit import Example, run_example
from examples.scenes import COLORS, Scene
from soft_models.downstream import UPerNet

WIDTH = 64  # channels of the head
CLASS_NAMES = ("background", *map(str, range(CLASSES)))


def build_segmenter(options: argparse.Namespace) -> UPerNet:
    """UPerNet with a narrow head, and without dropout: no scene is seen twice."""
    return UPerNet(options.model, len(CLASS_NAMES), channels=WIDTH, drop_rate=0.0, checkpoint=options.checkpoint)


def to_inputs(scenes: list[Scene]) -> Tensor:
    """Normalised images ``(B, 3, SIDE, SIDE)``."""
    images = torch.stack([scene.image for scene in scenes]) / 255
    return normalize(images, list(IMAGENET_DEFAULT_MEAN), list(IMAGENET_DEFAULT_STD))


def losses(model: UPerNet, scenes: list[Scene]) -> dict[str, Tensor]:
    """Cross-entropy in three parts: of all pixels; of the digits over the strokes alone; of each digit as a whole.

    Strokes are 7 % of the pixels, so in the first part alone they hardly count. The mean of the logits over a digit
    is right long before each of its pixels is: without this part the digits were still at chance after 100 steps.
    """
    classes = torch.stack([scene.class_map() for scene in scenes])
    logits = model(to_inputs(scenes))
    strokes, digits = classes > 0, logits[:, 1:]
    means = [
        torch.einsum("chw,nhw->nc", y, scene.masks.to(y.dtype)) / scene.masks.sum(dim=(1, 2))[:, None]
        for y, scene in zip(digits, scenes, strict=True)
    ]
    return {
        "pixels": F.cross_entropy(logits, classes),
        "strokes": F.cross_entropy(digits.movedim(1, -1)[strokes], classes[strokes] - 1),
        "digits": F.cross_entropy(torch.cat(means), torch.cat([scene.digits for scene in scenes])),
    }


def evaluate(model: UPerNet, scenes: Iterator[Scene]) -> tuple[dict[str, float], list[Image.Image]]:
    """Intersection over union of each class, and each scene beside its classes as predicted."""
    from torchmetrics.classification import MulticlassJaccardIndex

    # Of few scenes, classes that are neither there nor predicted have no value, and none in the mean.
    metric = MulticlassJaccardIndex(len(CLASS_NAMES), average=None, zero_division=math.nan)
    pictures = []
    for scene in scenes:
        classes = model(to_inputs([scene])).argmax(dim=1)
        metric.update(classes, scene.class_map()[None])
        pictures.append(draw(scene, classes[0]))
    values = metric.compute()
    each = {name: value for name, value in zip(CLASS_NAMES, values.tolist(), strict=True) if not math.isnan(value)}
    return {"mIoU": float(values.nanmean()), **each}, pictures


def draw(scene: Scene, classes: Tensor) -> Image.Image:
    """The scene, and to its right the predicted strokes, one colour a digit."""
    masks = classes == torch.arange(1, len(CLASS_NAMES))[:, None, None]
    painted = draw_segmentation_masks(torch.zeros_like(scene.image), masks, alpha=1.0, colors=list(COLORS))
    return to_pil_image(torch.cat([scene.image, painted], dim=-1))


EXAMPLE = Example(
    "segmentation", build_segmenter, losses, evaluate, steps=1000, rate=6e-4, needs=("torchmetrics",), head_scale=3
)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    return run_example(EXAMPLE, __doc__ or "", argv)


if __name__ == "__main__":
    sys.exit(main())
