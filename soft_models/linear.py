"""The linear layer of all models: on some processors a convolution, which computes the same there in half the time."""

import platform
from pathlib import Path

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from soft_models.graphs import is_exporting

__all__ = ["Linear"]


def has_slow_products() -> bool:
    """Whether torch multiplies matrices by MKL, which takes the narrow instructions on processors of AMD, while oneDNN,
    by which it convolves, takes AVX-512.
    """
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    info = Path("/proc/cpuinfo")
    return "AuthenticAMD" in (info.read_text(encoding="utf-8") if info.exists() else platform.processor())


SLOW_PRODUCTS = has_slow_products()
FEWEST = 2**23  # multiply-adds, from where a convolution's overhead does not count


@register_notrace_module
class Linear(nn.Linear):
    """torch's linear layer; where ``SLOW_PRODUCTS``, large ones run as a 1 x 1 convolution over the tokens.

    In float32 on a CPU alone. What is exported, traced or scripted holds torch's operator.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not torch.jit.is_scripting():
            if self.takes_convolution(x):
                return self.convolve(x)
        return F.linear(x, self.weight, self.bias)

    @torch.jit.ignore
    def takes_convolution(self, x: Tensor) -> bool:
        if not SLOW_PRODUCTS or not isinstance(x, Tensor) or x.device.type != "cpu" or x.dtype != torch.float32:
            return False
        if type(self.weight) not in (nn.Parameter, Tensor):  # quantised, sharded
            return False
        if is_exporting() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu"):
            return False
        # Sizes that a graph leaves open must not decide anything.
        large = statically_known_true(x.numel() * self.out_features >= FEWEST)
        if not torch.compiler.is_compiling():
            return large
        if x.ndim != 3:
            return False
        # Of batches of one, and of maps that are one pixel wide, compilers lose the layout.
        return large and statically_known_true(x.shape[0] > 1) and statically_known_true(x.shape[1] % 2 == 0)

    @torch.jit.ignore
    def convolve(self, x: Tensor) -> Tensor:
        """The layer as a convolution over the tokens, laid out as some map."""
        batch, height, width = 1, x.numel() // self.in_features, 1
        if torch.compiler.is_compiling():
            batch, height, width = x.shape[0], x.shape[1] // 2, 2
        maps = x.reshape(batch, height, width, self.in_features).permute(0, 3, 1, 2)
        maps = F.conv2d(maps, self.weight[:, :, None, None], self.bias)
        return maps.permute(0, 2, 3, 1).reshape(*x.shape[:-1], self.out_features)
