"""Prompts as people give them, as tokens, within the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from mlxlin.errors import InputError, ResourceError

if TYPE_CHECKING:
    from mlxlin.models import Model
    from mlxlin.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages


def is_tokens(prompt: Prompt) -> bool:
    """Whether a prompt is token ids already."""
    return not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt)


def prompt_tokens(
    tokenizer: Tokenizer, prompt: Prompt, *, raw: bool = False, think: bool | None = None, bos: bool = True
) -> list[int]:
    """Token ids of a prompt.

    Args:
        prompt: messages; or a string, the one message of the person, or with `raw` plain text; or token ids.
        think: thinking on or off, where the chat template can.
        bos: raw text begins with the beginning-of-text token, where the tokenizer wants one.

    Raises:
        InputError: nothing in it, or options that do not go together.
    """
    if think is not None and (raw or is_tokens(prompt)):
        raise InputError(
            "think needs a conversation; neither raw text nor tokens have a template that could switch it."
        )
    if is_tokens(prompt):
        tokens = list(cast(Sequence[int], prompt))
    elif raw:
        if not isinstance(prompt, str):
            raise InputError("raw takes a string or token ids, not messages.")
        tokens = tokenizer.encode(prompt, bos=bos)
    elif prompt == "":
        tokens = []
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else cast(Messages, prompt)
        tokens = tokenizer.chat(messages, think=think)
    if not tokens:
        raise InputError("The prompt is empty.", "Give some text.")
    return tokens


def room(model: Model, prompt: int, wanted: int, context: int | None = None) -> int:
    """How many of the wanted tokens fit behind `prompt` tokens.

    Raises:
        InputError: fewer than none wanted.
        ResourceError: the prompt leaves no room.
    """
    limit = model.context if context is None else context
    if wanted < 0:
        raise InputError(f"max_tokens is {wanted}; it must be 0 or more.")
    if prompt > limit or (prompt == limit and wanted):
        raise ResourceError(
            f"The prompt has {prompt:,} tokens and the context ends at {limit:,}.",
            "Shorten the prompt, or give a larger context if the model can read it.",
        )
    return min(wanted, limit - prompt)
