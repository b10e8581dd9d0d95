"""Conversion: any published checkpoint, safely, once.

`convert_checkpoint` is the entry: hub -> formats -> models.translate -> prepare (recipe, quantize) -> writer -> folder.
"""

from .conversion import Report, convert_checkpoint
from .recipe import Recipe, make_recipe

__all__ = ["Recipe", "Report", "convert_checkpoint", "make_recipe"]
