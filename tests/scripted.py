"""A real model that reads everything but says what it is told, and a tokenizer to talk with it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mlxlin.backend import mx
from mlxlin.models import Model
from mlxlin.state import State
from mlxlin.tokenizer import Tokenizer
from tests.tiny import HYBRID, tiny_model
from tests.tokenizer_folders import byte_level, write

# Thoughts stay in the turn that is being answered and are dropped from all earlier ones.
FORGETFUL = """\
{%- set ns = namespace(last_query_index=0) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.last_query_index = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
<s>{{ m.role }}
{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last_query_index -%}
<think>
{{ m.reasoning_content }}
</think>

{% endif -%}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<s>assistant
{% if enable_thinking is not defined or enable_thinking -%}<think>
{% endif -%}{% endif -%}"""
PLAIN = """\
{%- for m in messages %}<s>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<s>assistant
{% endif %}"""


Reply = str | list[int]


class Scripted:
    """Reads with a real model; its replies are `replies`, one after the other.

    A reply is a text, or token ids as they are to be generated, among which -1 stands for logits that are not finite.

    Attributes:
        read: tokens read so far.
        before: called before every further token of a reply with how many there are.
        scripted: false lets the model say what it wants.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, replies: Iterable[Reply]) -> None:
        self.model, self.read, self.end = model, 0, next(iter(tokenizer.stop_ids))
        self.replies = (
            [*(tokenizer.encode(reply, bos=False) if isinstance(reply, str) else reply), self.end] for reply in replies
        )
        self.before: Callable[[int], None] = lambda said: None
        self.scripted = True
        self._prompt, self._reply, self._reading = 0, [self.end], False

    def __call__(self, ids: Any, state: State | None = None, **options: Any) -> tuple[mx.array | None, State]:
        deciding = isinstance(ids, mx.array)  # as generation does it: a prompt comes as a list
        self.read += ids.shape[1] if deciding else len(ids[0])
        if deciding:
            self.before(int(state.positions[0].item()) - self._prompt + 1 if state else 0)
        logits, after = self.model(ids, state, **options)
        if not self.scripted:
            return logits, after
        if logits is None:
            self._reading = False
            return logits, after
        said = int(after.positions[0].item()) - self._prompt
        if not deciding:
            said, self._prompt = 0, int(after.positions[0].item())
            self._reply = self._reply if self._reading else next(self.replies)
        self._reading = not deciding
        forced = self._reply[said] if 0 <= said < len(self._reply) else self.end
        if forced < 0:
            return logits * mx.nan, after
        return mx.where(mx.arange(logits.shape[-1]) == forced, 1e4, logits), after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def scripted(
    folder: Path, template: str, replies: Iterable[Reply], config: dict[str, Any] = HYBRID, **files: Any
) -> tuple[Scripted, Tokenizer]:
    """A tiny random model and a byte-level tokenizer with this chat template, made in `folder`."""
    write(
        folder,
        byte_level("user", "assistant", "<think>", "</think>"),
        tokenizer_config={"chat_template": template, "eos_token": "<|im_end|>", "bos_token": "<s>"},
        **files,
    )
    tokenizer = Tokenizer.from_folder(folder)
    model = _model(json.dumps({**config, "vocab_size": tokenizer.vocab_size}))
    return Scripted(model, tokenizer, replies), tokenizer


@functools.cache
def _model(config: str) -> Model:
    return tiny_model(json.loads(config))
