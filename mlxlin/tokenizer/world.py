"""The RWKV World vocabulary: byte strings, matched greedily, longest first."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import TokenizerError
from .files import read_text

END_OF_TEXT = 0
_NAMES = ("<|rwkv_tokenizer_end_of_text|>", "<|endoftext|>")

# The format RWKV World and G1 models are trained on, for checkpoints that come without a template.
CHAT_TEMPLATE = r"""
{%- for message in messages -%}
{{- {'system': 'System', 'user': 'User', 'assistant': 'Assistant'}.get(message.role, message.role) + ': ' -}}
{{- (message.content if message.role == 'assistant' else message.content.replace('\n\n', '\n')) | trim + '\n\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- 'Assistant:' -}}
{%- if enable_thinking is defined -%}{{- ' <think' if enable_thinking else ' <think>\n</think>' -}}{%- endif -%}
{%- endif -%}
"""

TURN_END = "\n\nUser:"  # models go on writing the other side's turn


class WorldVocabulary:
    """Tokens are byte strings; id 0 ends a text and is not in the file.

    Args:
        tokens: bytes of every id.
        special: texts of the control tokens; those of id 0 are always known. An ordinary token among them stays
            ordinary: checkpoints name "\\n\\n" as their end, and models write it between paragraphs.
    """

    def __init__(self, tokens: Mapping[int, bytes], special: Mapping[str, int] | None = None) -> None:
        self._tokens = dict(tokens)
        self._ids = {token: id for id, token in tokens.items()}
        self._special = {name: END_OF_TEXT for name in _NAMES}
        self._special |= {text: id for text, id in (special or {}).items() if text.encode() not in self._ids}
        self._special_ids = frozenset(self._special.values())
        self._split = re.compile("(" + "|".join(re.escape(text) for text in self._special) + ")")
        lengths: dict[bytes, set[int]] = {}
        for token in self._ids:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {head: sorted(found, reverse=True) for head, found in lengths.items()}
        self.size = max([*tokens, *self._special_ids]) + 1
        self.prefix: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._split.split(text):
            ids += [self._special[part]] if part in self._special else self.encode_bytes(part.encode())
        return ids

    def encode_bytes(self, data: bytes) -> list[int]:
        """Greedy longest match over any bytes.

        Raises:
            TokenizerError: a byte that no token of the vocabulary starts with.
        """
        ids: list[int] = []
        at, end = 0, len(data)
        while at < end:
            head = data[at : at + 2]
            for length in (*self._lengths.get(head, ()), 1):
                id = self._ids.get(data[at : at + length])
                if id is not None:
                    break
            else:
                raise TokenizerError(f"The vocabulary has no token for the byte {data[at : at + 1]!r}.")
            ids.append(id)
            at += length
        return ids

    def decode_bytes(self, ids: list[int]) -> bytes:
        """The bytes of the tokens, one after the other."""
        return b"".join(self.piece(id, False) for id in ids)

    def token_id(self, text: str) -> int | None:
        return self._special.get(text, self._ids.get(text.encode()))

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def piece(self, token: int, first: bool) -> bytes:
        return b"" if token in self._special_ids else self._tokens.get(token, b"")


def read_world(path: Path, special: Mapping[str, int] | None = None) -> WorldVocabulary:
    """Read `rwkv_vocab_v20230424.txt`: lines of an id, a Python string or bytes literal, and its length in bytes.

    Raises:
        TokenizerError: a line that is something else.
    """
    lines = [line for line in read_text(path).split("\n") if line.strip()]
    parts = [_fields(line.strip()) for line in lines]
    literals = _literals([literal for _, literal, _ in parts])
    tokens: dict[int, bytes] = {}
    for number, (id, _, length) in enumerate(parts, 1):
        value = literals[number - 1] if literals else _literal(parts[number - 1][1])
        token = value.encode() if isinstance(value, str) else value
        if not isinstance(token, bytes) or not id.isdecimal() or int(id) in tokens or length != str(len(token)):
            raise TokenizerError(f"{path} line {number} is not an RWKV vocabulary entry: {lines[number - 1][:80]!r}")
        tokens[int(id)] = token
    if not tokens:
        raise TokenizerError(f"{path} holds no tokens.")
    return WorldVocabulary(tokens, special)


def _fields(line: str) -> tuple[str, str, str]:
    id, _, rest = line.partition(" ")
    literal, _, length = rest.rpartition(" ")
    return id, literal, length


def _literals(sources: list[str]) -> list[object]:
    """All literals in one parse, which is ten times faster than line by line; [] when some line is not one literal."""
    try:
        values = ast.literal_eval("[" + ",\n".join(sources) + "]")
    except (SyntaxError, ValueError):
        return []
    return values if len(values) == len(sources) else []


def _literal(source: str) -> object:
    try:
        return ast.literal_eval(source)
    except (SyntaxError, ValueError):
        return None
