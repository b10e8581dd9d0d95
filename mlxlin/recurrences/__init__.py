"""Linear attention and its relatives: one recurrence, one door.

`run` picks the fastest path for device, length and shape; `reference.scan` is the definition it is tested against.
"""

from . import reference
from .rules import RULES, Rule
from .run import run

__all__ = ["RULES", "Rule", "reference", "run"]
