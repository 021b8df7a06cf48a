"""What every entry point does: check where weights come from, then timm's builder."""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

from timm.models import build_model_with_cfg, get_pretrained_cfg
from torch import nn

from soft_models.checkpoints import checkpoint_filter_fn, find_weights, read_checkpoint
from soft_models.checkpoints.extras import constructor_arguments, pretrained_settings
from soft_models.checkpoints.files import naming
from soft_models.memory import keep_small_buffers

__all__ = ["build_variant"]

NO_WEIGHTS = (
    "no weights come with {variant}; name a file with timm.create_model('{variant}', pretrained=True, "
    "pretrained_cfg_overlay=dict(file='the_file.pth')): one that train.py wrote, or one that the README says fits"
)
SOURCES = ("state_dict", "file", "hf_hub_id", "url")
_logger = logging.getLogger(__name__)
ModelT = TypeVar("ModelT", bound=nn.Module)


def build_variant(
    model_cls: type[ModelT],
    variant: str,
    pretrained: bool,
    model_args: Mapping[str, Any],
    *,
    out_indices: int | tuple[int, ...] = (0, 1, 2, 3),
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: Mapping[str, Any] | None = None,
    filter_for: Callable[[Mapping[str, Any]], Any] = lambda overlay: checkpoint_filter_fn,
    **kwargs: Any,
) -> ModelT:
    """Model ``variant``, with the weights of a file if one is named.

    Args:
        model_cls: Class to build.
        variant: Registered name.
        pretrained: Load weights, which ``pretrained_cfg_overlay=dict(file=...)`` names.
        model_args: The variant's own constructor arguments; ``kwargs`` win.
        out_indices: Default of ``features_only``.
        pretrained_cfg: As for timm's entry points.
        pretrained_cfg_overlay: As for timm's entry points. A file is read here, safely and whatever its wrapping. What
            it says about its model is the default where nothing is given: constructor arguments, preprocessing and
            class names as training scripts store them, and the size of its position tables.
        filter_for: From the overlay to the function from the file's weights to the model's.
        **kwargs: Further arguments of timm's builder and of the model.

    Raises:
        ValueError: ``pretrained`` without weights, or weights without ``pretrained``.
        CheckpointError: The file cannot be read, or does not fit.
    """
    keep_small_buffers()
    given = dict(pretrained_cfg_overlay or {})
    named = [source for source in SOURCES if given.get(source)]
    if named and not pretrained:
        raise ValueError(f"pretrained_cfg_overlay has {named[0]}=, which pretrained=False ignores; set pretrained=True")
    known = get_pretrained_cfg(variant, allow_unregistered=True)
    if pretrained and not named and not pretrained_cfg and not (known and known.has_weights):
        raise ValueError(NO_WEIGHTS.format(variant=variant))
    overlay, stored = dict(given), {}
    if given.get("file"):
        content = read_checkpoint(given["file"])
        with naming(given["file"]):
            _, weights = find_weights(content)
            overlay = {**pretrained_settings(content), **given}
            stored = constructor_arguments(content, variant)
    filter_fn = filter_for(overlay)
    if overlay.pop("file", None):
        overlay["state_dict"] = weights
    with naming(given["file"]) if given.get("file") else nullcontext():
        model = build_model_with_cfg(
            model_cls,
            variant,
            pretrained,
            pretrained_cfg=pretrained_cfg,
            pretrained_cfg_overlay=overlay or None,
            pretrained_filter_fn=filter_fn,
            feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
            **{**model_args, **stored, **kwargs},
        )
    if given.get("file"):  # the file's name in the place of its tensors
        for cfg in (model.pretrained_cfg, getattr(getattr(model, "model", None), "pretrained_cfg", {})):
            if cfg.pop("state_dict", None) is not None:
                cfg["file"] = str(given["file"])
    classes, wanted = model.pretrained_cfg.get("num_classes"), getattr(model, "num_classes", 0)
    if pretrained and (kwargs.get("features_only") or classes != wanted):
        if "label_names" not in given:
            model.pretrained_cfg.pop("label_names", None)
        if not kwargs.get("features_only") and wanted:
            _logger.warning(
                "the weights have %s classes and the model %d: its head is new", max(classes, 0) or "no", wanted
            )
    return model
