"""Vicinity Vision Transformer: a four-stage pyramid of vicinity attention and depthwise-convolution MLPs."""

import math
from typing import Any

import torch
from timm.layers import calculate_drop_path_rates
from torch import Tensor, nn

from soft_models.attention import create_attention
from soft_models.attention.tokens import tokens_to_map
from soft_models.backbone import PyramidBackbone, check_lengths, resolve_act, resolve_norm
from soft_models.graphs import is_unobserved
from soft_models.layers import Block, Blocks, init_module_weights
from soft_models.linear import Linear

__all__ = ["VicinityVisionTransformer"]


class OverlapPatchEmbed(nn.Module):
    """Strided convolution with overlapping windows, then LayerNorm over the channels.

    Shape:
        ``(B, C_in, H, W)`` to ``(B, C, ceil(H / stride), ceil(W / stride))``.
    """

    def __init__(
        self,
        in_chans: int,
        dim: int,
        kernel_size: int,
        stride: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.proj = nn.Conv2d(in_chans, dim, kernel_size, stride, kernel_size // 2, **dd)
        self.norm = nn.LayerNorm(dim, eps=1e-5, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvMlp(nn.Module):
    """MLP with a 3 x 3 depthwise convolution in front of its activation, PVTv2's (Wang et al. 2021, arXiv:2106.13797).

    Shape:
        ``(B, H * W, C)`` in and out.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        act_layer: type[nn.Module] = nn.GELU,
        drop: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.fc1 = Linear(dim, hidden_dim, **dd)
        self.dwconv = nn.Conv2d(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim, **dd)
        self.act = act_layer()
        self.fc2 = Linear(hidden_dim, dim, **dd)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        return self.drop(self.fc2(self.mix(self.fc1(x), feat_size)))

    def mix(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Depthwise convolution and activation of the hidden units."""
        x = self.dwconv(tokens_to_map(x, feat_size)).flatten(2).transpose(1, 2)
        if not torch.jit.is_scripting():
            if self.acts_in_place(x):
                return torch.ops.aten.gelu_(x)
        return self.drop(self.act(x))

    @torch.jit.ignore
    def acts_in_place(self, x: Tensor) -> bool:
        # A fresh buffer for the largest tensor of the model costs more than the function itself.
        return type(self.act) is nn.GELU and self.act.approximate == "none" and is_unobserved(self, x)


class VicinityBlock(Block):
    """Pre-norm block whose MLP sees the map as well, see :class:`~soft_models.layers.Block`."""

    MLP = ConvMlp

    def mlp_branch(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        return self.mlp(x, feat_size)


class VicinityStage(nn.Module):
    """One stage: patch embedding, blocks, norm.

    Shape:
        ``(B, C_in, H, W)`` to ``(B, C, H', W')``.
    """

    def __init__(self, downsample: nn.Module, blocks: list[Block], norm: nn.Module) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = Blocks(*blocks)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        H, W = x.shape[2], x.shape[3]
        x = self.blocks(x.flatten(2).transpose(1, 2), (H, W))
        return tokens_to_map(self.norm(x), (H, W))


class VicinityVisionTransformer(PyramidBackbone):
    """Vicinity Vision Transformer, VVT (Sun et al. 2022, arXiv:2206.10552).

    Four stages of pre-norm blocks with vicinity attention and depthwise-convolution MLPs at strides 4, 8, 16 and 32,
    overlapping patch embeddings in between, a norm behind every stage, mean pooling. There is no position table, no
    class token and no softmax, and the cost grows with the number of pixels. Any image from 32 x 32 pixels up works:
    the maps are ``ceil(H / 4)``, ``ceil(H / 8)``, ``ceil(H / 16)`` and ``ceil(H / 32)`` high, and as wide likewise.

    Args:
        img_size: Image size in pixels, which no parameter depends on; it is only checked against the minimum.
        in_chans: Image channels.
        num_classes: Classes of the head; 0 for none.
        global_pool: ``"avg"`` or ``""`` (the map).
        embed_dims: Token width of each stage.
        depths: Blocks of each stage.
        num_heads: Attention heads of each stage.
        mlp_ratios: Hidden width of the MLP over the token width, of each stage.
        feature_reduction: Token width over the width of queries, keys and values.
        gate_reduction: Token width over the hidden width of the attention's gate.
        clamp: The released attention, which limits intermediate results in magnitude; False for the plain one.
        drop_rate: Dropout rate before the head.
        proj_drop_rate: Dropout rate in attention and MLP, behind their projections.
        drop_path_rate: Stochastic depth rate of the last block; it grows linearly from 0 at the first.
        norm_layer: Normalisation of blocks and stages, timm's name or a class; None for LayerNorm with an eps of 1e-6.
        act_layer: Activation of the MLP, timm's name or a class.

    Shape:
        ``(B, in_chans, H, W)`` to ``(B, num_classes)``.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dims: tuple[int, ...] = (96, 160, 320, 512),
        depths: tuple[int, ...] = (2, 2, 2, 2),
        num_heads: tuple[int, ...] = (1, 2, 5, 8),
        mlp_ratios: tuple[float, ...] = (8, 8, 4, 4),
        feature_reduction: int = 2,
        gate_reduction: int = 1,
        clamp: bool = True,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_layer: str | type[nn.Module] | None = None,
        act_layer: str | type[nn.Module] = nn.GELU,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(img_size, in_chans, num_classes, global_pool, embed_dims, drop_path_rate, num_prefix_tokens=0)
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        check_lengths(depths=depths, num_heads=num_heads, mlp_ratios=mlp_ratios)
        norm = resolve_norm(norm_layer, eps=1e-6)
        act = resolve_act(act_layer)
        attn_kwargs = {
            "feature_reduction": feature_reduction,
            "gate_reduction": gate_reduction,
            "clamp": clamp,
            "proj_drop": proj_drop_rate,
        }

        self.patch_embed = OverlapPatchEmbed(in_chans, embed_dims[0], 7, 4, **dd)
        drop_path_rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        stages = []
        for i, dim in enumerate(embed_dims):
            blocks: list[Block] = []
            for rate in drop_path_rates[i]:
                attn = create_attention("vicinity", dim, num_heads=num_heads[i], **attn_kwargs, **dd)
                blocks.append(VicinityBlock(attn, dim, mlp_ratios[i], norm, act, proj_drop_rate, rate, **dd))
            downsample = OverlapPatchEmbed(embed_dims[i - 1], dim, 3, 2, **dd) if i else nn.Identity()
            stages.append(VicinityStage(downsample, blocks, norm(dim, **dd)))
        self.stages = nn.Sequential(*stages)
        self.add_head(nn.Identity(), drop_rate, **dd)

    @staticmethod
    def init_module(module: nn.Module, needs_reset: bool) -> None:
        """Initialise one module: Linear from a truncated normal of 0.02, convolutions by fan-out, as PVTv2 does."""
        init_module_weights(module, needs_reset)
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
            nn.init.normal_(module.weight, std=math.sqrt(2.0 / fan_out))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
