"""The text files around a vocabulary: what a checkpoint folder says about its tokens, its templates and its stops."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import TokenizerError

AGAIN = "Download or convert the checkpoint again."  # the hint for a damaged file


@dataclass(frozen=True)
class AddedToken:
    """One token that lies outside the merges: its id (None: the next free one), text and matching rules."""

    id: int | None
    content: str
    special: bool
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True)
class Files:
    """Parsed JSON and template files of one folder; absent files read as empty."""

    folder: Path
    tokenizer: Mapping[str, Any]  # tokenizer_config.json
    model: Mapping[str, Any]  # config.json
    generation: Mapping[str, Any]  # generation_config.json
    named: Mapping[str, str]  # bos_token, eos_token, ... -> their text
    added: tuple[AddedToken, ...]
    templates: Mapping[str, str]  # template name -> jinja source; "default" is the one for conversations


def read_files(folder: Path) -> Files:
    """Read everything but the vocabulary.

    Raises:
        TokenizerError: a file that exists but cannot be read, or is not what its name says.
    """
    tokenizer = read_object(folder / "tokenizer_config.json")
    special = read_object(folder / "special_tokens_map.json")
    named = _named_tokens(special) | _named_tokens(tokenizer)
    if "added_tokens_decoder" not in tokenizer:  # as transformers: the map wins only over configs that predate it
        named |= _named_tokens(special)
    return Files(
        folder=folder,
        tokenizer=tokenizer,
        model=read_object(folder / "config.json"),
        generation=read_object(folder / "generation_config.json"),
        named=named,
        added=_added_tokens(folder, tokenizer, special, named),
        templates=_templates(folder, tokenizer),
    )


def read_text(path: Path) -> str:
    """The text of a file; TokenizerError names it when it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}", AGAIN) from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, {} when there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}", AGAIN) from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds {type(value).__name__}, not a JSON object.")
    return value


def _content(value: Any) -> str | None:
    """A token written as a string or as a dict with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, Mapping):
        named |= {key: _content(value) for key, value in extra.items()}
    return {key: text for key, text in named.items() if text is not None}


def _added_tokens(
    folder: Path, tokenizer: Mapping[str, Any], special: Mapping[str, Any], named: Mapping[str, str]
) -> tuple[AddedToken, ...]:
    """Tokens with ids (added_tokens_decoder, else the older added_tokens.json), then special ones known by text."""
    listed: list[Any] = []
    for config in (tokenizer, special):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            value = config.get(key)
            listed += value if isinstance(value, list) else []
    texts = {text for text in (*named.values(), *map(_content, listed)) if text}
    found: dict[str, AddedToken] = {}
    try:
        for id, fields in tokenizer.get("added_tokens_decoder", {}).items():
            flags = {key: bool(fields.get(key, False)) for key in ("normalized", "lstrip", "rstrip", "single_word")}
            special_flag = bool(fields.get("special", False)) or fields["content"] in named.values()
            found[fields["content"]] = AddedToken(int(id), fields["content"], special_flag, **flags)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        path = folder / "tokenizer_config.json"
        raise TokenizerError(f"{path} has a malformed added_tokens_decoder: {error!r}") from error
    if "added_tokens_decoder" not in tokenizer:
        for text, id in sorted(read_object(folder / "added_tokens.json").items(), key=lambda item: str(item[1])):
            if not isinstance(id, int):
                raise TokenizerError(f"{folder / 'added_tokens.json'} gives {text!r} the id {id!r}.")
            found[text] = AddedToken(id, text, text in texts, normalized=text not in texts)
    by_id = sorted(found.values(), key=lambda token: token.id or 0)
    return (*by_id, *(AddedToken(None, text, True) for text in sorted(texts - found.keys())))


def _templates(folder: Path, tokenizer: Mapping[str, Any]) -> dict[str, str]:
    """Template files win over the entry in tokenizer_config.json, which is a string, a list of names or a mapping."""
    templates = {path.stem: read_text(path) for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        templates["default"] = read_text(folder / "chat_template.jinja")
    value = tokenizer.get("chat_template")
    if not templates and value is None:
        value = read_object(folder / "chat_template.json").get("chat_template")
    if templates or value is None:
        return templates
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, Mapping):
        value = [{"name": name, "template": source} for name, source in value.items()]
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (KeyError, TypeError) as error:
        raise TokenizerError(f"{folder / 'tokenizer_config.json'} has a malformed chat_template.") from error
