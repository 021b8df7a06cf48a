"""Registers every model with timm; one module per family."""

from soft_models.variants import cosformer_vit, pyramid, soft, vvt

__all__ = ["cosformer_vit", "pyramid", "soft", "vvt"]
