"""A model on the hub, described without its weights."""

from __future__ import annotations

from mlxlin.backend import mx

from .folder import MANIFEST
from .formats import describe_tensors, read_config
from .manifest import converted, read_manifest
from .prepare import Prepared, prepare, requantize
from .recipe import Recipe
from .resolve import split_id


def open_outline(source: str, revision: str | None, recipe: Recipe, dtype: mx.Dtype | None = None) -> Prepared:
    """What `source`, a hub id or alias, would become; its parameters cannot be read.

    Raises:
        CheckpointError, UnsupportedError, InputError: as `prepare` and `requantize`.
        HubError: as `hub.fetch`.
    """
    from . import hub

    repo, file = split_id(source)
    found = hub.outline(repo, revision, file)
    if (found.folder / MANIFEST).is_file():
        return requantize(converted(read_manifest(found.folder), dict(found.tensors), repo), recipe, dtype)
    opened = describe_tensors(read_config(found.folder), found.tensors, found.format, dtype or mx.bfloat16)
    return prepare(opened, recipe, dtype)
