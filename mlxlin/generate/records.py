"""What generation hands out: steps, pieces of text, completions, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Finish = Literal["stop", "length"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Stats:
    """What one generation cost.

    Attributes:
        prompt_tokens: the whole prompt, reused part included.
        reused_tokens: how many of them the given state had read before.
        reuse: where that state came from and why it did not reach further, in words; empty where nothing was kept.
        generated_tokens: with the token that stopped it.
        prefill_seconds: until the logits behind the prompt were there.
        decode_seconds: from the first token to the last.
        finish_reason: "stop" or "length"; None while going on.
        state_bytes: the state at the end, keys and values included.
        peak_memory_bytes: MLX's highest use since the call began.
    """

    prompt_tokens: int
    reused_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    finish_reason: Finish | None = None
    state_bytes: int = 0
    peak_memory_bytes: int = 0
    reuse: str = ""

    @property
    def prefill_tps(self) -> float:
        """Prompt tokens read per second; 0 where nothing was read."""
        read = self.prompt_tokens - self.reused_tokens
        return read / self.prefill_seconds if read and self.prefill_seconds > 0 else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens per second behind the first one, which prefill paid for; 0 for fewer than two."""
        steps = self.generated_tokens - 1
        return steps / self.decode_seconds if steps > 0 and self.decode_seconds > 0 else 0.0


@dataclass(frozen=True)
class Step:
    """One generated token.

    Attributes:
        token: its id.
        logprob: natural-log probability under the model, where asked for.
        top: the likeliest (token, logprob) at this place, best first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """A token's text; the last piece has no token, what text was held back, and the stats."""

    text: str
    token: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: Finish | None = None
    stats: Stats | None = None


@dataclass(frozen=True)
class Completion:
    """One row of a batch. `tokens` include the one that stopped it."""

    text: str
    tokens: list[int]
    finish_reason: Finish
    stats: Stats
