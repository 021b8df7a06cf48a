"""What the tests of the models share: small models of each family, images, comparisons."""

import functools
import io
import itertools
import operator
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import soft_models  # noqa: F401  (registers the names)
from soft_models.registry import registered_names, split_size


def family_names() -> list[str]:
    """The smallest name of each family; names that differ in nothing but their size word are one family.

    So are the ``pyramid_tiny_*``: they differ in the attention alone, and ``test_attention.py`` covers each of these.
    """
    smallest: dict[str, str] = {}
    for name in registered_names():
        family = "pyramid_tiny" if name.startswith("pyramid_tiny_") else split_size(name)[0]
        smallest.setdefault(family, name)
    return list(smallest.values())


PYRAMIDS = [name for name in family_names() if "_vit_" not in name]
VIT = "cosformer_vit_tiny_patch16_224"


FAST = family_names()
over_families = pytest.mark.parametrize("name", FAST)
over_names = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in registered_names()]
)

SIZE = (48, 80)  # pixels: not square, no multiples of 32
CLASSES = 10
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF_ERROR = 0.02  # of the norm: what half precision may cost
PYRAMID: dict[str, Any] = {"embed_dims": (16, 32, 48, 64), "depths": (1, 1, 2, 1), "num_heads": (1, 2, 3, 4)}
SMALL_VIT: dict[str, Any] = {"embed_dim": 48, "depth": 3, "num_heads": 3}
BLOCK = re.compile(r"(?:^|\.)blocks\.\d+$")


@functools.cache
def full(name: str) -> nn.Module:
    """The registered model on the meta device: for its metadata."""
    return timm.create_model(name, device="meta").eval()


def small_args(name: str) -> dict[str, Any]:
    """Constructor arguments of :func:`small`."""
    return {"img_size": 64, "num_classes": CLASSES, **widths(name)}


def widths(name: str) -> dict[str, Any]:
    """Constructor arguments that make a model of the family of ``name`` small."""
    return SMALL_VIT if "_vit_" in name else PYRAMID


def small(name: str, **kwargs: Any) -> nn.Module:
    """A small model of the family of ``name``, in eval mode, of random weights under which every part matters."""
    model = timm.create_model(name, **(small_args(name) | kwargs)).eval()
    return enliven(model)


@functools.cache
def shared(name: str) -> nn.Module:
    """One small model for the tests that change nothing in it."""
    return small(name)


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


def few_newton_steps(model: nn.Module) -> nn.Module:
    """The same model with few steps of an iterative inverse, whose number only makes compilers slow."""
    for module in model.modules():
        if hasattr(module, "newton_iters"):
            module.newton_iters = 3
    return model


def images(batch: int = 2, size: tuple[int, int] = SIZE, chans: int = 3) -> Tensor:
    return torch.randn(batch, chans, *size, generator=torch.Generator().manual_seed(2))


def map_sizes(model: nn.Module, size: tuple[int, int]) -> list[tuple[int, int]]:
    """Height and width of every map, after the strides that the model gives: rounded up, so that nothing is cropped."""
    return [(-(-size[0] // info["reduction"]), -(-size[1] // info["reduction"])) for info in model.feature_info]


def shapes(maps: list[Tensor]) -> list[tuple[int, int]]:
    return [(y.shape[-2], y.shape[-1]) for y in maps]


def close(actual: Tensor, expected: Tensor, what: str, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal but for the rounding of matrix products, which depends on how memory is aligned."""
    close(actual, expected, what, rtol=1e-5, atol=1e-5)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def through_file(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """An exported program saved and read back, after a check that it holds no operation but PyTorch's own."""
    stream = io.BytesIO()
    torch.export.save(program, stream)
    stream.seek(0)
    program = torch.export.load(stream)
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
    foreign = [
        target
        for target in targets
        if not (isinstance(target, torch._ops.OpOverload) and target.namespace == "aten")
        and getattr(target, "__module__", "") != operator.getitem.__module__
    ]
    assert not foreign, f"operations that are not PyTorch's own: {foreign}"
    return program


def loss_of(*outputs: Tensor) -> Tensor:
    """A sum with random weights: a plain one is constant behind a layer normalisation."""
    generator = torch.Generator().manual_seed(3)
    return sum(((y * torch.randn(y.shape, generator=generator).to(y.dtype)).sum() for y in outputs), torch.zeros(()))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter; fails with the names of those that have none or one that is not finite."""
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert not without, f"parameters without a gradient: {without}"
    infinite = [name for name, p in model.named_parameters() if not p.grad.isfinite().all()]
    assert not infinite, f"parameters with a gradient that is not finite: {infinite}"
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if BLOCK.search(name)}


def save(model: nn.Module, folder: Path) -> str:
    path = folder / "weights.pth"
    torch.save(model.state_dict(), path)
    return str(path)


def load(name: str, file: str, **kwargs: Any) -> nn.Module:
    """Weights in a file of ``CLASSES`` classes through timm's pretrained path, which adapts head and channels."""
    overlay = {"file": file, "num_classes": CLASSES}
    arguments = small_args(name) | kwargs
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **arguments).eval()


def assert_equal_with_gradients(
    actual: Tensor, expected: Tensor, inputs: Sequence[Tensor], rtol: float = 1e-8, atol: float = 1e-9
) -> None:
    """Outputs and the gradients that they send to ``inputs``."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
    cotangent = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(actual, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
