"""Train an image classifier on a folder of images, with timm's options.

    python train.py --config configs/soft_tiny_in1k.yaml --data-dir /data/imagenet
    python train.py --config configs/finetune.yaml --data-dir /data/pets --experiment pets
    torchrun --nproc-per-node 8 train.py --config ...            several GPUs
    python train.py ... --experiment pets --resume auto          continue, exactly

``python train.py --help`` lists the options. The installed package has the same as ``soft-train``.
"""

import sys

from soft_models.training.train import main

if __name__ == "__main__":
    sys.exit(main())
