"""Registers every model with timm; one module per family."""

from soft_models.variants import soft

__all__ = ["soft"]
