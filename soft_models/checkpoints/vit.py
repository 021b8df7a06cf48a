"""Checkpoints of timm's plain ViT and DeiT into models that pool by the mean and have no class token."""

import json
import logging
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from timm.layers import resample_abs_pos_embed
from timm.models import get_pretrained_cfg, is_model
from torch import Tensor

from soft_models.checkpoints.convert import check_fit, free_names, head_names, strip_prefixes
from soft_models.checkpoints.files import find_weights
from soft_models.errors import CheckpointError
from soft_models.registry import is_ours

if TYPE_CHECKING:
    from soft_models.vit import MapVisionTransformer

__all__ = ["source_name", "vit_filter_fn"]

_logger = logging.getLogger(__name__)

# What a timm ViT or DeiT has and a mean-pooled model without class token has not.
DROPPED = re.compile(r"cls_token$|dist_token$|head_dist\.|pre_logits\.")
LAYER_SCALE = re.compile(r"(blocks\.\d+\.)(?:ls|gamma_)([12])(?:\.gamma)?$")
SCALED = {"1": "attn.proj", "2": "mlp.fc2"}
SOURCE = re.compile(r"(vit|deit3?)_[a-z]+(_distilled)?_patch16_\d+$")
NAME = re.compile(r"(?<![A-Za-z0-9_])[a-z][a-z0-9_]+(?:\.[a-z0-9_]+)?")


def vit_filter_fn(
    state_dict: Mapping[str, Any], model: "MapVisionTransformer", source: str = "", chosen: frozenset[str] = frozenset()
) -> dict[str, Tensor]:
    """Make a checkpoint of this model, or of a plain ViT or DeiT of timm's, fit ``model``.

    Of timm's ``vit_*_patch16_N``, ``deit_*_patch16_N`` and ``deit3_*_patch16_N`` of the same width and depth, the
    prefix tokens with their rows of the position table and the distillation head are dropped, the final norm goes
    where the model has it, LayerScale is folded into the projections in front of it, and the position table is resized
    to the model's grid. The source's mean, std and number of classes replace those in ``model.pretrained_cfg``. What
    was dropped is logged.

    Args:
        state_dict: Parameters by name, perhaps inside a training checkpoint.
        model: The model to load into.
        source: Name, perhaps with tag, of the timm model that the checkpoint comes from, if known.
        chosen: Fields of ``model.pretrained_cfg`` that the caller has set, which stay.

    Raises:
        CheckpointError: The checkpoint is of another architecture, width or depth.
    """
    _, params = find_weights(state_dict)
    params = strip_prefixes(params)
    foreign = any(DROPPED.match(k) or LAYER_SCALE.match(k) for k in params)
    if foreign and source and not SOURCE.match(source.split(".")[0]):
        raise CheckpointError(f"cannot start from {source!r}; {wanted(model)}")
    dropped = sorted(k for k in params if DROPPED.match(k))
    out = map_final_norm(fold_layer_scale({k: v for k, v in params.items() if k not in dropped}), model)
    if "pos_embed" in out:
        num_prefix = sum(k in params for k in ("cls_token", "dist_token"))
        out["pos_embed"] = fit_pos_embed(out["pos_embed"], num_prefix, model)
    try:
        check_patch(out, model)
        check_fit(out, model, reshaped=free_names(model), absent=head_names(model))
    except CheckpointError as error:
        raise CheckpointError(f"cannot start from {source or 'this file'!r}: {error}; {wanted(model)}") from None
    if foreign:
        message = f"Started from {source or 'a plain ViT'}; dropped {', '.join(dropped) or 'nothing'}"
        if out["pos_embed"].shape != params["pos_embed"].shape:
            message += f"; position table {tuple(params['pos_embed'].shape)} to {tuple(out['pos_embed'].shape)}"
        if any(LAYER_SCALE.match(k) for k in params):
            message += "; LayerScale folded into the projections"
        _logger.warning(message)
        take_over_cfg(model.pretrained_cfg, source, chosen)
    if "num_classes" not in chosen:  # timm keeps the head where this equals the model's; -1 equals none
        model.pretrained_cfg["num_classes"] = len(out["head.weight"]) if "head.weight" in out else -1
    return out


def wanted(model: "MapVisionTransformer") -> str:
    return (
        "choose one of timm's vit_*_patch16_N, deit_*_patch16_N or deit3_*_patch16_N checkpoints (N: image size) with "
        f"embed_dim={model.embed_dim} and depth={len(model.blocks)}"
    )


def check_patch(params: dict[str, Tensor], model: "MapVisionTransformer") -> None:
    weight = params.get("patch_embed.proj.weight")
    if weight is not None and weight.shape[2:] != model.patch_embed.proj.weight.shape[2:]:
        patch = tuple(model.patch_embed.proj.weight.shape[2:])
        raise CheckpointError(f"the file has patches of {tuple(weight.shape[2:])} pixels and the model of {patch}")


def source_name(cfg: Mapping[str, Any]) -> str:
    """Name, perhaps with tag, of the timm model that the weights of ``cfg`` come from; empty if nothing tells.

    Read from ``architecture``, from the ``config.json`` beside the file, or from the path or hub id.
    """
    file = cfg.get("file")
    candidates = [".".join(filter(None, (cfg.get("architecture"), cfg.get("tag"))))]
    if file:
        with suppress(OSError, ValueError, AttributeError, TypeError):  # there is none, or one of another program
            saved = json.loads((Path(file).parent / "config.json").read_text(encoding="utf-8"))
            tag = (saved.get("pretrained_cfg") or {}).get("tag")
            candidates.append(".".join(filter(None, (saved.get("architecture"), tag))))
    for place in (file, cfg.get("hf_hub_id"), cfg.get("url")):
        for part in reversed(Path(place or "").parts):
            candidates.extend(NAME.findall(re.sub(r"(\.(pth|tar|pt|bin|safetensors))+$", "", part)))
    names = (name for name in candidates if is_model(name.split(".")[0]) and not is_ours(name))
    return next(names, "")


def fold_layer_scale(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """LayerScale multiplied into the projection in front of it, which leaves the function as it is."""
    out = {k: v for k, v in params.items() if not LAYER_SCALE.match(k)}
    for key, gamma in params.items():
        if match := LAYER_SCALE.match(key):
            projection = match[1] + SCALED[match[2]]
            for suffix, scale in ((".weight", gamma[:, None]), (".bias", gamma)):
                if projection + suffix in out:
                    out[projection + suffix] = out[projection + suffix] * scale
    return out


def map_final_norm(params: dict[str, Tensor], model: "MapVisionTransformer") -> dict[str, Tensor]:
    """The final norm under the name it has in ``model``, before (``norm``) or behind (``fc_norm``) the pooling."""
    name = "fc_norm" if any(True for _ in model.fc_norm.parameters()) else "norm"
    return {re.sub(r"^(fc_)?norm\.", f"{name}.", k): v for k, v in params.items()}


def fit_pos_embed(table: Tensor, num_prefix: int, model: "MapVisionTransformer") -> Tensor:
    """The position table without the rows of the prefix tokens, resized to the model's grid."""
    height, width = model.pretrained_cfg["input_size"][-2:]
    patch, target = model.patch_embed.patch_size, model.patch_embed.grid_size
    configured = (height // patch[0], width // patch[1])
    # DeiT-III has prefix tokens but no rows for them.
    for rows in (num_prefix, 0):
        count = table.shape[1] - rows
        square = (math.isqrt(count), math.isqrt(count))
        likely = (square, target) if num_prefix else (target, square)
        for grid in (configured, *likely):
            if grid[0] * grid[1] == count:
                return resample_abs_pos_embed(table[:, rows:], target, grid, num_prefix_tokens=0)
    raise CheckpointError(
        f"cannot tell the grid of a position table with {table.shape[1]} rows; give its image size as "
        "pretrained_cfg_overlay=dict(file=..., input_size=(3, height, width))"
    )


def take_over_cfg(cfg: dict[str, Any], source: str, chosen: frozenset[str]) -> None:
    """Put the source's mean and std into ``cfg``, except for fields the caller has chosen."""
    source_cfg = None
    for name in dict.fromkeys((source, source.split(".")[0])):
        with suppress(RuntimeError):  # a tag that timm does not know
            source_cfg = source_cfg or get_pretrained_cfg(name)
    if source_cfg is not None:
        cfg.update({k: getattr(source_cfg, k) for k in ("mean", "std") if k not in chosen})
    elif not {"mean", "std"} <= chosen:
        _logger.warning(
            f"Nothing names the model that the checkpoint comes from, so mean {cfg['mean']} and std {cfg['std']} are "
            "kept; if it was trained with others, add mean and std, or its architecture, to pretrained_cfg_overlay"
        )
