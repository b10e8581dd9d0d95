"""Which files of a repository a model needs."""

from __future__ import annotations

import fnmatch
import re

from mlxlin.errors import CheckpointError, UnsupportedError

from .formats import pickles, safetensors
from .formats.source import READABLE, foreign_format

# everything that text, stops and templates are read from; kept beside converted weights as well
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "tiktoken.model",
    "rwkv_vocab_*.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*$")
_COMMIT = re.compile(r"[0-9a-f]{40}$")


def is_repo_id(text: str) -> bool:
    """Whether `text` has the form of a hub id, "owner/name"."""
    return bool(_ID.match(text)) and ".." not in text and "--" not in text and len(text) <= 96


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a full commit hash, which names one state for ever."""
    return revision is not None and bool(_COMMIT.match(revision))


def is_side_file(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in SIDE_FILES)


def choose(names: list[str], repo: str, only: str | None = None) -> tuple[list[str], list[str]]:
    """Side files and weight files to download, each in a fixed order.

    Args:
        names: all files of the repository.
        only: the one weight file wanted, where a repository holds several models.

    Raises:
        UnsupportedError: only weights in another format; the message names it.
        CheckpointError: no weights, or several models and no choice.
    """
    ours = ("mlxlin.json", "README.md") if "mlxlin.json" in names else ()
    side = sorted(name for name in names if is_side_file(name) or name in ours)
    if only is not None:
        if only not in names:
            raise CheckpointError(f"{repo} holds no file {only}.")
        return side, [only]
    root = [name for name in names if "/" not in name]
    tensors = sorted(name for name in root if name.endswith(".safetensors") and not name.startswith("adapter"))
    if tensors:
        model = [name for name in tensors if re.match(r"model(-\d+-of-\d+)?\.safetensors$", name)]
        index = [safetensors.INDEX] if safetensors.INDEX in root else []
        return side + index, model or tensors
    if pickled := sorted(name for name in root if re.match(r"pytorch_model(-\d+-of-\d+)?\.bin$", name)):
        return side + ([pickles.INDEX] if pickles.INDEX in root else []), pickled
    bare = sorted(name for name in root if name.endswith((".pth", ".pt")))
    if len(bare) == 1:
        return side, bare
    if bare:
        raise CheckpointError(f"{repo} holds several models: {', '.join(bare)}.", f"Name one, e.g. {repo}/{bare[0]}")
    for name in names:
        if form := foreign_format(name):
            raise UnsupportedError(f"{repo} holds its weights in {form} format, which mlxlin cannot read.", READABLE)
    raise CheckpointError(f"{repo} holds no weights that mlxlin can read.", READABLE)
