"""TensorBoard scalars of a run."""

import math
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class ScalarLog:
    """One scalar per metric and epoch; a resumed run takes back what the epochs it repeats had written.

    Args:
        folder: The run's.
        first_epoch: Of this process.
    """

    def __init__(self, folder: Path, first_epoch: int) -> None:
        self.writer = SummaryWriter(str(folder), purge_step=first_epoch)

    def add(self, epoch: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of an epoch through to the disk."""
        for name, value in scalars.items():
            if not math.isnan(value):
                self.writer.add_scalar(name, value, epoch)
        self.writer.flush()

    def close(self) -> None:
        """Close the file."""
        self.writer.close()
