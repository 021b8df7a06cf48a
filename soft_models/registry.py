"""Which of timm's registered names are ours, family by family."""

import re

import timm

__all__ = ["SIZES", "is_ours", "registered_names", "split_size"]

SIZES = ("tiny", "small", "base", "medium", "large", "huge")


def is_ours(name: str) -> bool:
    """Whether the entry point of a registered ``name``, perhaps with a tag behind a dot, is defined in this package."""
    name = name.split(".")[0]
    return timm.is_model(name) and timm.model_entrypoint(name).__module__.startswith("soft_models.")


def registered_names() -> list[str]:
    """Every name of ours, family by family, the smallest first."""
    return sorted(filter(is_ours, timm.list_models()), key=split_size)


def split_size(name: str) -> tuple[str, int]:
    """Family, which is the name without its size word, and the rank of that word."""
    size = next((word for word in name.split("_") if word in SIZES), SIZES[0])
    return re.sub(rf"_{size}(?=_|$)", "", name), SIZES.index(size)
