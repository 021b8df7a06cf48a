"""Which image comes when, and with which random draws: functions of the seed and the position, never of the past.

Nothing random is carried from step to step, so a run continued from any position repeats the one that never stopped,
with any number of loader processes.
"""

import hashlib
import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Sampler


class Draw(NamedTuple):
    """One image of an epoch: its place in the data and the seed of its augmentation."""

    item: int
    seed: int


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every one of ``parts``."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_host(seed: int) -> None:
    """Seed the generators that image transforms draw from: Python's, NumPy's and torch's on the CPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed every generator, those of the accelerators too."""
    seed_host(seed)
    torch.manual_seed(seed)


class TrainBatches(Sampler[list[Draw]]):
    """Shuffled batches of one rank's share of the data, from any step of any epoch.

    Every rank gets the same number of whole batches; images that do not fill one are left out of that epoch. With
    ``repeats`` above 1 each image is drawn so often, its copies one after the other over the ranks, and an epoch covers
    as many fewer images.

    Args:
        length: Images in the data.
        batch_size: Images per batch of one rank.
        seed: Of order and augmentation.
        rank: This process, of ``world_size``.
        world_size: Number of processes.
        repeats: Augmented copies of an image per epoch.
    """

    def __init__(
        self, length: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1, repeats: int = 1
    ) -> None:
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.rank, self.world_size, self.repeats = rank, world_size, max(repeats, 1)
        self.epoch = self.start = 0

    def __len__(self) -> int:
        """Batches of a whole epoch, wherever it starts."""
        return self.length // self.world_size // self.batch_size

    def updates(self, accumulate: int) -> int:
        """Optimizer updates of a whole epoch, each of ``accumulate`` batches or what is left of them."""
        return -(-len(self) // accumulate)

    def set_position(self, epoch: int, step: int = 0) -> None:
        """Let the next iteration begin at batch ``step`` of ``epoch``."""
        self.epoch, self.start = epoch, step

    def __iter__(self) -> Iterator[list[Draw]]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", self.epoch))
        order = torch.randperm(self.length, generator=generator)
        shown = order.repeat_interleave(self.repeats)[: self.length][self.rank :: self.world_size]
        for step in range(self.start, len(self)):
            first = step * self.batch_size
            batch = shown[first : first + self.batch_size].tolist()
            yield [self._draw(index, first + place) for place, index in enumerate(batch)]

    def _draw(self, index: int, place: int) -> Draw:
        copy = (place * self.world_size + self.rank) % self.repeats
        return Draw(index, derive_seed(self.seed, "image", self.epoch, index, copy))


class EvalBatches(Sampler[list[Draw]]):
    """Batches of one rank's share in the data's order; each image is in exactly one batch of one rank.

    Ranks may differ by a batch, so nothing that waits for the other ranks may happen between batches.
    """

    def __init__(self, length: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.indices = range(rank, length, world_size)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[list[Draw]]:
        for first in range(0, len(self.indices), self.batch_size):
            yield [Draw(index, 0) for index in self.indices[first : first + self.batch_size]]
