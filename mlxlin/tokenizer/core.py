"""The tokenizer of a checkpoint folder: text to ids, conversations to prompts, ids to text, and where replies stop."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import MlxlinError, TokenizerError
from .detokenizer import Detokenizer, Vocabulary
from .files import AGAIN, Files, read_files
from .template import ChatTemplate, Message
from .thoughts import ThoughtSplitter

_WORLD = "rwkv_vocab_*.txt"
_VOCABULARIES = ("tokenizer.json", "tiktoken.model", _WORLD, "tokenizer.model", "spiece.model")
_HINT = "Beside the weights belongs tokenizer.json, tiktoken.model, rwkv_vocab_v20230424.txt or tokenizer.model."
# generation_config.json's names for what mlxlin's samplers take
_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}


class Tokenizer:
    """Made by `Tokenizer.from_folder`.

    Args:
        vocabulary: ids and pieces.
        files: what the folder says around them.
        fingerprint: identifies vocabulary, special tokens and templates.
    """

    def __init__(self, vocabulary: Vocabulary, files: Files, fingerprint: str) -> None:
        self.vocabulary = vocabulary
        self.special_tokens = dict(files.named)
        self.fingerprint = fingerprint
        self._files = files
        self._templates: dict[str, ChatTemplate] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read whichever vocabulary the folder holds.

        Raises:
            TokenizerError: no vocabulary, or a file that cannot be read; the message names it.
        """
        files = read_files(Path(folder))
        path = _vocabulary_file(files.folder)
        vocabulary = _read_vocabulary(path, files)
        if path.match(_WORLD) and not files.templates:
            from .world import CHAT_TEMPLATE

            files = _with_template(files, CHAT_TEMPLATE)
        return cls(vocabulary, files, _fingerprint(path, files))

    @property
    def vocab_size(self) -> int:
        """Number of ids the vocabulary knows; a model's logits are often padded beyond it."""
        return self.vocabulary.size

    @cached_property
    def bos(self) -> tuple[int, ...]:
        """What raw text starts with: () or, as a rule, the one beginning-of-text token."""
        if self.vocabulary.prefix:
            return self.vocabulary.prefix
        token = self._id("bos_token") if self._files.tokenizer.get("add_bos_token") is True else None
        return () if token is None else (token,)

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Token ids of raw text.

        Args:
            text: special tokens written in it are recognised; characters that are no Unicode become U+FFFD.
            bos: begin with the beginning-of-text token where the tokenizer wants one, exactly once.
        """
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates, e.g. from a terminal in another encoding
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = self.vocabulary.encode(text)
        start = list(self.bos) if bos else []
        return ids if ids[: len(start)] == start else start + ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens, special ones left out; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = self.detokenizer()
        return "".join([detokenizer.add(id) for id in ids]) + detokenizer.finish()

    def detokenizer(self, *, continues: bool = False) -> Detokenizer:
        """A stream of tokens to text. `continues`: the tokens go on from a raw prompt, whose last word may need the
        space that the first token brings."""
        return Detokenizer(self.vocabulary, continues)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self._files.templates)

    @property
    def can_think(self) -> bool:
        """Whether the template can switch thinking on and off (`think=` of `render` and `chat`)."""
        return self.has_chat_template and self.template().thinking_switch is not None

    def template(self, *, tools: bool = False) -> ChatTemplate:
        """The compiled chat template: "tool_use" for conversations with tools where there is one, else "default".

        Raises:
            TokenizerError: there is none.
        """
        sources = self._files.templates
        name = "tool_use" if tools and "tool_use" in sources else "default"
        if name not in sources:
            has = f"templates named {', '.join(sorted(sources))} but no default" if sources else "no chat template"
            raise TokenizerError(f"{self._files.folder} has {has}.", "Use raw completion instead (--raw, raw=True).")
        if name not in self._templates:
            self._templates[name] = ChatTemplate(sources[name], f"The chat template of {self._files.folder}")
        return self._templates[name]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        think: bool | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """A conversation as the text the model was trained on; see `ChatTemplate.render`."""
        return self.template(tools=tools is not None).render(
            messages,
            think=think,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **(self.special_tokens | variables),
        )

    def chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a rendered conversation. The template writes every special token itself: none is added."""
        return self.encode(self.render(messages, **options), bos=False)

    def thought_splitter(self, messages: Sequence[Message], **options: Any) -> ThoughtSplitter | None:
        """What tells thought from answer in the reply to this conversation; None where the template knows no thoughts.

        Args:
            messages: the conversation as it is given to `chat`, options likewise.
        """
        markers = self.template(tools=options.get("tools") is not None).thinking_markers
        if markers is None:
            return None
        before = self.render(messages, **(options | {"add_generation_prompt": False}))
        return ThoughtSplitter(markers, self.render(messages, **options).removeprefix(before))

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a reply: all that generation_config.json, config.json (also its text_config), the tokenizer
        and the chat template name."""
        text_config = self._files.model.get("text_config")
        found: list[object] = [self._id("eos_token"), self._turn_end()]
        for config in (self._files.generation, self._files.model, text_config if isinstance(text_config, dict) else {}):
            value = config.get("eos_token_id")
            found += value if isinstance(value, list) else [value]
        found += [0] if self._is_world else []
        return frozenset(id for id in found if isinstance(id, int) and not isinstance(id, bool))

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end a chat reply, for the vocabularies whose conversations have no token for it."""
        from .world import TURN_END

        return (TURN_END,) if self._is_world else ()

    @property
    def generation_defaults(self) -> dict[str, float | int]:
        """Sampling options that generation_config.json recommends, under the names of `Sampling`."""
        config = self._files.generation
        if config.get("do_sample") is False:
            return {"temperature": 0.0}
        found = {ours: config.get(theirs) for theirs, ours in _DEFAULTS.items()}
        return {name: value for name, value in found.items() if isinstance(value, (int, float))}

    @property
    def _is_world(self) -> bool:
        from .world import WorldVocabulary

        return isinstance(self.vocabulary, WorldVocabulary)

    def _id(self, name: str) -> int | None:
        """The id of a named special token, None where it has none. A World checkpoint may name a plain text here."""
        text = self.special_tokens.get(name)
        id = None if text is None else self.vocabulary.token_id(text)
        return id if id is not None and (not self._is_world or self.vocabulary.is_special(id)) else None

    def _turn_end(self) -> int | None:
        """The special token with which the template closes an assistant's turn."""
        if not self.has_chat_template:
            return None
        mark = "mlxlin"
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
        try:
            tail = self.render(turns, add_generation_prompt=False).rpartition(mark)[2].strip()
        except MlxlinError:  # a template that wants other roles first says nothing here
            return None
        ids = self.vocabulary.encode(tail)
        return ids[-1] if ids and self.vocabulary.is_special(ids[-1]) else None


def holds_tokenizer(folder: Path) -> bool:
    """Whether there is a vocabulary for `Tokenizer.from_folder`."""
    return any(True for name in _VOCABULARIES for _ in folder.glob(name))


def _vocabulary_file(folder: Path) -> Path:
    for name in _VOCABULARIES:
        for path in sorted(folder.glob(name)):
            return path
    raise TokenizerError(f"{folder} holds no tokenizer.", _HINT)


def _read_vocabulary(path: Path, files: Files) -> Vocabulary:
    from .pieces import HubVocabulary
    from .spm import SentencePieceVocabulary
    from .tiktoken import is_tiktoken, read_tiktoken
    from .world import read_world

    if path.match(_WORLD):
        special = {token.content: token.id for token in files.added if token.id is not None and token.special}
        return read_world(path, special)
    if path.suffix == ".model":
        return read_tiktoken(path, files) if is_tiktoken(path) else SentencePieceVocabulary(path, files)
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise TokenizerError(f"{path} cannot be read: {error}", AGAIN) from error
    return HubVocabulary(backend, path, files.added)


def _with_template(files: Files, source: str) -> Files:
    from dataclasses import replace

    return replace(files, templates={"default": source})


def _fingerprint(path: Path, files: Files) -> str:
    digest = hashlib.sha256(path.read_bytes())
    digest.update(json.dumps([dict(files.named), dict(files.templates)], sort_keys=True).encode())
    digest.update(repr(files.added).encode())
    return digest.hexdigest()
