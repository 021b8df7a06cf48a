"""One name of each family, for tests that do not need them all; and weights under which every part matters."""

import itertools
import zlib

import torch
from torch import nn

import soft_models  # noqa: F401  (registers the names)
from soft_models.registry import registered_names, split_size

__all__ = ["enliven", "family_names", "registered_names"]


def family_names() -> list[str]:
    """The smallest name of each family; names that differ in nothing but their size word are one family.

    So are those that differ in the attention alone, since ``test_attention.py`` covers each of these.
    """
    smallest: dict[str, str] = {}
    for name in registered_names():
        family = "pyramid_tiny" if name.startswith("pyramid_tiny_") else split_size(name)[0]
        smallest.setdefault(family, name)
    return list(smallest.values())


@torch.no_grad()
def enliven(model: nn.Module) -> nn.Module:
    """Random weights of ordinary size: fresh ones leave attention flat and biases zero, which hides faults.

    Each tensor's values depend on its name and shape alone, also inside a feature extractor.
    """
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        seed = zlib.crc32(name.removeprefix("model.").encode())
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
        if name.endswith("num_batches_tracked"):
            continue
        if name.endswith("running_var"):
            tensor.copy_(0.5 + noise.square())
        elif name.endswith((".bias", "running_mean")):
            tensor.copy_(0.1 * noise)
        elif tensor.ndim < 2:
            tensor.copy_(1.0 + 0.1 * noise)
        else:
            tensor.copy_(noise * (0.5 if len(tensor) == 1 else tensor[0].numel() ** -0.5))
    return model
