"""The four-stage pyramid; the attention of its stages is an argument."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from timm.layers import calculate_drop_path_rates, resample_abs_pos_embed_nhwc, trunc_normal_
from torch import Tensor, nn

from soft_models.attention import ATTENTIONS, attention_options, create_attention
from soft_models.attention.inverse import NEWTON_STEPS
from soft_models.attention.tokens import tokens_to_map
from soft_models.backbone import PyramidBackbone, check_lengths, halve, resolve_act, resolve_norm, to_size
from soft_models.layers import Block, Blocks, ConvBNReLU, PostNormBlock, add_pos_embed, in_groups

__all__ = ["PyramidTransformer"]

STEM_WIDTH = 32  # channels of the stem's first two convolutions, in every size
PER_STAGE = {"sr_ratios": "sr_ratio", "local_kernels": "local_kernel"}  # the attentions' keyword for one stage's value


class Stem(nn.Sequential):
    """Three 3 x 3 convolutions that reduce the image by 4. On a CPU it takes a few images at a time, see ``in_groups``.

    Shape:
        ``(B, in_chans, H, W)`` to ``(B, dim, ceil(H / 4), ceil(W / 4))``.
    """

    def __init__(
        self, in_chans: int, dim: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            ConvBNReLU(in_chans, STEM_WIDTH, 2, **dd),
            ConvBNReLU(STEM_WIDTH, STEM_WIDTH, 1, **dd),
            ConvBNReLU(STEM_WIDTH, dim, 2, **dd),
        )
        self.growth = 2 * STEM_WIDTH / (4 * in_chans)  # of what the second reads and writes

    def forward(self, x: Tensor) -> Tensor:
        if not torch.jit.is_scripting():
            return in_groups(self, self.compute, self.growth, x)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


class Stage(nn.Module):
    """One stage: transition, position table, blocks.

    Args:
        downsample: From the previous stage's map to this stage's.
        dim: Token width C.
        grid: Height and width of the position table.
        blocks: The stage's blocks, in order.
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
        blocks: list[Block],
        class_token: bool,
        pos_drop: float,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.downsample = downsample
        # Channels last, so that the table knows its own grid and adds to tokens without a copy.
        self.pos_embed = nn.Parameter(torch.empty(1, *grid, dim, **dd))
        # The release gives the class token a row of its position table; one parameter holds their sum here.
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim, **dd)) if class_token else None
        self.pos_drop = nn.Dropout(pos_drop)
        self.blocks = Blocks(*blocks)
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
        x = self.blocks(self.pos_drop(x), (H, W))
        if self.cls_token is not None:
            return x
        return tokens_to_map(x, (H, W))

    def set_grid(self, grid: tuple[int, int]) -> None:
        """Resample the position table to another grid, for good."""
        table = resample_abs_pos_embed_nhwc(self.pos_embed.detach(), list(grid), "bilinear", antialias=False)
        self.pos_embed = nn.Parameter(table.clone(), requires_grad=self.pos_embed.requires_grad)


class PyramidTransformer(PyramidBackbone):
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
            ``sr_ratios`` cell, which ties their number to the image, or 0, since ``timm.create_model`` drops None.
        sr_ratios: Pixels per landmark along each side of the map, of each stage; read by ``landmarks="conv"``, which
            needs a map of so many, and where ``landmark_grid`` is None.
        local_kernels: Side of the depthwise convolution of V in stages 1 to 3, in pixels; 0 for none.
        inverse: How SOFT inverts the landmark kernel: ``"newton"``, the released operator, or ``"solve"``, exact; None
            for the first with ``"conv"`` landmarks, as released, and the second with ``"avg"``.
        newton_iters: Steps of ``inverse="newton"``.
        drop_rate: Dropout rate before the head.
        pos_drop_rate: Dropout rate behind the position tables.
        proj_drop_rate: Dropout rate in attention and MLP, behind their projections.
        drop_path_rate: Stochastic depth rate of the last block; it grows linearly from 0 at the first.
        act_layer: Activation of the MLPs in stages 1 to 3, timm's name or a class; None for the release's tanh form of
            GELU with ``"conv"`` landmarks and for exact GELU, which CPUs compute faster, with others.
        norm_layer: Normalisation of blocks and output, timm's name or a callable; None for the release's LayerNorm,
            with an eps of 1e-5 in post-norm blocks and 1e-6 elsewhere.

    Shape:
        ``(B, in_chans, H, W)`` to ``(B, num_classes)``.

    Raises:
        ValueError: An argument is out of its range, or set although the chosen attention does not read it.
    """

    POOLS: ClassVar[tuple[str, ...]] = ("token", "avg", "")

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
        inverse: str | None = None,
        newton_iters: int = NEWTON_STEPS,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        act_layer: str | type[nn.Module] | None = None,
        norm_layer: str | Callable[..., nn.Module] | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(img_size, in_chans, num_classes, global_pool, embed_dims, drop_path_rate, num_prefix_tokens=1)
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        check_lengths(depths=depths, num_heads=num_heads, mlp_ratios=mlp_ratios, sr_ratios=sr_ratios)
        check_lengths(3, local_kernels=local_kernels)
        options = {
            "landmarks": landmarks,
            "landmark_grid": None if landmark_grid == 0 else landmark_grid,
            "inverse": inverse,
            "newton_iters": newton_iters,
        }
        per_stage = {"sr_ratios": sr_ratios, "local_kernels": local_kernels}
        check_options(attention, stage4_attention, options | per_stage)
        act_layers = [resolve_act(act_layer or ("gelu_tanh" if landmarks == "conv" else "gelu"))] * 3 + [nn.GELU]
        self.patch_embed = Stem(in_chans, embed_dims[0], **dd)
        drop_path_rates: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        grid = halve(to_size(img_size))
        stages = []
        for i, dim in enumerate(embed_dims):
            grid = halve(grid)
            last = i == 3
            name = stage4_attention if last else attention
            own = options | {"sr_ratio": sr_ratios[i], "local_kernel": 0 if last else local_kernels[i]}
            accepted = attention_options(name)
            attn_kwargs = {k: v for k, v in own.items() if k in accepted}
            blocks: list[Block] = []
            for rate in drop_path_rates[i]:
                attn = create_attention(
                    name, dim, num_heads=num_heads[i], proj_drop=proj_drop_rate, **attn_kwargs, **dd
                )
                block, eps = (Block, 1e-6) if last else (PostNormBlock, 1e-5)
                norm = resolve_norm(norm_layer, eps)
                blocks.append(block(attn, dim, mlp_ratios[i], norm, act_layers[i], proj_drop_rate, rate, **dd))
            downsample = ConvBNReLU(embed_dims[i - 1], dim, 2, **dd) if i else nn.Identity()
            stages.append(Stage(downsample, dim, grid, blocks, class_token=last, pos_drop=pos_drop_rate, **dd))
        self.stages = nn.Sequential(*stages)
        self.add_head(resolve_norm(norm_layer, eps=1e-6)(self.num_features, **dd), drop_rate, **dd)


def check_options(attention: str, last: str, options: dict[str, Any]) -> None:
    """Refuse an option that was set although nothing reads it beside the chosen attentions and the other options."""
    defaults = inspect.signature(PyramidTransformer).parameters
    plain = {option: tuple(value) if isinstance(value, list) else value for option, value in options.items()}
    changed = {option: value for option, value in plain.items() if value != defaults[option].default}
    for option, value in changed.items():
        keyword = PER_STAGE.get(option, option)
        chosen = [attention] if option == "local_kernels" else list(dict.fromkeys((attention, last)))
        if not any(keyword in attention_options(name) for name in chosen):
            readers = ", ".join(name for name in ATTENTIONS if keyword in attention_options(name))
            names = " and ".join(map(repr, chosen))
            raise ValueError(f"{option}={value!r} is not read by attention {names}; it is by {readers}")
    if "sr_ratios" in changed and options["landmarks"] == "avg" and options["landmark_grid"] is not None:
        by_landmarks = any("landmarks" in attention_options(name) for name in (attention, last))
        readers = "landmarks='conv' or landmark_grid=0, which read it" if by_landmarks else "landmark_grid=0"
        raise ValueError(f"sr_ratios={changed['sr_ratios']} needs {readers}")
