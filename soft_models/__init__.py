"""Linear-attention vision backbones for timm; importing this package registers them."""

from soft_models import variants

__all__ = ["__version__", "variants"]
__version__ = "0.1.0"
