"""Every error mlxlin raises on purpose: what happened, and what to do about it; and what it warns of.

The command line prints errors as two lines, `Error: <message>` and `Hint: <hint>`, and warnings as `Note: <message>`.
"""

from __future__ import annotations


class MlxlinError(Exception):
    """Base of all deliberate errors.

    Args:
        message: what happened, naming the file, tensor or option.
        hint: what the person can do about it; empty where nothing can be done.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class CheckpointError(MlxlinError):
    """A checkpoint folder that is missing, broken, truncated or incomplete."""


class UnsupportedError(MlxlinError):
    """Something real that mlxlin does not do: a model type, a config key, a file format."""


class InputError(MlxlinError, ValueError):
    """An argument of the wrong shape, dtype, range or kind."""


class ResourceError(MlxlinError):
    """Memory, disk or context would run out."""


class HubError(MlxlinError):
    """The hub is unreachable, or refuses the repository."""


class TokenizerError(MlxlinError):
    """A tokenizer or chat template that cannot be read or rendered."""


class SessionError(MlxlinError):
    """A saved conversation that cannot be used with what is loaded."""


class NumericsError(MlxlinError):
    """Non-finite numbers where finite ones are required."""


class KernelWarning(UserWarning):
    """A Metal kernel failed its check on this machine; plain operations run in its place, slower."""
