"""Which of timm's registered names are ours, family by family."""

import re

import timm
from timm.models import get_pretrained_cfg

from soft_models.errors import UsageError, suggestion

__all__ = ["SIZES", "is_ours", "registered_names", "require_model", "split_size"]

SIZES = ("tiny", "small", "base", "medium", "large", "huge")


def is_ours(name: str) -> bool:
    """Whether the entry point of a registered ``name``, perhaps with a tag behind a dot, is defined in this package."""
    name = name.split(".")[0]
    return timm.is_model(name) and timm.model_entrypoint(name).__module__.startswith("soft_models.")


def require_model(name: str) -> None:
    """Refuse a name that timm does not know, or one with a tag that the model does not have.

    Raises:
        UsageError: It is one of these.
    """
    if not timm.is_model(name):
        hint = suggestion(name, timm.list_models()) or "; python -m soft_models lists ours, timm.list_models() all"
        raise UsageError(f"unknown model {name!r}{hint}")
    own, dot, _ = name.partition(".")
    try:
        get_pretrained_cfg(name)
    except RuntimeError:
        hint = suggestion(name, timm.list_pretrained(f"{own}.*")) or f"; leave out what follows {own + dot!r}"
        raise UsageError(f"unknown tag of weights in {name!r}{hint}") from None


def registered_names() -> list[str]:
    """Every name of ours, family by family, the smallest first."""
    return sorted(filter(is_ours, timm.list_models()), key=split_size)


def split_size(name: str) -> tuple[str, int]:
    """Family, which is the name without its size word, and the rank of that word."""
    size = next((word for word in name.split("_") if word in SIZES), SIZES[0])
    return re.sub(rf"_{size}(?=_|$)", "", name), SIZES.index(size)
