"""The names that ``soft_models`` registers with timm, for tests over all of them or over one of each family."""

from soft_models.__main__ import registered_names, split_size

__all__ = ["family_names", "registered_names"]


def family_names() -> list[str]:
    """The smallest name of each family; names that differ in nothing but their size word are one family."""
    smallest: dict[str, str] = {}
    for name in registered_names():  # the smallest first
        smallest.setdefault(split_size(name)[0], name)
    return list(smallest.values())
