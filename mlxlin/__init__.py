"""mlxlin: linear-attention, recurrent and hybrid language models, on device.

Public names are imported when first used, so that `import mlxlin` itself costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import recurrences as recurrences
    from .backend import describe_backend as describe_backend
    from .conversation import Conversation as Conversation
    from .convert import convert_checkpoint as convert_checkpoint
    from .description import describe as describe
    from .errors import CheckpointError as CheckpointError
    from .errors import HubError as HubError
    from .errors import InputError as InputError
    from .errors import MlxlinError as MlxlinError
    from .errors import NumericsError as NumericsError
    from .errors import ResourceError as ResourceError
    from .errors import SessionError as SessionError
    from .errors import TokenizerError as TokenizerError
    from .errors import UnsupportedError as UnsupportedError
    from .generate import batch as batch
    from .generate import stream as stream
    from .loader import load as load
    from .models import Model as Model
    from .sampling import Sampling as Sampling
    from .state import State as State
    from .store import PrefixStore as PrefixStore
    from .store import SessionStore as SessionStore
    from .timeline import Timeline as Timeline
    from .tokenizer import Tokenizer as Tokenizer

_HOME = {
    "CheckpointError": "errors",
    "Conversation": "conversation",
    "HubError": "errors",
    "InputError": "errors",
    "MlxlinError": "errors",
    "Model": "models",
    "NumericsError": "errors",
    "PrefixStore": "store",
    "ResourceError": "errors",
    "Sampling": "sampling",
    "SessionError": "errors",
    "SessionStore": "store",
    "State": "state",
    "Timeline": "timeline",
    "Tokenizer": "tokenizer",
    "TokenizerError": "errors",
    "UnsupportedError": "errors",
    "batch": "generate",
    "convert_checkpoint": "convert",
    "describe": "description",
    "describe_backend": "backend",
    "load": "loader",
    "stream": "generate",
}

__all__ = sorted([*_HOME, "__version__", "recurrences"])


def __getattr__(name: str) -> Any:
    if name == "recurrences":
        return importlib.import_module(".recurrences", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
