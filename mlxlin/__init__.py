"""mlxlin: linear-attention, recurrent and hybrid language models, on device.

Public names are imported when first used, so that `import mlxlin` itself costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
