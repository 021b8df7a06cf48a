"""Validate an image classifier: ``python validate.py --help``. Installed, the same is called ``soft-validate``."""

import sys

from soft_models.training.validate import main

if __name__ == "__main__":
    sys.exit(main())
