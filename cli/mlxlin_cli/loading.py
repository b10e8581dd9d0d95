"""Open a model for a command: progress and notices while it loads, and a check before memory runs out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlxlin
from mlxlin_cli.options import quantisation
from mlxlin_cli.terminal import progress, say, size

if TYPE_CHECKING:
    from mlxlin import Model, Tokenizer


@dataclass(frozen=True)
class Loaded:
    """A model ready to answer, the name it was asked for by, and what `-q` and its like said of it."""

    name: str
    model: Model
    tokenizer: Tokenizer
    bits: int | str | None = None

    @property
    def path(self) -> str:
        """Which implementations of the recurrences this machine chooses from, in their order."""
        return ", ".join(dict.fromkeys(row["path"] for row in mlxlin.recurrences.paths.table()))

    def describe(self) -> dict[str, Any]:
        """What a measurement of it depends on; plain values."""
        return {
            "name": self.name,
            "parameters": self.model.parameter_count,
            "weight_bytes": self.model.nbytes,
            "dtype": str(self.model.dtype).rsplit(".", 1)[-1],
            "bits": self.bits,
            "path": self.path,
        }

    def check_memory(self, tokens: int, held: int = 0) -> None:
        """Refuse before the state of `tokens` tokens would not fit; `held` bytes of it are there already.

        Raises:
            ResourceError: with both numbers.
        """
        from mlxlin.memory import available_bytes

        needed, free = self.model.state_nbytes(tokens) - held, available_bytes()
        if needed > free:
            raise mlxlin.ResourceError(
                f"A context of {tokens:,} tokens needs {size(needed)}{' more' if held else ''} of memory; "
                f"{size(free)} are free.",
                "Limit it with --context, or give other programs' memory back.",
            )


def open_model(name: str, given: Mapping[str, Any]) -> Loaded:
    """Load a model by folder, hub id or alias, as `options.loading_options` say."""
    bits, group_size = given["bits"], given["group_size"]
    how = quantisation(bits, group_size)
    with progress(f"Loading {name}", in_bytes=True) as report:
        model, tokenizer = mlxlin.load(name, **how, revision=given["revision"], progress=report, notice=notice)
    return Loaded(name, model, tokenizer, bits if group_size is None else f"{bits} --group-size {group_size}")


def notice(text: str) -> None:
    """What the library wants the person to know."""
    say(f"Note: {text}")
