"""Kimi's vocabulary: a `tiktoken.model` file (base64 bytes and rank per line), rebuilt as a `tokenizers` BPE."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import TokenizerError
from .files import AGAIN, AddedToken, Files
from .pieces import HubVocabulary, byte_alphabet

if TYPE_CHECKING:
    import tokenizers

_RESERVED = 256  # ids after the ranks that belong to special tokens, named in tokenizer_config.json or not

_CASED = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_UPPER, _LOWER = rf"[\p{{Lu}}\p{{Lt}}{_CASED}", rf"[\p{{Ll}}{_CASED}"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = (r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
# Kimi splits Chinese runs off first and words at a change from lower to upper case.
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}?",
        *_TAIL,
    )
)
_PLAIN = "|".join((_ENDING, r"[^\r\n\p{L}\p{N}]?\p{L}+", *_TAIL))  # the common cl100k split


def is_tiktoken(path: Path) -> bool:
    """Whether a `.model` file is a list of ranks rather than a SentencePiece model."""
    with path.open("rb") as file:
        return re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\s*", file.readline(4096)) is not None


def read_tiktoken(path: Path, files: Files) -> HubVocabulary:
    """A vocabulary with the ids tiktoken gives.

    Raises:
        TokenizerError: a file that is not a list of base64 tokens with distinct ranks.
    """
    ranks = _ranks(path)
    names = {token.id: token for token in files.added if token.id is not None}
    last = max([len(ranks) + _RESERVED - 1, *(id for id in names)])
    special = [
        names.get(id) or AddedToken(id, f"<|reserved_token_{id}|>", special=True) for id in range(len(ranks), last + 1)
    ]
    by_text = [token for token in files.added if token.id is None]
    return HubVocabulary(_backend(ranks, _pattern(files)), path, (*special, *by_text))


def _ranks(path: Path) -> dict[bytes, int]:
    try:
        pairs = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} is not a tiktoken vocabulary: {error}") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise TokenizerError(f"{path} does not number its tokens 0 to n - 1.", AGAIN)
    return ranks


def _pattern(files: Files) -> str:
    stated = files.tokenizer.get("pat_str")
    if isinstance(stated, str):
        return stated
    says = f"{files.tokenizer.get('auto_map')} {files.model.get('model_type')}"
    return _KIMI if "kimi" in says.lower() else _PLAIN


def _backend(ranks: dict[bytes, int], pattern: str) -> tokenizers.Tokenizer:
    """Byte pairs merge in the order of what they become, and a piece that is a token is taken whole, as in tiktoken.

    tiktoken merges any neighbours whose bytes together are a token, so every split of a token is a merge.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    alphabet = byte_alphabet()
    texts = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    merges = [
        (texts[token[:cut]], texts[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocab = {texts[token]: rank for token, rank in ranks.items()}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend
