"""Weights of official, of other people's and of our own files into our models, all of them or none."""

import logging
import math
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import timm
from timm.layers import resample_abs_pos_embed_nhwc
from torch import Tensor, nn

from soft_models.checkpoints.files import find_weights
from soft_models.checkpoints.renames import RENAMES, rename
from soft_models.errors import CheckpointError, some_of
from soft_models.registry import registered_names

__all__ = ["LoadsOfficialWeights", "check_fit", "checkpoint_filter_fn", "convert_state_dict", "matching_names"]

WRAPPERS = re.compile(r"^(?:(?:module|_orig_mod|model)\.)+")
BACKBONE = re.compile(r"^(?:backbone|encoder)\.")

_logger = logging.getLogger(__name__)


def convert_state_dict(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Names, pieces and position tables as ``model`` has them; whether all of it fits is not checked.

    Args:
        state_dict: Weights by official or by our names, perhaps wrapped (``{"state_dict": ...}``) or prefixed
            (``module.``, ``backbone.``, ...), of any image size.
        model: Where they are to go.

    Returns:
        New dict; tensors that belong to no part of the model keep their names.

    Raises:
        CheckpointError: There are no weights, or those of several models.
    """
    _, found = find_weights(state_dict)
    weights = strip_prefixes(found)
    if len(weights) < len(found):
        _logger.info("dropped %d of %d tensors, which are not the backbone's", len(found) - len(weights), len(found))
    return fit_tables(native_weights(weights), model)


def native_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Official names, pieces and tables as ours, without prefixes; position tables keep their own grids."""
    weights = strip_prefixes(weights)
    table = next((table for mark, table in RENAMES if any(re.match(mark, name) for name in weights)), None)
    if table is not None:
        weights = unflatten_tables(rename(weights, table))
    return weights


def strip_prefixes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names without what training code puts in front of them; of a detector or segmenter, the backbone alone."""
    while True:
        inside = {name: tensor for name, tensor in weights.items() if BACKBONE.match(name)}
        pattern, chosen = (BACKBONE, inside) if inside else (WRAPPERS, weights)
        stripped = {pattern.sub("", name): tensor for name, tensor in chosen.items()}
        if len(stripped) < len(chosen):
            raise CheckpointError(f"the file holds several models ({some_of(chosen)}); load the one wanted by itself")
        if stripped.keys() == weights.keys():
            return weights
        weights = stripped


def unflatten_tables(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Official position tables ``(1, N, C)`` as ``(1, H, W, C)``, if square, and the class token's row at the token.

    The last official table has a row for the class token; our token holds the sum of both.
    """
    result = dict(weights)
    table, token = result.get("stages.3.pos_embed"), result.get("stages.3.cls_token")
    if table is not None and token is not None:
        result["stages.3.cls_token"] = token + table[:, :1]
        result["stages.3.pos_embed"] = table[:, 1:]
    for name, table in result.items():
        side = math.isqrt(table.shape[1]) if name.endswith("pos_embed") and table.ndim == 3 else 0
        if side and side * side == table.shape[1]:
            result[name] = table.unflatten(1, (side, side))
    return result


def fit_tables(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Resize the position tables of a pyramid to the grids of ``model``; a flat one must have the model's own grid."""
    result = dict(weights)
    for name, own in model.named_parameters():
        if name.endswith("pos_embed") and own.ndim == 4 and name in result:
            grid, table = list(own.shape[1:3]), result[name]
            if table.ndim == 3 and table.shape[1] == math.prod(grid):
                table = table.unflatten(1, grid)
            if table.ndim == 4:
                result[name] = resample_abs_pos_embed_nhwc(table, grid, "bilinear", antialias=False)
    return result


def check_fit(
    weights: Mapping[str, Tensor], model: nn.Module, reshaped: Iterable[str] = (), absent: Iterable[str] = ()
) -> None:
    """Refuse weights that do not fill the model exactly.

    Args:
        weights: By the model's names.
        model: Where they are to go.
        reshaped: Names that may have another shape.
        absent: Names that may be missing.

    Raises:
        CheckpointError: Names are missing, unexpected or of another shape, or a value is not finite.
    """
    own = model.state_dict()
    optional = {name for name in own if name.endswith("num_batches_tracked")} | set(absent)
    reshaped = set(reshaped)
    missing = [name for name in own if name not in weights and name not in optional]
    unexpected = [name for name in weights if name not in own and name not in optional]
    misfits = {
        name: f"{name} {tuple(tensor.shape)} for {tuple(own[name].shape)}"
        for name, tensor in weights.items()
        if name in own and name not in reshaped and tensor.shape != own[name].shape
    }
    if missing or unexpected or misfits:
        matched = len(own.keys() & weights.keys()) - len(misfits)
        parts = [f"{matched} of the model's {len(own)} tensors match"]
        if not matched:
            parts.append(f"the file is of another model, it has {some_of(weights)}")
        else:
            parts += [
                f"{len(names)} {what}: {some_of(names)}"
                for what, names in (
                    ("missing", missing),
                    ("unexpected", unexpected),
                    ("of another shape", misfits.values()),
                )
                if names
            ]
        names = matching_names(weights)
        if getattr(model, "pretrained_cfg", {}).get("architecture") in names:
            if {*missing, *unexpected} <= head_names(model) and misfits.keys() <= free_names(model):
                parts.append(
                    "but for head or input channels they do: timm.create_model(name, pretrained=True, "
                    "pretrained_cfg_overlay=dict(file=...)) adapts these"
                )
        elif names:
            parts.clear()  # what differs between two models is long, and helps nobody
            hint = ", which of these cannot be told from its names" if len(names) > 1 else ""
            parts.append(f"the file fits {' or '.join(map(repr, names))}{hint}")
        raise CheckpointError(f"the weights do not fit: {'; '.join(parts)}")
    broken = [name for name, tensor in weights.items() if not _finite(tensor)]
    if broken:
        raise CheckpointError(f"{len(broken)} tensors of the file hold NaN or infinity: {some_of(broken)}")


def _finite(tensor: Tensor) -> bool:
    return tensor.is_meta or not tensor.is_floating_point() or bool(tensor.isfinite().all())


def matching_names(weights: Mapping[str, Tensor]) -> list[str]:
    """Registered names of ours that the weights fill, whatever their classes, channels and image size.

    Depths, widths, heads and the kind of landmarks show in names and shapes; whether SOFT is normalised does not, nor
    which attention it is of those that hold the same projections.
    """
    return [name for name in registered_names() if _fits_name(weights, name)]


def _fits_name(weights: Mapping[str, Tensor], name: str) -> bool:
    free, shapes = _shapes_of(name)
    return shapes == _fixed_shapes(weights, free)


@cache
def _shapes_of(name: str) -> tuple[set[str], dict[str, tuple[int, ...]]]:
    model = timm.create_model(name, device="meta")
    free = free_names(model)
    return free, _fixed_shapes(model.state_dict(), free)


def _fixed_shapes(weights: Mapping[str, Tensor], free: set[str]) -> dict[str, tuple[int, ...]]:
    """What tells one model from another: shapes less classes, channels and image size."""
    return {
        name: tuple(tensor.shape[-1:] if name.endswith("pos_embed") else tensor.shape)
        for name, tensor in weights.items()
        if name not in free and not name.endswith("num_batches_tracked")
    }


def head_names(model: nn.Module) -> set[str]:
    """Parameters of the classifier."""
    heads = getattr(model, "pretrained_cfg", {}).get("classifier") or "head"
    return {f"{head}.{kind}" for head in ([heads] if isinstance(heads, str) else heads) for kind in ("weight", "bias")}


def free_names(model: nn.Module) -> set[str]:
    """Parameters that timm adapts after us: the classifier, and the first convolution to other channels."""
    convs = getattr(model, "pretrained_cfg", {}).get("first_conv") or ()
    return head_names(model) | {f"{conv}.weight" for conv in ([convs] if isinstance(convs, str) else convs)}


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """timm's hook between file and model: :func:`convert_state_dict`, and nothing less than all of it.

    The number of classes in the file is noted in ``model.pretrained_cfg``, by which timm decides about the head: it is
    kept where it fits, and new otherwise.

    Raises:
        CheckpointError: The weights do not fit, apart from head and input channels.
    """
    weights = convert_state_dict(state_dict, model)
    check_fit(weights, model, reshaped=free_names(model), absent=head_names(model))
    classes = next((len(weights[name]) for name in head_names(model) if name in weights), 0)
    cfg: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    cfg["num_classes"] = classes or -1  # -1 equals no number of classes
    return weights


class LoadsOfficialWeights(nn.Module):
    """For models: ``load_state_dict`` takes official names, prefixes and other image sizes as well as our own."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's; with ``strict``, what does not fit is one line that says what would.

        Raises:
            CheckpointError: ``strict``, and the weights do not fit; or as :func:`convert_state_dict`.
        """
        weights = convert_state_dict(state_dict, self) if state_dict else {}
        if strict:
            check_fit(weights, self)
        return super().load_state_dict(weights, strict, assign)
