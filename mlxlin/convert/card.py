"""The model card of a converted folder: what it is, where it came from, how to run it."""

from __future__ import annotations

from collections import Counter

from mlxlin.models.spec import LayerSpec

from .prepare import Prepared
from .recipe import Recipe

_ATTENTION = ("attention", "latent")  # kinds of mixers whose state grows with the context


def text(prepared: Prepared, recipe: Recipe, repo: str | None, commit: str | None) -> str:
    """README.md; the same for the same conversion."""
    spec = prepared.spec
    kinds = Counter(_kind(layer) for layer in spec.layers)
    layers = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), reverse=True))
    origin = f"`{repo}`, revision `{commit}`" if repo else "a local checkpoint"
    head = ["---", "library_name: mlxlin"] + ([f"base_model: {repo}"] if repo else []) + ["---", ""]
    lines = [
        f"# {repo.rpartition('/')[2] if repo else spec.family} for mlxlin",
        "",
        f"Converted from {origin}. The licence of the original applies.",
        "",
        f"- layers: {len(spec.layers)} ({layers}), width {spec.width}, vocabulary {spec.vocab}",
        f"- parameters: {prepared.parameter_count:,} in {prepared.nbytes:,} bytes",
        f"- weights: {recipe.describe()}",
        "",
        "```",
        "pip install mlxlin",
        "mlxlin chat -m path/to/this/folder",
        "```",
        "",
    ]
    return "\n".join(head + lines)


def _kind(layer: LayerSpec) -> str:
    if layer.mixer is None:
        return "feed-forward"
    if layer.beside is not None:
        return "recurrent beside attention"
    return "attention" if layer.mixer.kind in _ATTENTION else "recurrent"
