"""Linear attention and its relatives: one recurrence, one door.

`run` picks the fastest path for device, length and shape; `reference.scan` is the definition every path is tested
against; `RULES` is the family as a table, `paths.table()` what this machine runs.
"""

from __future__ import annotations

from . import mixer, paths, reference, rwkv7
from .rules import RULES, Rule
from .run import run

__all__ = ["RULES", "Rule", "mixer", "paths", "reference", "run", "rwkv7"]
