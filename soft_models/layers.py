"""Parts that the models share: image batches, position tables, blocks, initial weights."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import timm.layers
import torch
import torch.nn.functional as F
from timm.layers import (
    DropPath,
    register_notrace_function,
    resample_abs_pos_embed_nhwc,
    trunc_normal_,
)
from timm.models import checkpoint
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_conv_bn_weights

from soft_models.graphs import is_graph, is_unobserved
from soft_models.linear import Linear

__all__ = [
    "MIN_SIZE",
    "Block",
    "Blocks",
    "ConvBNReLU",
    "Mlp",
    "PostNormBlock",
    "TanhGELU",
    "add_pos_embed",
    "in_groups",
    "init_module_weights",
    "prepare_images",
]


MIN_SIZE = 32  # pixels along each side of an image: the last map is then 1 x 1


@register_notrace_function
def prepare_images(x: Tensor, minimum: int = MIN_SIZE) -> Tensor:
    """The image batch ``(B, C, H, W)``, on a CPU in channels-last memory: there all convolutions are faster, and maps
    turn to tokens and back without a copy.

    Raises:
        ValueError: It is no batch, or a side has fewer than ``minimum`` pixels.
    """
    if x.ndim != 4:
        raise ValueError(f"images must be a batch (B, C, H, W), got {x.ndim} dimensions")
    if x.shape[-2] < minimum or x.shape[-1] < minimum:
        raise ValueError(f"images must be at least {minimum} x {minimum} pixels, got {x.shape[-2]} x {x.shape[-1]}")
    if x.device.type != "cpu":
        return x
    if not torch.jit.is_scripting():
        if not is_graph():  # whose open sizes this would bind; but vmap takes no memory_format
            return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return x.to(memory_format=torch.channels_last)


@register_notrace_function
def add_pos_embed(x: Tensor, pos_embed: Tensor, feat_size: tuple[int, int]) -> Tensor:
    """Add a position table to tokens, resized bilinearly where the map differs from the table's own grid.

    Args:
        x: ``(B, H * W, C)``.
        pos_embed: ``(1, grid height, grid width, C)``.
        feat_size: ``(H, W)``.
    """
    pos_embed = resample_abs_pos_embed_nhwc(pos_embed, [feat_size[0], feat_size[1]], "bilinear", antialias=False)
    return x + pos_embed.flatten(1, 2)


GROUP_ELEMENTS = 2**23  # of the widest activations of all images at work, beyond which they leave a CPU's cache


def in_groups(module: nn.Module, compute: Callable[..., Tensor], growth: float, x: Tensor, *args: Any) -> Tensor:
    """``compute(x, *args)``, a method of ``module`` that treats each image by itself: where it shows nowhere, a few
    images at a time, so that activations stay in the cache and their buffers are used again.

    Args:
        growth: Elements of the widest activations over those of ``x``.
    """
    if is_graph() or not isinstance(x, Tensor):
        return compute(x, *args)
    groups = math.ceil(x.shape[0] / max(GROUP_ELEMENTS // (growth * x.shape[1:].numel()), 1))
    if groups <= 1 or not is_unobserved(module, x):
        return compute(x, *args)
    return torch.cat([compute(group, *args) for group in x.chunk(groups)])


class ConvBNReLU(nn.Sequential):
    """3 x 3 convolution, batch normalisation, ReLU: the unit of SOFT's stem and stage transitions.

    Large maps are normalised by the weights of the convolution where that shows nowhere, which saves a map.
    """

    def __init__(
        self,
        in_chans: int,
        out_chans: int,
        stride: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            nn.Conv2d(in_chans, out_chans, 3, stride, 1, **dd),  # with a bias, although the norm follows: as released
            nn.BatchNorm2d(out_chans, **dd),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        if not torch.jit.is_scripting():
            if self.merges(x):
                return self.merged(x)
        for module in self:
            x = module(x)
        return x

    @torch.jit.ignore
    def merges(self, x: Tensor) -> bool:
        conv: Any = self[0]
        norm: Any = self[1]
        if len(self) != 3 or type(conv) is not nn.Conv2d or type(norm) is not nn.BatchNorm2d:
            return False
        if norm.running_mean is None or not is_unobserved(self, x):
            return False
        return x.shape[0] * x.shape[2] * x.shape[3] > conv.weight[0].numel() * conv.stride[0] ** 2

    @torch.jit.ignore
    def merged(self, x: Tensor) -> Tensor:
        conv: Any = self[0]
        norm: Any = self[1]
        weight, bias = fuse_conv_bn_weights(
            conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
        )
        return self[2](F.conv2d(x, weight, bias, conv.stride, conv.padding))

    def reparameterize(self) -> None:
        """Fold the normalisation into the convolution, for inference; timm's ``reparameterize_model`` calls it."""
        conv, norm = self[0].eval(), self[1].eval()
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.modules.batchnorm._BatchNorm):
            self[0], self[1] = fuse_conv_bn_eval(conv, norm), nn.Identity()


TANH_GELU_SCALE = 2 * math.sqrt(2 / math.pi)


class TanhGELU(nn.Module):
    """The tanh form of GELU, written with the sigmoid where that shows nowhere: ``tanh(z) = 2 sigmoid(2 z) - 1``.

    CPUs take less time for the sigmoid; the outputs agree to 5e-7.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not torch.jit.is_scripting():
            if self.takes_sigmoid(x):
                y = x.square().mul_(0.044715 * TANH_GELU_SCALE).add_(TANH_GELU_SCALE)
                return y.mul_(x).sigmoid_().mul_(x)
        return F.gelu(x, approximate="tanh")

    @torch.jit.ignore
    def takes_sigmoid(self, x: Tensor) -> bool:
        return is_unobserved(self, x) and x.dtype in (torch.float32, torch.float64)


class Mlp(timm.layers.Mlp):
    """timm's MLP, of our linear layers."""

    def __init__(self, in_features: int, hidden_features: int, **kwargs: Any) -> None:
        super().__init__(in_features, hidden_features, **kwargs)
        self.fc1.__class__ = self.fc2.__class__ = Linear  # timm takes no class of them


HIDDEN_ELEMENTS = 2**21  # of an MLP's hidden activations, which a CPU's cache holds with room for their neighbours


class Block(nn.Module):
    """Pre-norm transformer block: ``x + attn(norm1(x))``, then ``x + mlp(norm2(x))``.

    All but the attention treats each token by itself. In evaluation on a CPU it takes a few tokens at a time, so that
    activations stay in the cache, and writes over the attention's output, since large buffers come page by page from
    the system; but not where gradients are recorded, in graphs, or where hooks look inside.

    Args:
        attn: Module called as ``attn(x, feat_size)``; what it returns is written over, as said.
        dim: Token width C.
        mlp_ratio: Hidden width of the MLP over ``dim``.
        norm_layer: Called as ``norm_layer(dim)``.
        act_layer: Activation of the MLP.
        proj_drop: Dropout rate in the MLP.
        drop_path: Rate of stochastic depth, per sample, of both residual branches.

    Shape:
        ``(B, N, C)`` in and out.

    Raises:
        ValueError: ``mlp_ratio`` leaves the MLP without a hidden unit.
    """

    MLP: ClassVar[type[nn.Module]] = Mlp

    def __init__(
        self,
        attn: nn.Module,
        dim: int,
        mlp_ratio: float,
        norm_layer: Callable[..., nn.Module],
        act_layer: type[nn.Module] = nn.GELU,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        hidden = int(dim * mlp_ratio)
        if hidden < 1:
            raise ValueError(f"mlp_ratio must give the MLP a hidden unit, got {mlp_ratio} of {dim}")
        self.norm1 = norm_layer(dim, **dd)
        self.attn = attn
        self.norm2 = norm_layer(dim, **dd)
        self.mlp = self.MLP(dim, hidden, act_layer=act_layer, drop=proj_drop, **dd)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.growth = mlp_ratio
        self.piece = max(HIDDEN_ELEMENTS // hidden, 1)  # tokens

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        y = self.attend(x, feat_size)
        if not torch.jit.is_scripting():
            if self.takes_pieces(x):
                return self.combine_in_pieces(x, y)
        return self.combine(x, y, feat_size)

    def attend(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """The attention's branch."""
        return self.attn(self.norm1(x), feat_size)

    def combine(self, x: Tensor, y: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """The block's output from its input and the attention's branch, token by token."""
        x = x + self.drop_path(y)
        return x + self.drop_path(self.mlp_branch(self.norm2(x), feat_size))

    def mlp_branch(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """The MLP's branch; this one does not look at the map."""
        return self.mlp(x)

    @torch.jit.ignore
    def combine_in_pieces(self, x: Tensor, y: Tensor) -> Tensor:
        shape = x.shape
        x, y = x.reshape(1, -1, shape[-1]), y.reshape(1, -1, shape[-1])
        out = y
        for start in range(0, x.shape[1], self.piece):
            tokens = slice(start, start + self.piece)
            piece = x[:, tokens]
            done = self.combine(piece, y[:, tokens], (piece.shape[1], 1))
            if out.dtype != done.dtype:  # under autocast
                out = torch.empty_like(out, dtype=done.dtype)
            out[:, tokens] = done
        return out.view(shape)

    @torch.jit.ignore
    def takes_pieces(self, x: Tensor) -> bool:
        # What was put in the place of a part, as adapters are, may mix tokens.
        by_token = type(self.mlp) is Mlp and all(isinstance(norm, nn.LayerNorm) for norm in (self.norm1, self.norm2))
        return by_token and is_unobserved(self, x) and x.shape[0] * x.shape[1] > self.piece


class Blocks(nn.Sequential):
    """Blocks in a row, called as ``blocks(x, feat_size)``; on a CPU a few images at a time, see :func:`in_groups`.

    Shape:
        ``(B, N, C)`` in and out.
    """

    def __init__(self, *blocks: Block) -> None:
        super().__init__(*blocks)
        self.grad_checkpointing = False
        self.growth = max((getattr(block, "growth", 1.0) for block in self), default=1.0)

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:  # type: ignore[override]
        if not torch.jit.is_scripting():
            return in_groups(self, self.compute, self.growth, x, feat_size)
        return self.compute(x, feat_size)

    def compute(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        for block in self:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = checkpoint(block, x, feat_size)
            else:
                x = block(x, feat_size)
        return x


class PostNormBlock(Block):
    """Post-norm transformer block, SOFT's: ``norm1(x + attn(x))``, then ``norm2(x + mlp(x))``."""

    def attend(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        return self.attn(x, feat_size)

    def combine(self, x: Tensor, y: Tensor, feat_size: tuple[int, int]) -> Tensor:
        x = self.norm1(x + self.drop_path(y))
        return self.norm2(x + self.drop_path(self.mlp_branch(x, feat_size)))


def init_module_weights(module: nn.Module, needs_reset: bool = True) -> None:
    """Initialise one module, for ``model.apply``: Linear from a truncated normal of 0.02, the rest as torch does.

    Args:
        needs_reset: Call ``reset_parameters`` first; needed where storage is fresh (``to_empty``).
    """
    reset = getattr(module, "reset_parameters", None)
    if needs_reset and callable(reset):
        reset()
    if isinstance(module, nn.Linear) and not module.weight.is_meta:  # on meta, the time of a hundred no-ops
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
