"""Train an image classifier: ``python train.py --help``. Installed, the same is called ``soft-train``."""

import sys

from soft_models.training.train import main

if __name__ == "__main__":
    sys.exit(main())
