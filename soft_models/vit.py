"""Plain vision transformer: timm's, with an attention of ours that is told the size of the map."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from timm.models import VisionTransformer, checkpoint
from timm.models._features import feature_take_indices  # private: timm has no public name for it
from torch import Tensor, nn

from soft_models.attention import create_attention
from soft_models.backbone import check_choice, resolve_act, resolve_norm
from soft_models.layers import Block

__all__ = ["MapVisionTransformer"]

POOLS = ("avg", "avgmax", "max", "")
WEIGHT_INITS = ("", "skip", "reset", "jax", "jax_nlhb", "moco")  # timm's


def map_block(
    attention: str,
    dim: int,
    num_heads: int,
    mlp_ratio: float,
    qkv_bias: bool,
    proj_drop: float,
    drop_path: float,
    act_layer: type[nn.Module],
    norm_layer: Callable[..., nn.Module],
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    **timm_only: Any,  # what timm hands to every block besides, and this model's constructor leaves at its defaults
) -> Block:
    """A block with the attention ``attention``, built from timm's block arguments."""
    dd: dict[str, Any] = {"device": device, "dtype": dtype}
    attn = create_attention(attention, dim, num_heads=num_heads, qkv_bias=qkv_bias, proj_drop=proj_drop, **dd)
    return Block(attn, dim, mlp_ratio, norm_layer, act_layer, proj_drop, drop_path, **dd)


class MapVisionTransformer(VisionTransformer):
    """timm's ``VisionTransformer`` (Dosovitskiy et al. 2020, arXiv:2010.11929) over a linear attention.

    Mean pooled and without class token: all tokens are pixels of the map, whose size is passed to every attention. The
    position table is resized to the map (bicubic), and an image whose sides are no multiples of the patch is padded
    with zeros at its right and lower border, so any image works. Parameter names and shapes are timm's.

    Args:
        img_size: Image size in pixels that the position table is made for.
        patch_size: Side of a patch in pixels.
        in_chans: Image channels.
        num_classes: Classes of the head; 0 for none.
        global_pool: ``"avg"``, ``"avgmax"``, ``"max"`` or ``""`` (all tokens).
        embed_dim: Token width C.
        depth: Number of blocks.
        num_heads: Attention heads.
        mlp_ratio: Hidden width of the MLP over the token width.
        qkv_bias: Bias of the query, key and value projections.
        attention: A name in ``soft_models.attention.ATTENTIONS``.
        fc_norm: Final norm behind the pooling instead of before it; None for True where there is pooling.
        dynamic_img_size: Accept images of other sizes than ``img_size``.
        dynamic_img_pad: Pad images whose sides are no multiples of the patch; otherwise they are refused.
        drop_rate: Dropout rate before the head.
        pos_drop_rate: Dropout rate behind the position table.
        proj_drop_rate: Dropout rate in attention and MLP, behind their projections.
        drop_path_rate: Stochastic depth rate of the last block; it grows linearly from 0 at the first.
        weight_init: timm's initialisation scheme, ``""`` for its default.
        norm_layer: Normalisation, timm's name or a class; None for LayerNorm with an eps of 1e-6.
        act_layer: Activation of the MLP, timm's name or a class; None for exact GELU.

    Shape:
        ``(B, in_chans, H, W)`` to ``(B, num_classes)``.

    Raises:
        ValueError: Unknown ``attention``, ``global_pool`` or ``weight_init``.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        attention: str = "cosformer",
        fc_norm: bool | None = None,
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = True,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        weight_init: str = "",
        norm_layer: str | type[nn.Module] | None = None,
        act_layer: str | type[nn.Module] | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=check_choice("global_pool", global_pool, POOLS),
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            qkv_bias=qkv_bias,
            class_token=False,
            fc_norm=fc_norm,
            dynamic_img_size=dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            drop_rate=drop_rate,
            pos_drop_rate=pos_drop_rate,
            proj_drop_rate=proj_drop_rate,
            drop_path_rate=drop_path_rate,
            weight_init=check_choice("weight_init", weight_init, WEIGHT_INITS),
            norm_layer=resolve_norm(norm_layer, eps=1e-6),
            act_layer=resolve_act(act_layer or "gelu"),
            block_fn=partial(map_block, attention),
            device=device,
            dtype=dtype,
        )
        # TorchScript would compile a Sequential's own forward, which passes no map size.
        self.blocks: nn.ModuleList = nn.ModuleList(self.blocks)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New head of ``num_classes`` classes, 0 for none; ``global_pool=None`` keeps the pooling."""
        if global_pool is not None:
            check_choice("global_pool", global_pool, POOLS)
        super().reset_classifier(num_classes, global_pool)

    def embed(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Tokens with their positions, ``(B, N, C)``, and the size of their map."""
        x = self.patch_embed(x)
        grid = self.patch_embed.grid_size
        if self.dynamic_img_size:
            H, W = x.shape[1], x.shape[2]  # timm leaves the map unflattened here
            # Called from this file, where timm's fx tracer finds it, and not through timm's own method.
            pos_embed = resample_abs_pos_embed(self.pos_embed, [H, W], [grid[0], grid[1]], num_prefix_tokens=0)
            return self.pos_drop(x.flatten(1, 2) + pos_embed), (H, W)
        return self.pos_drop(x + self.pos_embed), (grid[0], grid[1])

    def forward_features(self, x: Tensor) -> Tensor:
        """Tokens ``(B, N, C)`` of the last block; normalised here only if the final norm is before the pooling."""
        x, feat_size = self.embed(x)
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = checkpoint(block, x, feat_size)
            else:
                x = block(x, feat_size)
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    @torch.jit.ignore
    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]] | dict[str, Any]:
        """Outputs of the chosen blocks, all at the stride of the patches.

        Args:
            x: ``(B, in_chans, H, W)``.
            indices: Blocks by number, or an int for the last n, None for all; returned in order of execution.
            return_prefix_tokens: In timm's signature; there are none.
            norm: Apply the final norm to each, where it is before the pooling.
            stop_early: Stop behind the last chosen block.
            output_fmt: ``"NCHW"`` or ``"NLC"``.
            intermediates_only: Return the outputs alone.
            output_dict: Return a dict: ``image_intermediates`` and, unless ``intermediates_only``, ``image_features``.
            attn_mask: In timm's signature; must be None, as linear attention has no weights to mask.
            is_causal: In timm's signature; must be False.

        Returns:
            The outputs, or ``(forward_features(x), outputs)``, or the dict.

        Raises:
            ValueError: Another ``output_fmt``, or a mask.
            AssertionError: An index out of range (timm's own check).
        """
        check_choice("output_fmt", output_fmt, ("NCHW", "NLC"))
        if attn_mask is not None or is_causal:
            raise ValueError("linear attention takes no mask, got attn_mask or is_causal")
        take, last = feature_take_indices(len(self.blocks), indices)
        outputs = []
        x, feat_size = self.embed(x)
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = checkpoint(block, x, feat_size) if self.grad_checkpointing else block(x, feat_size)
            if i in take:
                outputs.append(self.norm(x) if norm else x)
        if output_fmt == "NCHW":
            outputs = [y.transpose(1, 2).unflatten(2, feat_size).contiguous() for y in outputs]
        if output_dict:
            final = {} if intermediates_only else {"image_features": self.norm(x)}
            return {"image_intermediates": outputs, **final}
        return outputs if intermediates_only else (self.norm(x), outputs)
