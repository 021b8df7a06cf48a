"""One name of each family, for tests that do not need them all."""

import soft_models  # noqa: F401  (registers the names)
from soft_models.registry import registered_names, split_size

__all__ = ["family_names", "registered_names"]


def family_names() -> list[str]:
    """The smallest name of each family; names that differ in nothing but their size word are one family.

    So are those that differ in the attention alone, since ``test_attention.py`` covers each of these.
    """
    smallest: dict[str, str] = {}
    for name in registered_names():
        family = "pyramid_tiny" if name.startswith("pyramid_tiny_") else split_size(name)[0]
        smallest.setdefault(family, name)
    return list(smallest.values())
