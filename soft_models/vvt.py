"""Vicinity Vision Transformer: a four-stage pyramid of vicinity attention and depthwise-convolution MLPs."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers import DropPath, LayerNorm, calculate_drop_path_rates, get_act_layer, get_norm_layer, trunc_normal_
from timm.models import checkpoint
from timm.models._features import feature_take_indices  # private: timm has no public name for it
from torch import Tensor, nn

from soft_models.attention import create_attention
from soft_models.layers import check_min_size, tokens_to_map
from soft_models.pyramid import to_size, update_model_input_size

__all__ = ["VicinityVisionTransformer"]

POOLS = ("avg", "")


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
        self.fc1 = nn.Linear(dim, hidden_dim, **dd)
        self.dwconv = nn.Conv2d(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim, **dd)
        self.act = act_layer()
        self.exact_gelu = type(self.act) is nn.GELU and self.act.approximate == "none"
        self.fc2 = nn.Linear(hidden_dim, dim, **dd)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        x = self.dwconv(tokens_to_map(self.fc1(x), feat_size)).flatten(2).transpose(1, 2)
        if self.exact_gelu and not torch.is_grad_enabled():
            # In place: a fresh buffer for the largest tensor of the model costs more than the function itself.
            x = torch.ops.aten.gelu_(x)
        else:
            x = self.act(x)
        return self.drop(self.fc2(self.drop(x)))


class VicinityBlock(nn.Module):
    """Pre-norm block whose attention and MLP both see the map.

    Shape:
        ``(B, H * W, C)`` in and out.
    """

    def __init__(
        self,
        attn: nn.Module,
        dim: int,
        mlp_ratio: float,
        norm_layer: Callable[..., nn.Module],
        act_layer: type[nn.Module],
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
        self.mlp = ConvMlp(dim, int(dim * mlp_ratio), act_layer, proj_drop, **dd)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), feat_size))
        return x + self.drop_path(self.mlp(self.norm2(x), feat_size))


class VicinityStage(nn.Module):
    """One stage: patch embedding, blocks, norm.

    Shape:
        ``(B, C_in, H, W)`` to ``(B, C, H', W')``.
    """

    def __init__(self, downsample: nn.Module, blocks: list[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.grad_checkpointing = False
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        H, W = x.shape[2], x.shape[3]
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = checkpoint(block, x, (H, W))
            else:
                x = block(x, (H, W))
        return tokens_to_map(self.norm(x), (H, W))


class VicinityVisionTransformer(nn.Module):
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
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        per_stage = {"embed_dims": embed_dims, "depths": depths, "num_heads": num_heads, "mlp_ratios": mlp_ratios}
        for name, values in per_stage.items():
            if len(values) != 4:
                raise ValueError(f"{name} needs 4 entries, one per stage, got {values}")
        to_size(img_size)
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = check_pool(global_pool)
        self.num_features = self.head_hidden_size = embed_dims[-1]
        self.feature_info = [
            {"num_chs": dim, "reduction": 4 * 2**i, "module": f"stages.{i}"} for i, dim in enumerate(embed_dims)
        ]
        norm = partial(LayerNorm, eps=1e-6) if norm_layer is None else get_norm_layer(norm_layer)
        act = get_act_layer(act_layer)
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
            blocks: list[nn.Module] = []
            for rate in drop_path_rates[i]:
                attn = create_attention("vicinity", dim, num_heads=num_heads[i], **attn_kwargs, **dd)
                blocks.append(VicinityBlock(attn, dim, mlp_ratios[i], norm, act, proj_drop_rate, rate, **dd))
            downsample = OverlapPatchEmbed(embed_dims[i - 1], dim, 3, 2, **dd) if i else nn.Identity()
            stages.append(VicinityStage(downsample, blocks, norm(dim, **dd)))
        self.stages = nn.Sequential(*stages)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(self.num_features, num_classes, **dd) if num_classes > 0 else nn.Identity()
        self.init_weights(needs_reset=False)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialise all weights.

        Args:
            mode: Only ``""``, PVTv2's scheme; there for timm's signature.
            needs_reset: Reset what modules initialised on construction too; needed after ``to_empty``.
        """
        if mode:
            raise ValueError(f"unknown init mode {mode!r}; choose ''")
        self.apply(partial(init_weights, needs_reset=needs_reset))

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Groups for layer decay: a patch embedding goes with its stage's first block, a norm with the last."""
        return {
            "stem": r"^patch_embed",
            "blocks": r"^stages\.(\d+)"
            if coarse
            else [
                (r"^stages\.(\d+)\.downsample", (0,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^stages\.(\d+)\.norm", (99999,)),
            ],
        }

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that weight decay leaves alone, beyond biases and norms: none."""
        return set()

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        for stage in self.stages:
            stage.grad_checkpointing = enable  # type: ignore[assignment]  # torch types it as Module

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New head of ``num_classes`` classes, 0 for none; ``global_pool=None`` keeps the pooling."""
        if global_pool is not None:
            self.global_pool = check_pool(global_pool)
        self.num_classes = num_classes
        weight = self.patch_embed.proj.weight
        if num_classes > 0:
            self.head = nn.Linear(self.num_features, num_classes, device=weight.device, dtype=weight.dtype)
            init_weights(self.head, needs_reset=False)
            self.head.train(self.training)
        else:
            self.head = nn.Identity()

    @torch.jit.ignore
    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Note another image size in pixels; the model takes any."""
        size = to_size(img_size)
        if update_model_input_size is not None:
            update_model_input_size(self, size)

    def forward_features(self, x: Tensor) -> Tensor:
        """Normalised map ``(B, C, H / 32, W / 32)`` of the last stage."""
        x = check_min_size(x)
        return self.stages(self.patch_embed(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pooling, dropout and classifier; ``pre_logits`` stops before the classifier."""
        if self.global_pool == "avg":
            x = x.mean(dim=(2, 3))
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    @torch.jit.ignore
    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Maps of the chosen stages, strides 4, 8, 16, 32, each behind its stage's norm.

        Args:
            x: ``(B, in_chans, H, W)``.
            indices: Stages by number, or an int for the last n, None for all; returned in order of execution.
            norm: In timm's signature; every map is normalised.
            stop_early: Stop behind the last chosen stage.
            output_fmt: ``"NCHW"``.
            intermediates_only: Return the maps alone.

        Returns:
            The maps, or ``(forward_features(x), maps)``.

        Raises:
            ValueError: Another ``output_fmt``.
            AssertionError: An index out of range (timm's own check).
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', got {output_fmt!r}")
        take, last = feature_take_indices(len(self.stages), indices)
        maps = []
        x = self.patch_embed(check_min_size(x))
        for i, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x = stage(x)
            if i in take:
                maps.append(x)
        return maps if intermediates_only else (x, maps)

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the stages behind the last chosen one; returns the chosen stages' numbers.

        ``prune_norm`` is in timm's signature and has no effect: the norms belong to the stages.
        """
        take, last = feature_take_indices(len(self.stages), indices)
        truncated = last < len(self.stages) - 1
        self.stages = self.stages[: last + 1]
        if truncated:
            self.num_features = self.head_hidden_size = self.feature_info[last]["num_chs"]
        if prune_head or truncated:
            self.reset_classifier(0, "")
        return sorted(set(take))


def init_weights(module: nn.Module, needs_reset: bool = True) -> None:
    """Initialise one module: Linear from a truncated normal of 0.02, convolutions by their fan-out, as PVTv2 does."""
    reset = getattr(module, "reset_parameters", None)
    if needs_reset and reset is not None:
        reset()
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
    elif isinstance(module, nn.Conv2d):
        fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=math.sqrt(2.0 / fan_out))
    if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
        nn.init.zeros_(module.bias)


def check_pool(global_pool: str) -> str:
    if global_pool not in POOLS:
        raise ValueError(f"unknown global_pool {global_pool!r}; choose one of {POOLS}")
    return global_pool
