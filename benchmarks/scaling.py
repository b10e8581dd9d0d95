"""How the cost of a pure recurrent model grows with the context: prefill in proportion, decoding not at all.

    python benchmarks/scaling.py

A random gated delta net (hidden 256, 4 layers, heads of 64, float32). Prefill: prompts of 4,096 to 65,536 tokens,
alternating; the time per token and the highest memory should not depend on the length. Decoding: two states, behind 100
and behind 20,000 tokens, take turns of a few tokens each, so that whatever else the machine does meets both alike.
Correctness first: the state behind 20,000 tokens must be finite and another one than behind 100.
"""

from __future__ import annotations

import random
import statistics
import time

import click

from mlxlin.backend import mx
from mlxlin.bench import Local
from mlxlin.generate import decode, prefill
from mlxlin.models import Model, find, parameters
from mlxlin.sampling import Sampler, Sampling
from mlxlin.state import State

VOCAB = 4096
CONFIG = {
    "model_type": "gated_deltanet",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_heads": 4,
    "head_dim": 64,
    "expand_v": 1,
    "intermediate_size": 704,
    "max_position_embeddings": 65536,
}
LENGTHS = (4096, 16384, 65536)
CONTEXTS = (100, 20_000)
TURN = 16  # tokens that one state decodes before the other has its turn


def random_model() -> Model:
    """Weights of the usual size; states that last for hundreds of tokens."""
    mx.random.seed(0)
    spec = find(CONFIG).spec(CONFIG)
    params = {}
    for name, parameter in parameters(spec).items():
        if name.endswith(("A_log", "dt_bias")):
            params[name] = mx.random.normal(parameter.shape) - 3
        elif len(parameter.shape) == 1:
            params[name] = mx.ones(parameter.shape)
        else:
            params[name] = mx.random.normal(parameter.shape) * parameter.shape[-1] ** -0.5
    return Model(spec, params)


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens."""
    return random.Random(seed).choices(range(VOCAB), k=length)


def measure_prefill(model: Model, repetitions: int) -> None:
    """Print time per token and memory by length."""
    local = Local(model)
    local.trial(prompt(512, 0), 1, [1])
    found: dict[int, list[float]] = {length: [] for length in LENGTHS}
    peaks = {}
    for repetition in range(repetitions):
        for length in LENGTHS if repetition % 2 == 0 else reversed(LENGTHS):
            trial = local.trial(prompt(length, repetition), 1, [1])
            found[length].append(trial.prefill_seconds / length)
            peaks[length] = trial.peak_bytes
    first = statistics.median(found[LENGTHS[0]])
    for length in LENGTHS:
        cost = statistics.median(found[length])
        click.echo(
            f"prefill {length:>6} tokens: {1 / cost:7,.0f} tokens/s, {peaks[length] / 1e6:,.0f} MB; "
            f"of the shortest: time per token {cost / first:.2f}, memory {peaks[length] / peaks[LENGTHS[0]]:.2f}"
        )


def measure_decode(model: Model, turns: int) -> None:
    """Print time per token behind a short and behind a long context."""
    states: list[State] = []
    for context in CONTEXTS:
        _, state = prefill(model, prompt(context, context))
        mx.eval(state.leaves())
        states.append(state)
    short, long = (mx.concatenate([leaf.flatten() for leaf in state.leaves()[1:]]) for state in states)
    assert bool(mx.isfinite(long).all()) and not mx.allclose(short, long)
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 1):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            seconds = _turn(model, states[which])
            if turn:  # the first warms up
                found[which].append(seconds)
    medians = [statistics.median(times) for times in found]
    for context, seconds in zip(CONTEXTS, medians, strict=True):
        click.echo(f"decode behind {context:>6} tokens: {seconds * 1e3:.2f} ms per token, {1 / seconds:,.0f} tokens/s")
    pairs = [b / a for a, b in zip(*found, strict=True)]
    click.echo(
        f"ratio of the medians {medians[1] / medians[0]:.3f}, median of the ratios {statistics.median(pairs):.3f}"
    )


def _turn(model: Model, state: State) -> float:
    """Median seconds of a token."""
    logits, after = model([[1]], state, logits="last")
    assert logits is not None
    mx.eval(logits, after.leaves())
    moments = []
    for _ in decode(model, logits, after, Sampler(Sampling(temperature=0.0)), max_tokens=TURN):
        moments.append(time.perf_counter())
    return statistics.median(b - a for a, b in zip(moments, moments[1:], strict=False))


@click.command(help=__doc__)
@click.option("-r", "--repetitions", type=int, default=3, show_default=True, help="Of every prompt.")
@click.option("-t", "--turns", type=int, default=30, show_default=True, help="Of each state.")
def main(repetitions: int, turns: int) -> None:
    model = random_model()
    measure_prefill(model, repetitions)
    measure_decode(model, turns)


if __name__ == "__main__":
    main()
