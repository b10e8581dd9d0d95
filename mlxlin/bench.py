"""Prefill and decode, timed apart, so that two runs on one machine, or two programs in one run, can be compared.

What makes the numbers mean something: every timer stops after evaluation; the first trial of every length is warm-up
and not counted; every trial reads a prompt never read before, from a state that has read nothing; the end of the text
is ignored and all tokens asked for are generated; repetitions of all lengths and subjects alternate, so that a machine
getting warm slows all of them; medians are given with their spread, and every single value is kept in its order.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from mlxlin.backend import mx
from mlxlin.errors import InputError, NumericsError
from mlxlin.generate import decode, prefill
from mlxlin.models import Model
from mlxlin.sampling import Sampler, Sampling

Kind = Literal["prefill", "decode", "turn"]
TURN = 32  # tokens of a message that follows a conversation kept in the state
DRIFT = 0.07  # a change of speed from the first to the last repetitions that deserves a warning


@dataclass(frozen=True)
class Trial:
    """One prompt read and continued.

    Attributes:
        prefill_seconds: from the prompt to the evaluated logits behind its last token.
        token_seconds: when each generated token was there, counted from the first of them.
        turn_seconds: reading TURN more tokens behind all that, from the kept state.
        reused_tokens: tokens of the prompt that were not read, to be 0.
        state_bytes: fixed-size part of the state behind the prompt.
        kv_bytes: keys and values behind the prompt.
        peak_bytes: memory at its highest.
        tokens: what was generated, greedily.
    """

    prefill_seconds: float
    token_seconds: tuple[float, ...]
    turn_seconds: float
    reused_tokens: int
    state_bytes: int
    kv_bytes: int
    peak_bytes: int
    tokens: tuple[int, ...]


class Subject(Protocol):
    """Something that reads prompts and generates: this library or a peer."""

    name: str

    def trial(self, prompt: Sequence[int], count: int, turn: Sequence[int]) -> Trial:
        """Read `prompt` from nothing, generate `count` tokens greedily, then read `turn`, each timed."""


class Local:
    """The model in this process as a subject.

    Args:
        model: what is measured.
        clock: seconds, monotonic.
        evaluate: waits until the given arrays are computed.
    """

    name = "mlxlin"

    def __init__(
        self,
        model: Model,
        clock: Callable[[], float] = time.perf_counter,
        evaluate: Callable[..., None] = mx.eval,
    ) -> None:
        self._model, self._clock, self._evaluate = model, clock, evaluate

    def trial(self, prompt: Sequence[int], count: int, turn: Sequence[int]) -> Trial:
        model = self._model
        fresh = model.fresh()
        self._evaluate(fresh.leaves())
        mx.clear_cache()
        mx.reset_peak_memory()
        start = self._clock()
        logits, state = prefill(model, prompt, fresh)
        self._evaluate(logits, state.leaves())
        read = self._clock() - start
        if int(state.positions[0]) - int(fresh.positions[0]) != len(prompt):
            raise NumericsError("The state does not stand behind the prompt that was just read.")
        tokens, times = [], []
        decoding = decode(model, logits, state, Sampler(Sampling(temperature=0.0)), max_tokens=count)
        for step in decoding:
            times.append(self._clock())
            tokens.append(step.token)
        last = decoding.state
        self._evaluate(last.leaves())
        start = self._clock()
        logits, after = prefill(model, turn, last)
        self._evaluate(logits, after.leaves())
        return Trial(
            prefill_seconds=read,
            token_seconds=tuple(moment - times[0] for moment in times),
            turn_seconds=self._clock() - start,
            reused_tokens=int(fresh.positions[0]),
            state_bytes=state.recurrent_nbytes,
            kv_bytes=state.kv_nbytes,
            peak_bytes=mx.get_peak_memory(),
            tokens=tuple(tokens),
        )


@dataclass(frozen=True)
class Row:
    """All counted trials of one measurement.

    Attributes:
        subject: who was measured.
        kind: "prefill" reads `length` tokens; "decode" generates behind `length` tokens; "turn" reads the next message
            of a conversation of `length` tokens that the state remembers.
        tokens: tokens in each timed stretch.
        seconds: duration of each stretch, by repetition.
        order: when each was measured, counted over all trials of the run.
    """

    subject: str
    kind: Kind
    length: int
    tokens: int
    seconds: tuple[float, ...]
    order: tuple[int, ...]
    reused_tokens: int
    state_bytes: int
    kv_bytes: int
    peak_bytes: int

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each repetition."""
        return [self.tokens / s for s in self.seconds]

    @property
    def median(self) -> float:
        """Tokens per second."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """Half the range of the rates, as a fraction of their median."""
        return (max(self.rates) - min(self.rates)) / 2 / self.median

    @property
    def key(self) -> tuple[str, str, int]:
        """What makes rows of two runs comparable."""
        return self.subject, self.kind, self.length


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        lengths: prompt lengths whose prefill is timed.
        contexts: lengths behind which decoding is timed.
        count: tokens to generate; at least 2, for a rate needs an interval.
        repetitions: counted trials of every length.
    """

    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    count: int
    repetitions: int

    def __post_init__(self) -> None:
        if not (self.lengths or self.contexts) or min((*self.lengths, *self.contexts)) < 1:
            raise InputError("Lengths to measure must be at least 1.", "Say for example: -p 512,2048")
        if self.contexts and self.count < 2:
            raise InputError("A decoding rate needs at least 2 tokens.", "Say for example: -n 64")
        if self.repetitions < 1:
            raise InputError("At least one repetition is needed.", "Say for example: -r 5")


def measure(
    subjects: Sequence[Subject],
    plan: Plan,
    vocab: int,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Run the plan: one warm-up and `repetitions` counted trials of every length, subjects and lengths alternating.

    Args:
        subjects: read the same prompts.
        vocab: prompts are random tokens below this.
        progress: called with (trials done, trials in all).

    Returns:
        Rows in the order subject, kind, length.

    Raises:
        NumericsError: a subject reused something it had read, or generated fewer tokens than asked for.
    """
    lengths = sorted({*plan.lengths, *plan.contexts})
    found: dict[tuple[int, int], list[tuple[int, Trial]]] = {}
    rounds = [(r, n) for r in range(plan.repetitions + 1) for n in (lengths if r % 2 == 0 else reversed(lengths))]
    order = 0
    for number, (repetition, length) in enumerate(rounds):
        prompt, turn = _prompt(number, length, vocab, seed), _prompt(len(rounds) + number, TURN, vocab, seed)
        count = plan.count if length in plan.contexts else 1
        for who in range(len(subjects)) if repetition % 2 == 0 else reversed(range(len(subjects))):
            trial = _checked(subjects[who], prompt, count, turn)
            if repetition:  # the first of every length warms up
                found.setdefault((who, length), []).append((order, trial))
            order += 1
            if progress is not None:
                progress(order, len(rounds) * len(subjects))
    return [
        row for (who, length), trials in sorted(found.items()) for row in _rows(subjects[who], plan, length, trials)
    ]


def _prompt(number: int, length: int, vocab: int, seed: int) -> list[int]:
    """Random tokens whose first ones are this prompt's own number, so that no two prompts share a beginning."""
    rng = random.Random(f"{seed} {number}")
    nonce = [number % vocab, number // vocab % vocab]
    return (nonce + [rng.randrange(vocab) for _ in range(length)])[:length]


def _checked(subject: Subject, prompt: Sequence[int], count: int, turn: Sequence[int]) -> Trial:
    trial = subject.trial(prompt, count, turn)
    if trial.reused_tokens:
        raise NumericsError(f"{subject.name} reused {trial.reused_tokens} tokens of a prompt that was to be read anew.")
    if len(trial.token_seconds) != count:
        raise NumericsError(f"{subject.name} generated {len(trial.token_seconds)} tokens instead of {count}.")
    return trial


def _rows(subject: Subject, plan: Plan, length: int, trials: list[tuple[int, Trial]]) -> Iterator[Row]:
    order = tuple(number for number, _ in trials)
    found = [trial for _, trial in trials]

    def row(kind: Kind, tokens: int, seconds: Iterable[float]) -> Row:
        first = found[0]
        peak = max(trial.peak_bytes for trial in found)
        return Row(
            subject.name, kind, length, tokens, tuple(seconds), order, 0, first.state_bytes, first.kv_bytes, peak
        )

    if length in plan.lengths:
        yield row("prefill", length, (t.prefill_seconds for t in found))
    if length in plan.contexts:
        yield row("decode", plan.count - 1, (t.token_seconds[-1] for t in found))
        yield row("turn", TURN, (t.turn_seconds for t in found))


def drift(rows: Sequence[Row]) -> float:
    """How much faster the last repetitions were than the first ones, as a fraction; negative for slower.

    The median over all rows of the change between the first and the last third of each row's repetitions.
    """
    changes = []
    for row in rows:
        third = max(1, len(row.rates) // 3)
        changes.append(statistics.median(row.rates[-third:]) / statistics.median(row.rates[:third]) - 1)
    return statistics.median(changes) if changes else 0.0


def same_tokens(subjects: Sequence[Subject], vocab: int, length: int = 64, count: int = 32) -> dict[str, int]:
    """How many greedy tokens each subject has in common with the first one before they part, out of `count`."""
    prompt = _prompt(0, length, vocab, -1)
    found = [subject.trial(prompt, count, prompt[:1]).tokens for subject in subjects]
    return {
        subject.name: next((i for i, (a, b) in enumerate(zip(found[0], tokens, strict=True)) if a != b), count)
        for subject, tokens in zip(subjects, found, strict=True)
    }


def memory_bandwidth(nbytes: int = 2**28, repetitions: int = 5) -> float:
    """Bytes per second this machine's memory gives to MLX: the best of a matrix-vector product, a sum and a copy.

    Args:
        nbytes: size of the array that is read; far more than a cache.
        repetitions: the fastest counts.
    """
    columns = 4096
    matrix = mx.ones((max(1, nbytes // 4 // columns), columns), dtype=mx.float32)
    vector = mx.ones((columns,), dtype=mx.float32)
    ways: list[tuple[Callable[[], mx.array], int]] = [
        (lambda: matrix @ vector, matrix.nbytes),
        (lambda: matrix.sum(), matrix.nbytes),
        (lambda: matrix + 1.0, 2 * matrix.nbytes),
    ]
    best = 0.0
    for way, moved in ways:
        mx.eval(way())
        for _ in range(repetitions):
            start = time.perf_counter()
            mx.eval(way())
            best = max(best, moved / (time.perf_counter() - start))
    return best
