"""Validate a checkpoint, or published weights, on a folder of images, with timm's options.

    python validate.py --data-dir /data/pets --checkpoint output/train/pets/model_best.pth.tar
    python validate.py --data-dir /data/pets --split test --checkpoint ...
    python validate.py --data-dir /data/imagenet --model resnet18

Prints one JSON line. The installed package has the same as ``soft-validate``.
"""

import sys

from soft_models.training.validate import main

if __name__ == "__main__":
    sys.exit(main())
