"""The four-stage pyramid; the attention of its stages is an argument."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers import (
    GELUTanh,
    LayerNorm,
    calculate_drop_path_rates,
    get_norm_layer,
    resample_abs_pos_embed_nhwc,
    trunc_normal_,
)
from timm.models import checkpoint
from timm.models._features import feature_take_indices  # private: timm has no public name for it
from torch import Tensor, nn

from soft_models.attention import attention_options, create_attention
from soft_models.checkpoints import LoadsOfficialWeights, checkpoint_filter_fn
from soft_models.layers import (
    MIN_SIZE,
    Block,
    ConvBNReLU,
    PostNormBlock,
    add_pos_embed,
    check_min_size,
    init_weights,
    tokens_to_map,
)

try:
    from timm.models._input import update_model_input_size  # private: how timm >= 1.0.31 records the size
except ImportError:
    update_model_input_size = None  # older timm records none


__all__ = ["PyramidTransformer", "checkpoint_filter_fn"]  # timm looks for the filter beside the class

STEM_WIDTH = 32  # channels of the stem's first two convolutions, in every size
POOLS = ("token", "avg", "")
PER_STAGE = {"sr_ratios": "sr_ratio", "local_kernels": "local_kernel"}  # the attentions' keyword for one stage's value


def to_size(size: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    """Image size in pixels as (height, width), each at least ``MIN_SIZE``."""
    height, width = (size, size) if isinstance(size, int) else size
    if min(height, width) < MIN_SIZE:
        raise ValueError(f"img_size must be at least {MIN_SIZE} x {MIN_SIZE} pixels, got {size}")
    return int(height), int(width)


def halve(size: tuple[int, int]) -> tuple[int, int]:
    """Map size behind a 3 x 3 convolution of stride 2 and padding 1."""
    return (size[0] + 1) // 2, (size[1] + 1) // 2


class Stage(nn.Module):
    """One stage: transition, position table, blocks.

    Args:
        downsample: From the previous stage's map to this stage's.
        dim: Token width C.
        grid: Height and width of the position table.
        blocks: Modules called as ``block(x, feat_size)``.
        class_token: Put a learned token in front of the pixels.
        pos_drop: Dropout rate behind the position table.

    Shape:
        ``(B, C_in, H, W)`` to ``(B, C, H', W')``; with a class token to tokens ``(B, 1 + H' * W', C)``.
    """

    def __init__(
        self,
        downsample: nn.Module,
        dim: int,
        grid: tuple[int, int],
        blocks: list[nn.Module],
        class_token: bool,
        pos_drop: float,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.grad_checkpointing = False
        self.downsample = downsample
        # Channels last, so that the table knows its own grid and adds to tokens without a copy.
        self.pos_embed = nn.Parameter(torch.empty(1, *grid, dim, **dd))
        # The release gives the class token a row of its position table; one parameter holds their sum here.
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim, **dd)) if class_token else None
        self.pos_drop = nn.Dropout(pos_drop)
        self.blocks = nn.ModuleList(blocks)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        trunc_normal_(self.pos_embed, std=0.02)
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        B, _, H, W = x.shape
        x = add_pos_embed(x.flatten(2).transpose(1, 2), self.pos_embed, (H, W))
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(B, -1, -1).to(x.dtype), x], dim=1)
        x = self.pos_drop(x)
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = checkpoint(block, x, (H, W))
            else:
                x = block(x, (H, W))
        if self.cls_token is not None:
            return x
        return tokens_to_map(x, (H, W))

    def set_grid(self, grid: tuple[int, int]) -> None:
        """Resample the position table to another grid, for good."""
        table = resample_abs_pos_embed_nhwc(self.pos_embed.detach(), list(grid), "bilinear", antialias=False)
        self.pos_embed = nn.Parameter(table.clone(), requires_grad=self.pos_embed.requires_grad)


class PyramidTransformer(LoadsOfficialWeights):
    """Four-stage vision transformer with a linear attention in stages 1 to 3, the body of SOFT.

    Lu et al. 2021, arXiv:2110.11945. A convolutional stem reduces the image by 4, a strided convolution in front of
    each later stage by 2; every stage has its own position table, resized to whatever map comes. Stages 1 to 3 are
    post-norm, stage 4 is pre-norm and carries a class token. Any image from 32 x 32 pixels up, square or not, works:
    the maps are ``ceil(H / 4)``, ``ceil(H / 8)``, ``ceil(H / 16)`` and ``ceil(H / 32)`` high, and as wide likewise.

    Args:
        img_size: Image size in pixels that the position tables are made for; others are interpolated.
        in_chans: Image channels.
        num_classes: Classes of the head; 0 for none.
        global_pool: ``"token"`` (the class token), ``"avg"`` (mean of the pixels) or ``""`` (all tokens).
        embed_dims: Token width of each stage.
        depths: Blocks of each stage.
        num_heads: Attention heads of each stage.
        mlp_ratios: Hidden width of the MLP over the token width, of each stage.
        attention: Attention of stages 1 to 3, a name in ``soft_models.attention.ATTENTIONS``.
        stage4_attention: Attention of stage 4; ``"soft"`` makes the whole model linear in the pixels.
        landmarks: ``"avg"`` or ``"conv"``: how SOFT reduces the queries to landmarks.
        landmark_grid: Landmarks along each side, an int or (height, width), clipped to the map; None for one per
            ``sr_ratios`` cell, which ties their number to the image.
        sr_ratios: Pixels per landmark along each side of the map, of each stage; read by ``landmarks="conv"`` and
            ``landmark_grid=None``.
        local_kernels: Side of the depthwise convolution of V in stages 1 to 3, in pixels; 0 for none.
        newton_iters: Newton steps for the inverse of the landmark kernel.
        inverse: ``"newton"`` or ``"solve"``.
        drop_rate: Dropout rate before the head.
        pos_drop_rate: Dropout rate behind the position tables.
        proj_drop_rate: Dropout rate in attention and MLP, behind their projections.
        drop_path_rate: Stochastic depth rate of the last block; it grows linearly from 0 at the first.
        norm_layer: Normalisation of blocks and output, timm's name or a callable; None for the release's LayerNorm,
            with an eps of 1e-5 in post-norm blocks and 1e-6 elsewhere.

    Shape:
        ``(B, in_chans, H, W)`` to ``(B, num_classes)``.

    Raises:
        ValueError: An argument is out of its range, or set although the chosen attention does not read it.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dims: tuple[int, ...] = (64, 128, 320, 512),
        depths: tuple[int, ...] = (1, 2, 3, 2),
        num_heads: tuple[int, ...] = (2, 4, 10, 16),
        mlp_ratios: tuple[float, ...] = (4, 4, 4, 4),
        attention: str = "soft",
        stage4_attention: str = "softmax",
        landmarks: str = "avg",
        landmark_grid: int | tuple[int, int] | None = 7,
        sr_ratios: tuple[int, ...] = (8, 4, 2, 1),
        local_kernels: tuple[int, ...] = (9, 5, 3),
        newton_iters: int = 20,
        inverse: str = "newton",
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_layer: str | Callable[..., nn.Module] | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        check_lengths(embed_dims=embed_dims, depths=depths, num_heads=num_heads, mlp_ratios=mlp_ratios)
        check_lengths(4, sr_ratios=sr_ratios)
        check_lengths(3, local_kernels=local_kernels)
        options = {
            "landmarks": landmarks,
            "landmark_grid": landmark_grid,
            "newton_iters": newton_iters,
            "inverse": inverse,
        }
        check_options((attention, stage4_attention), options | {"sr_ratios": sr_ratios, "local_kernels": local_kernels})
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = check_pool(global_pool)
        self.num_features = self.head_hidden_size = embed_dims[-1]
        self.num_prefix_tokens = 1
        self.feature_info = [
            {"num_chs": dim, "reduction": 4 * 2**i, "module": f"stages.{i}"} for i, dim in enumerate(embed_dims)
        ]

        self.patch_embed = nn.Sequential(
            ConvBNReLU(in_chans, STEM_WIDTH, 2, **dd),
            ConvBNReLU(STEM_WIDTH, STEM_WIDTH, 1, **dd),
            ConvBNReLU(STEM_WIDTH, embed_dims[0], 2, **dd),
        )
        drop_path_rates: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        grid = halve(to_size(img_size))
        stages = []
        for i, dim in enumerate(embed_dims):
            grid = halve(grid)
            last = i == 3
            name = stage4_attention if last else attention
            per_stage = {"sr_ratio": sr_ratios[i], "local_kernel": 0 if last else local_kernels[i]}
            accepted = attention_options(name)
            attn_kwargs = {k: v for k, v in (options | per_stage).items() if k in accepted}
            blocks: list[nn.Module] = []
            for rate in drop_path_rates[i]:
                attn = create_attention(
                    name, dim, num_heads=num_heads[i], proj_drop=proj_drop_rate, **attn_kwargs, **dd
                )
                blocks.append(make_block(attn, dim, mlp_ratios[i], not last, norm_layer, proj_drop_rate, rate, **dd))
            downsample = ConvBNReLU(embed_dims[i - 1], dim, 2, **dd) if i else nn.Identity()
            stages.append(Stage(downsample, dim, grid, blocks, class_token=last, pos_drop=pos_drop_rate, **dd))
        self.stages = nn.ModuleList(stages)
        norm = partial(LayerNorm, eps=1e-6) if norm_layer is None else get_norm_layer(norm_layer)
        self.norm = norm(self.num_features, **dd)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(self.num_features, num_classes, **dd) if num_classes > 0 else nn.Identity()
        self.init_weights(needs_reset=False)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialise all weights.

        Args:
            mode: Only ``""``, truncated normal of 0.02; there for timm's signature.
            needs_reset: Reset what modules initialised on construction too; needed after ``to_empty``.
        """
        if mode:
            raise ValueError(f"unknown init mode {mode!r}; choose ''")
        self.apply(partial(init_weights, needs_reset=needs_reset))

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameter groups for layer decay: a stage's transition goes with its first block, tables with the stem."""
        return {
            "stem": r"^patch_embed|^stages\.\d+\.(?:pos_embed|cls_token)",
            "blocks": r"^stages\.(\d+)"
            if coarse
            else [
                (r"^stages\.(\d+)\.downsample", (0,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^norm", (99999,)),
            ],
        }

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that weight decay leaves alone."""
        return {name for name, _ in self.named_parameters() if name.endswith(("pos_embed", "cls_token"))}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        for module in self.modules():
            if isinstance(module, Stage):
                module.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New head of ``num_classes`` classes, 0 for none; ``global_pool=None`` keeps the pooling."""
        if global_pool is not None:
            self.global_pool = check_pool(global_pool)
        self.num_classes = num_classes
        if num_classes > 0:
            like = next(self.parameters())
            self.head = nn.Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)
            init_weights(self.head, needs_reset=False)
            self.head.train(self.training)
        else:
            self.head = nn.Identity()

    @torch.jit.ignore
    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resample the position tables to another image size in pixels, for good."""
        size = to_size(img_size)
        grid = halve(size)
        for module in self.modules():
            if isinstance(module, Stage):
                grid = halve(grid)
                module.set_grid(grid)
        if update_model_input_size is not None:
            update_model_input_size(self, size)

    def forward_features(self, x: Tensor) -> Tensor:
        """Normalised tokens ``(B, 1 + N, C)`` of the last stage, the class token first.

        After :meth:`prune_intermediate_layers` has removed stage 4: the last kept stage's map ``(B, C, H, W)``.
        """
        x = check_min_size(x)
        x = self.patch_embed(x)
        for stage in self.stages:
            x = stage(x)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pooling, dropout and classifier; ``pre_logits`` stops before the classifier."""
        if self.num_prefix_tokens == 0:
            if self.global_pool != "":
                x = x.mean(dim=(2, 3))
        elif self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = x[:, 1:].mean(dim=1)
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
        """Maps of the chosen stages, strides 4, 8, 16, 32, without the class token.

        Args:
            x: ``(B, in_chans, H, W)``.
            indices: Stages by number, or an int for the last n, None for all; returned in order of execution.
            norm: Apply the final norm to the last stage's map.
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
        stages = self.stages[: last + 1] if stop_early else self.stages
        maps = []
        x = self.patch_embed(check_min_size(x))
        for i, stage in enumerate(stages):
            feat_size = halve((x.shape[-2], x.shape[-1]))
            x = stage(x)
            if i in take:
                y = self.norm(x) if norm and x.ndim == 3 else x
                maps.append(y if y.ndim == 4 else tokens_to_map(y[:, 1:], feat_size))
        if intermediates_only:
            return maps
        return (self.norm(x) if len(stages) == len(self.stages) else x), maps

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the stages behind the last chosen one; returns the chosen stages' numbers in order of execution."""
        take, last = feature_take_indices(len(self.stages), indices)
        truncated = last < len(self.stages) - 1
        self.stages = self.stages[: last + 1]
        if truncated:
            self.num_features = self.head_hidden_size = self.feature_info[last]["num_chs"]
            self.num_prefix_tokens = 0
        if prune_norm or truncated:
            self.norm = nn.Identity()
        if prune_head or truncated:
            self.reset_classifier(0)
        return sorted(set(take))


def make_block(
    attn: nn.Module,
    dim: int,
    mlp_ratio: float,
    post_norm: bool,
    norm_layer: str | Callable[..., nn.Module] | None,
    proj_drop: float,
    drop_path: float,
    **dd: Any,
) -> nn.Module:
    """SOFT's post-norm block (tanh GELU in its MLP) or the pre-norm block of stage 4."""
    default = partial(LayerNorm, eps=1e-5 if post_norm else 1e-6)
    norm = default if norm_layer is None else get_norm_layer(norm_layer)
    if post_norm:
        return PostNormBlock(attn, dim, mlp_ratio, norm, GELUTanh, proj_drop, drop_path, **dd)
    return Block(attn, dim, mlp_ratio, norm, nn.GELU, proj_drop, drop_path, **dd)


def check_lengths(count: int = 4, **per_stage: tuple[Any, ...]) -> None:
    for name, values in per_stage.items():
        if len(values) != count:
            raise ValueError(f"{name} needs {count} entries, one per stage, got {values}")


def check_pool(global_pool: str) -> str:
    if global_pool not in POOLS:
        raise ValueError(f"unknown global_pool {global_pool!r}; choose one of {POOLS}")
    return global_pool


def check_options(names: tuple[str, ...], options: dict[str, Any]) -> None:
    """Refuse an option that was set although no chosen attention reads it."""
    accepted = set().union(*map(attention_options, names))
    for option, value in options.items():
        default = inspect.signature(PyramidTransformer).parameters[option].default
        keyword = PER_STAGE.get(option, option)
        if keyword not in accepted and (tuple(value) if isinstance(value, list) else value) != default:
            raise ValueError(f"attention {' and '.join(map(repr, names))} has no {option}, got {option}={value!r}")
