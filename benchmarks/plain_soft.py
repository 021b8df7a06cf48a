"""The released SOFT written plainly, step by step, as a yardstick for speed: the same numbers."""

from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soft_models.attention.soft import SoftAttention
from soft_models.layers import Block, ConvBNReLU, TanhGELU
from soft_models.linear import Linear

__all__ = ["make_plain"]


def make_plain(model: nn.Module) -> nn.Module:
    """Give ``model`` the plain SOFT attention, and its convolutions maps in the layout of the release, in place."""
    for module in model.modules():
        if isinstance(module, SoftAttention):
            module.__dict__["forward"] = MethodType(plain_forward, module)
        elif isinstance(module, ConvBNReLU):
            module.register_forward_pre_hook(lambda _, maps: (maps[0].contiguous(),))
        elif isinstance(module, Linear):
            module.__dict__["takes_convolution"] = lambda _: False
        elif isinstance(module, Block):
            module.mlp.register_forward_hook(lambda *_: None)  # looked into, it is computed whole
        elif isinstance(module, TanhGELU):
            module.__dict__["takes_sigmoid"] = lambda _: False
    return model


def plain_forward(self: SoftAttention, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
    """SOFT with convolutional landmarks, not normalised: queries and values per head, N x M products in order."""
    assert self.landmarks.conv is not None and self.local is not None
    B, N, C = x.shape
    h, d = self.num_heads, C // self.num_heads
    q, v = (project(x).reshape(B, N, h, d).transpose(1, 2) for project in (self.q, self.v))
    q = q * d**-0.25
    maps = q.reshape(B * h, *feat_size, d).permute(0, 3, 1, 2)
    landmarks = self.landmarks.conv(maps).flatten(2).transpose(1, 2).reshape(B, h, -1, d)
    landmarks = F.gelu(self.landmarks.norm(landmarks))
    left = torch.exp(-squared_distances(q, landmarks) / 2)  # (B, h, N, M)
    kernel = torch.exp(-squared_distances(landmarks, landmarks) / 2)
    out = (left @ newton(kernel, self.newton_iters)) @ (left.transpose(-1, -2) @ v)
    local = v.reshape(B, h, *feat_size, d).permute(0, 4, 1, 2, 3).reshape(B * d, h, *feat_size)
    local = F.conv2d(local, self.local.weight, padding=self.local.weight.shape[-1] // 2, groups=h)
    out = out + local.reshape(B, d, h, N).permute(0, 2, 3, 1)
    return self.proj(out.transpose(1, 2).reshape(B, N, C))


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Squares summed by products with ones, as released."""
    ones = torch.ones_like(b).transpose(-1, -2)
    return a**2 @ ones + torch.ones_like(a) @ (b**2).transpose(-1, -2) - 2 * (a @ b.transpose(-1, -2))


def newton(kernel: Tensor, iters: int) -> Tensor:
    scale = 1.8 / kernel.sum(-1).amax(-1)[..., None, None] ** 2
    kernel = kernel + 0.01 * torch.eye(kernel.shape[-1])
    x = scale * kernel
    for _ in range(iters):
        x = 2 * x - x @ kernel @ x
    return x
