"""What a case says about the model that its source makes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Sizes:
    """Numbers of a case: the first choice for a fixture, any of them for a live comparison."""

    def __init__(self, rng: random.Random | None) -> None:
        self._rng = rng

    def __call__(self, *choices: Any) -> Any:
        return choices[0] if self._rng is None else self._rng.choice(choices)


@dataclass(frozen=True)
class Case:
    """A source model: `model` is the prefix of its Config and ForCausalLM classes.

    The source mlx-lm stands for two programs that have to agree, see `tests.parity.bailing_oracle`.

    v_first: whether the source keeps recurrent matrices [B, H, V, K] instead of [B, H, K, V].
    """

    source: str
    model: str
    config: Callable[[Sizes], dict[str, Any]]
    v_first: bool = False
