"""Parts that the models share: image batches, maps and tokens, position tables, blocks, initial weights."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from timm.layers import (
    DropPath,
    Mlp,
    register_notrace_function,
    resample_abs_pos_embed_nhwc,
    trunc_normal_,
)
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from soft_models.graphs import is_graph

__all__ = [
    "MIN_SIZE",
    "Block",
    "ChunkedMlp",
    "ConvBNReLU",
    "PostNormBlock",
    "add_pos_embed",
    "init_module_weights",
    "prepare_images",
    "tokens_to_map",
]


MIN_SIZE = 32  # pixels along each side of an image: the last map is then 1 x 1


def tokens_to_map(x: Tensor, feat_size: tuple[int, int]) -> Tensor:
    """``(B, H * W, C)`` to ``(B, C, H, W)``; of contiguous tokens a view, in channels-last memory."""
    B, _, C = x.shape
    # Not transposed and then reshaped: that gives a batch of one strides which torch does not take for channels-last.
    return x.reshape(B, feat_size[0], feat_size[1], C).permute(0, 3, 1, 2)


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


class ConvBNReLU(nn.Sequential):
    """3 x 3 convolution, batch normalisation, ReLU: the unit of SOFT's stem and stage transitions."""

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

    def reparameterize(self) -> None:
        """Fold the normalisation into the convolution, for inference; timm's ``reparameterize_model`` calls it."""
        conv, norm = self[0].eval(), self[1].eval()
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.modules.batchnorm._BatchNorm):
            self[0], self[1] = fuse_conv_bn_eval(conv, norm), nn.Identity()


HIDDEN_ELEMENTS = 2**20  # of an MLP's hidden activations, which a CPU's cache holds with room for their neighbours


class ChunkedMlp(Mlp):
    """timm's two-layer MLP over tokens ``(B, N, C)``, in evaluation on a CPU in pieces.

    Hidden activations then stay in the cache, and memory for them is not fetched from the system anew each time. It is
    computed whole where gradients are recorded, in training, in graphs, and where hooks look inside.
    """

    def __init__(self, in_features: int, hidden_features: int, **kwargs: Any) -> None:
        super().__init__(in_features, hidden_features, **kwargs)
        self.rows = max(HIDDEN_ELEMENTS // hidden_features, 1)  # tokens in a piece

    def forward(self, x: Tensor) -> Tensor:
        if not torch.jit.is_scripting():
            if self.takes_pieces(x):
                return torch.cat([self.compute(part) for part in x.flatten(0, 1).split(self.rows)]).view(x.shape)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        x = self.norm(self.drop1(self.act(self.fc1(x))))
        return self.drop2(self.fc2(x))

    @torch.jit.ignore
    def takes_pieces(self, x: Tensor) -> bool:
        recorded = torch.is_grad_enabled() or is_graph() or not isinstance(x, Tensor)  # but a proxy of torch.fx
        if self.training or recorded:
            return False
        if x.device.type != "cpu" or x.shape[0] * x.shape[1] <= self.rows:
            return False
        return not any(module._forward_hooks or module._forward_pre_hooks for module in self.children())


class Block(nn.Module):
    """Pre-norm transformer block: ``x + attn(norm1(x))``, then ``x + mlp(norm2(x))``.

    Args:
        attn: Module called as ``attn(x, feat_size)``.
        dim: Token width C.
        mlp_ratio: Hidden width of the MLP over ``dim``.
        norm_layer: Called as ``norm_layer(dim)``.
        act_layer: Activation of the MLP.
        proj_drop: Dropout rate in the MLP.
        drop_path: Rate of stochastic depth, per sample, of both residual branches.

    Shape:
        ``(B, N, C)`` in and out.
    """

    MLP: ClassVar[type[nn.Module]] = ChunkedMlp

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
        self.norm1 = norm_layer(dim, **dd)
        self.attn = attn
        self.norm2 = norm_layer(dim, **dd)
        self.mlp = self.MLP(dim, int(dim * mlp_ratio), act_layer=act_layer, drop=proj_drop, **dd)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), feat_size))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PostNormBlock(Block):
    """Post-norm transformer block, SOFT's: ``norm1(x + attn(x))``, then ``norm2(x + mlp(x))``."""

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        x = self.norm1(x + self.drop_path(self.attn(x, feat_size)))
        return self.norm2(x + self.drop_path(self.mlp(x)))


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
