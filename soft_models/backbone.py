"""What timm asks of a four-stage backbone, written once for all pyramids."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from timm.layers import LayerNorm, get_act_layer, get_norm_layer
from timm.models._features import feature_take_indices  # private: timm has no public name for it
from torch import Tensor, nn

from soft_models.attention.tokens import tokens_to_map
from soft_models.checkpoints import LoadsOfficialWeights
from soft_models.layers import MIN_SIZE, TanhGELU, init_module_weights, prepare_images

try:
    from timm.models._input import update_model_input_size  # private: how timm >= 1.0.31 records the size
except ImportError:
    update_model_input_size = None  # older timm records none

__all__ = ["PyramidBackbone", "check_choice", "check_lengths", "halve", "resolve_act", "resolve_norm", "to_size"]


class PyramidBackbone(LoadsOfficialWeights):
    """Stem, four stages of strides 4 to 32, norm, head: timm's methods over these, the parts come from a subclass.

    A stage takes a map ``(B, C, H, W)`` to its own map or, if it carries a class token, to tokens
    ``(B, 1 + H * W, C)``; only the last stage may. A subclass builds ``patch_embed`` and ``stages`` and calls
    :meth:`add_head` at the end.

    Args:
        img_size: Image size in pixels; checked here.
        in_chans: Image channels.
        num_classes: Classes of the head; 0 for none.
        global_pool: One of the subclass's ``POOLS``.
        embed_dims: Token width of each stage.
        drop_path_rate: Checked here.
        num_prefix_tokens: 1 if the last stage gives tokens with a class token, 0 if it gives a map.

    Raises:
        ValueError: ``img_size``, ``in_chans``, ``embed_dims``, ``global_pool`` or ``drop_path_rate`` is out of its
            range.
    """

    POOLS: ClassVar[tuple[str, ...]] = ("avg", "")
    if TYPE_CHECKING:  # TorchScript would read these
        patch_embed: nn.Module
        stages: Any  # nn.Sequential, of modules that hold ``blocks``

    def __init__(
        self,
        img_size: int | tuple[int, int],
        in_chans: int,
        num_classes: int,
        global_pool: str,
        embed_dims: tuple[int, ...],
        drop_path_rate: float,
        num_prefix_tokens: int,
    ) -> None:
        super().__init__()
        to_size(img_size)
        if in_chans < 1:
            raise ValueError(f"in_chans must be at least 1, got {in_chans}")
        check_lengths(embed_dims=embed_dims)
        if min(embed_dims) < 1:
            raise ValueError(f"embed_dims must be positive, got {tuple(embed_dims)}")
        if not 0 <= drop_path_rate < 1:
            raise ValueError(f"drop_path_rate must lie in [0, 1), got {drop_path_rate}")
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = check_choice("global_pool", global_pool, self.POOLS)
        check_head(num_classes, global_pool, num_prefix_tokens)
        self.num_features = self.head_hidden_size = embed_dims[-1]
        self.num_prefix_tokens = num_prefix_tokens
        self.feature_info = [
            {"num_chs": dim, "reduction": 4 * 2**i, "module": f"stages.{i}"} for i, dim in enumerate(embed_dims)
        ]

    def add_head(self, norm: nn.Module, drop_rate: float, **dd: Any) -> None:
        """Norm, dropout and classifier, registered last; then the initial weights."""
        self.norm = norm
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(self.num_features, self.num_classes, **dd) if self.num_classes > 0 else nn.Identity()
        self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialise all weights.

        Args:
            mode: Only ``""``, the architecture's own scheme; there for timm's signature.
            needs_reset: Reset what modules initialised on construction too; needed after ``to_empty``.
        """
        check_choice("init mode", mode, ("",))
        self.apply(partial(self.init_module, needs_reset=needs_reset))

    @staticmethod
    def init_module(module: nn.Module, needs_reset: bool) -> None:
        """Initialise one module."""
        init_module_weights(module, needs_reset)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Groups for layer decay: a transition goes with its stage's first block, a norm with its stage's last."""
        return {
            "stem": r"^patch_embed|^stages\.\d+\.(?:pos_embed|cls_token)",
            "blocks": r"^stages\.(\d+)"
            if coarse
            else [
                (r"^stages\.(\d+)\.downsample", (0,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^stages\.(\d+)\.norm", (99999,)),
                (r"^norm", (99999,)),
            ],
        }

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters, beyond biases and norms, that weight decay leaves alone."""
        return {name for name, _ in self.named_parameters() if name.endswith(("pos_embed", "cls_token"))}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        for stage in self.stages:
            stage.blocks.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New head of ``num_classes`` classes, 0 for none; ``global_pool=None`` keeps the pooling.

        Raises:
            ValueError: Unknown ``global_pool``, or one that gives a map to a classifier; the model stays as it was.
        """
        if global_pool is not None:
            check_choice("global_pool", global_pool, self.POOLS)
            check_head(num_classes, global_pool, self.num_prefix_tokens)
            self.global_pool = global_pool
        self.num_classes = num_classes
        if num_classes > 0:
            like = next(self.parameters())
            self.head = nn.Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)
            self.init_module(self.head, needs_reset=False)
            self.head.train(self.training)
        else:
            self.head = nn.Identity()

    @torch.jit.ignore
    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resample the position tables, if there are any, to another image size in pixels, for good."""
        size = to_size(img_size)
        grid = halve(size)
        for stage in self.stages:
            grid = halve(grid)
            if hasattr(stage, "pos_embed"):
                stage.set_grid(grid)
        if update_model_input_size is not None:
            update_model_input_size(self, size)

    def forward_features(self, x: Tensor) -> Tensor:
        """Normalised tokens ``(B, 1 + N, C)`` of the last stage, the class token first, or its map ``(B, C, H, W)``.

        A model with a class token gives maps as well once :meth:`prune_intermediate_layers` has removed stage 4.
        """
        return self.norm(self.stages(self.patch_embed(prepare_images(x))))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pooling, dropout and classifier; ``pre_logits`` stops before the classifier.

        Raises:
            ValueError: There is a classifier, and no pooling of the map.
        """
        if self.num_prefix_tokens == 0:
            if self.global_pool != "":
                x = x.mean(dim=(2, 3))
            elif not pre_logits:
                check_head(self.num_classes, self.global_pool, self.num_prefix_tokens)
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
            norm: Apply the final norm to the last stage's map, where it is not normalised in its stage.
            stop_early: Stop behind the last chosen stage.
            output_fmt: ``"NCHW"``.
            intermediates_only: Return the maps alone.

        Returns:
            The maps, or ``(forward_features(x), maps)``.

        Raises:
            ValueError: Another ``output_fmt``.
            AssertionError: An index out of range (timm's own check).
        """
        check_choice("output_fmt", output_fmt, ("NCHW",))
        take, last = feature_take_indices(len(self.stages), indices)
        stages = self.stages[: last + 1] if stop_early else self.stages
        maps = []
        x = self.patch_embed(prepare_images(x))
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
        """Remove the stages behind the last chosen one; returns the chosen stages' numbers, in order."""
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


def to_size(size: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    """Image size in pixels as (height, width), each at least ``MIN_SIZE``."""
    height, width = (size, size) if isinstance(size, int) else size
    if min(height, width) < MIN_SIZE:
        raise ValueError(f"img_size must be at least {MIN_SIZE} x {MIN_SIZE} pixels, got {size}")
    return int(height), int(width)


def halve(size: tuple[int, int]) -> tuple[int, int]:
    """Map size behind a convolution of stride 2 that pads by half its kernel."""
    return (size[0] + 1) // 2, (size[1] + 1) // 2


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """``value``, or a ValueError if it is none of ``choices``."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; choose one of {choices}")
    return value


def check_head(num_classes: int, global_pool: str, num_prefix_tokens: int) -> None:
    """Refuse a classifier over a map, whose channels come before its pixels."""
    if num_classes > 0 and global_pool == "" and num_prefix_tokens == 0:
        raise ValueError(f"global_pool='' gives a map, which takes num_classes=0, got {num_classes}")


def check_lengths(count: int = 4, **per_stage: Any) -> None:
    """Refuse tuples that do not have one entry for each of ``count`` stages."""
    for name, values in per_stage.items():
        if not isinstance(values, tuple | list) or len(values) != count:
            raise ValueError(f"{name} needs {count} entries, one per stage, got {values}")


def resolve_norm(norm_layer: str | Callable[..., nn.Module] | None, eps: float) -> Callable[..., nn.Module]:
    """timm's normalisation of that name, a callable as it is, or LayerNorm with ``eps``.

    Raises:
        ValueError: timm knows no such name.
    """
    if norm_layer is None:
        return partial(LayerNorm, eps=eps)
    try:
        return get_norm_layer(norm_layer)
    except KeyError:
        raise ValueError(f"unknown norm_layer {norm_layer!r}; choose a name of timm's, such as 'layernorm'") from None


def resolve_act(act_layer: str | type[nn.Module]) -> type[nn.Module]:
    """timm's activation of that name, or ours where it is faster, or a class as it is.

    Raises:
        ValueError: timm knows no such name.
    """
    if act_layer == "gelu_tanh":
        return TanhGELU
    try:
        return get_act_layer(act_layer)
    except KeyError:
        raise ValueError(f"unknown act_layer {act_layer!r}; choose a name of timm's, such as 'gelu'") from None
