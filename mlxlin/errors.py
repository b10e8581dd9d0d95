"""Every error mlxlin raises on purpose: what happened, and what to do about it; and what it warns of.

The command line prints errors as two lines, `Error: <message>` and `Hint: <hint>`, and warnings as `Note: <message>`.
"""

from __future__ import annotations


class MlxlinError(Exception):
    """Base of all deliberate errors.

    Args:
        message: what happened, naming the file, tensor or option.
        hint: what the person can do about it; left out, what helps against most errors of the kind.
    """

    exit_code = 1
    usual_hint = "See where with --debug, and please report it."

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.usual_hint


class CheckpointError(MlxlinError):
    """A checkpoint folder that is missing, broken, truncated or incomplete."""

    usual_hint = "Files are damaged or belong to different models; download or convert the checkpoint again."


class UnsupportedError(MlxlinError):
    """Something real that mlxlin does not do: a model type, a config key, a file format."""

    usual_hint = "Look for another version of this checkpoint; `mlxlin models suggest` lists models that run."


class InputError(MlxlinError, ValueError):
    """An argument of the wrong shape, dtype, range or kind."""

    usual_hint = "Change that argument; its documentation says what it may be."


class ResourceError(MlxlinError):
    """Memory, disk or context would run out."""

    usual_hint = "Free some memory or disk space, and run it again."


class HubError(MlxlinError):
    """The hub is unreachable, or refuses the repository."""

    usual_hint = "Try again later."


class TokenizerError(MlxlinError):
    """A tokenizer or chat template that cannot be read or rendered."""

    usual_hint = "Download or convert the checkpoint again."


class SessionError(MlxlinError):
    """A saved conversation that cannot be used with what is loaded."""

    usual_hint = "Begin another session, or read this one's text again with --from-text."


class NumericsError(MlxlinError):
    """Non-finite numbers where finite ones are required."""

    usual_hint = "The checkpoint may be damaged, or its dtype too narrow for its values."


class KernelWarning(UserWarning):
    """A Metal kernel failed its check on this machine; plain operations run in its place, slower."""
