"""Detect and segment handwritten digits on photographs: Mask R-CNN on a SOFT backbone, trained on composed scenes.

Usage::

    pip install ".[demo,downstream]"
    python -m examples.detection --output output/detection --checkpoint output/demo/digits/model_best.pth.tar

The folder gets ``last.pth.tar``, a TensorBoard log, ``metrics.json`` (COCO's average precision of boxes and masks on
100 scenes of other digits and photographs) and ``scenes.png``, sixteen of these scenes with what is found in them.
"""

import argparse
import sys
from collections.abc import Iterator

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import draw_segmentation_masks

from examples.digits import CLASSES
from examples.fit import Example, run_example
from examples.scenes import COLORS, SIDE, Scene
from soft_models.downstream import FPNBackbone

WIDTH = 96  # channels of the pyramid and of the mask head
HIDDEN = 256  # width of the box head
STAGES = (1, 2, 3)
ANCHORS = ((17, 25), (36, 50), (68, 88))  # pixels, of the stages' strides 8, 16 and 32
RATIOS = ((1.0, 1.5, 3.0),) * len(ANCHORS)  # height over width
SURE = 0.5  # score from which a picture shows what is found


def build_detector(options: argparse.Namespace) -> MaskRCNN:
    """Mask R-CNN (He et al. 2017, arXiv:1703.06870), narrow and with few proposals, for scenes of few digits."""
    backbone = FPNBackbone(options.model, WIDTH, extra="", out_indices=STAGES, checkpoint=options.checkpoint)
    levels = [str(i) for i in range(len(STAGES))]
    return MaskRCNN(
        backbone,
        min_size=SIDE,
        max_size=SIDE,
        rpn_anchor_generator=AnchorGenerator(ANCHORS, RATIOS),
        rpn_pre_nms_top_n_train=500,
        rpn_post_nms_top_n_train=200,
        rpn_pre_nms_top_n_test=200,
        rpn_post_nms_top_n_test=100,
        rpn_batch_size_per_image=64,
        box_roi_pool=MultiScaleRoIAlign(levels, output_size=7, sampling_ratio=2),
        box_head=TwoMLPHead(WIDTH * 7 * 7, HIDDEN),
        box_predictor=FastRCNNPredictor(HIDDEN, 1 + CLASSES),
        box_batch_size_per_image=64,
        box_detections_per_img=30,
        mask_roi_pool=MultiScaleRoIAlign(levels, output_size=14, sampling_ratio=2),
        mask_head=MaskRCNNHeads(WIDTH, (WIDTH, WIDTH), dilation=1),
        mask_predictor=MaskRCNNPredictor(WIDTH, WIDTH, 1 + CLASSES),
    )


def to_target(scene: Scene) -> dict[str, Tensor]:
    """What torchvision's detectors train on; label 0 is the background."""
    return {"boxes": scene.boxes, "labels": 1 + scene.digits, "masks": scene.masks.to(torch.uint8)}


def losses(model: MaskRCNN, scenes: list[Scene]) -> dict[str, Tensor]:
    """The parts of Mask R-CNN's loss."""
    parts: dict[str, Tensor] = model([scene.image / 255 for scene in scenes], [to_target(scene) for scene in scenes])
    return parts


def evaluate(model: MaskRCNN, scenes: Iterator[Scene]) -> tuple[dict[str, float], list[Image.Image]]:
    """COCO's mAP, and each scene with what is found in it."""
    from torchmetrics.detection import MeanAveragePrecision

    metrics = {kind: MeanAveragePrecision(iou_type=kind) for kind in ("bbox", "segm")}
    pictures = []
    for scene in scenes:
        found = model([scene.image / 255])[0]
        found["masks"] = found["masks"][:, 0] > 0.5
        for metric in metrics.values():
            metric.update([found], [to_target(scene)])
        pictures.append(draw(scene, found))
    values = {"box": metrics["bbox"].compute(), "mask": metrics["segm"].compute()}
    names = {"map": "AP", "map_50": "AP50", "map_75": "AP75"}
    return {f"{kind} {names[key]}": float(values[kind][key]) for kind in values for key in names}, pictures


def draw(scene: Scene, found: dict[str, Tensor]) -> Image.Image:
    """The scene with boxes, digits, scores and masks of what is surely found."""
    sure = found["scores"] >= SURE
    labels, boxes, scores = found["labels"][sure] - 1, found["boxes"][sure], found["scores"][sure]
    colors = [COLORS[digit] for digit in labels.tolist()]
    image = scene.image
    if len(labels):
        image = draw_segmentation_masks(image, found["masks"][sure], alpha=0.5, colors=colors)
    picture = to_pil_image(image).resize((2 * SIDE, 2 * SIDE), Image.Resampling.BILINEAR)
    canvas, font = ImageDraw.Draw(picture), ImageFont.load_default(16)
    for digit, box, score, color in zip(labels.tolist(), (2 * boxes).tolist(), scores.tolist(), colors, strict=True):
        canvas.rectangle(box, outline=color, width=2)
        text, place = f"{digit}: {score:.2f}", (box[0], max(box[1] - 20, 0))
        canvas.rectangle(canvas.textbbox(place, text, font), fill=(0, 0, 0))
        canvas.text(place, text, color, font)
    return picture


EXAMPLE = Example(
    "detection", build_detector, losses, evaluate, steps=300, rate=6e-4, needs=("torchmetrics", "pycocotools")
)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    return run_example(EXAMPLE, __doc__ or "", argv)


if __name__ == "__main__":
    sys.exit(main())
