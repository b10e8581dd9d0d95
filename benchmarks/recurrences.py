"""How fast each recurrence rule runs here: prefill by chunk length, and decode.

    python benchmarks/recurrences.py --tokens 2048 --heads 8 --sizes 64,128 --rules gated_delta,kda --repeats 5

Nothing is timed that is not right: each rule is first compared with the float64 definition. Chunk lengths take turns
within every repeat, so that a change of the machine's load or temperature meets all of them; the best repeat counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mlxlin.backend import describe_backend, mx
from mlxlin.recurrences import RULES, paths, reference, run

CHUNKS = (16, 32, 64, 128)
TOLERANCE = 1e-5
Call = tuple[str, mx.array, mx.array, mx.array, dict[str, Any]]


def problem(rule: str, T: int, H: int, size: int) -> Call:
    """A random call with unit keys; two sub-steps where the rule has them."""
    rng = np.random.default_rng(0)
    kind, n = RULES[rule], 2 if RULES[rule].substeps else 1

    def array(x: np.ndarray) -> mx.array:
        return mx.array(x.astype(np.float32))

    def unit(*shape: int) -> np.ndarray:
        x = rng.standard_normal(shape)
        return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))

    rest: dict[str, Any] = {"state": array(rng.standard_normal((1, H, size, size)))}
    if kind.decays[-1] != "none":
        shape = (1, T, H) if kind.decays[-1] == "head" else (1, T, H, size)
        rest["g"] = array(-rng.exponential(0.1, shape))
    if kind.write == "delta":
        rest["beta"] = array(rng.uniform(0, 1, (1, T * n, H)))
    if kind.write == "low_rank":
        removal = unit(1, T, H, size)
        rest["a"], rest["b"] = array(-removal), array(removal * rng.uniform(0, 1, removal.shape))
    q, k, v = unit(1, T, H, size), unit(1, T * n, H, size), rng.standard_normal((1, T * n, H, size))
    return rule, array(q), array(k), array(v), rest


def verify(rule: str, size: int) -> float:
    """Relative error of `run` against the definition; refuses to go on where it is too large."""
    name, q, k, v, rest = problem(rule, 200, 2, size)
    worst = 0.0
    for chunk in (None, *CHUNKS):
        got = run(name, q, k, v, **rest, chunk=chunk)
        for x, want in zip(got, reference.scan(name, q, k, v, **rest), strict=True):
            worst = max(worst, float(mx.sqrt(mx.mean((x - want) ** 2) / mx.mean(want**2))))
    if not worst < TOLERANCE:
        raise SystemExit(f"{rule}: relative error {worst:.1e}, more than {TOLERANCE}; not timed")
    return worst


def seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    mx.eval(call())
    return time.perf_counter() - started


def prefill(rule: str, T: int, H: int, size: int, repeats: int) -> dict[int, float]:
    """Tokens per second by chunk length."""
    name, q, k, v, rest = problem(rule, T, H, size)
    mx.eval(q, k, v, *rest.values())
    best = dict.fromkeys(CHUNKS, float("inf"))
    for repeat in range(repeats + 1):
        for chunk in CHUNKS:
            taken = seconds(partial(run, name, q, k, v, **rest, chunk=chunk))
            if repeat:  # the first round warms up
                best[chunk] = min(best[chunk], taken)
    return {chunk: T / taken for chunk, taken in best.items()}


def decode(rule: str, H: int, size: int, repeats: int, steps: int = 50) -> float:
    """Tokens per second one by one, each evaluated."""
    name, q, k, v, rest = problem(rule, 1, H, size)
    best = float("inf")
    for _ in range(repeats + 1):
        state, started = rest["state"], time.perf_counter()
        for _ in range(steps):
            y, state = run(name, q, k, v, **{**rest, "state": state})
            mx.eval(y, state)
        best = min(best, time.perf_counter() - started)
    return steps / best


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the recurrence rules on this machine.")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sizes", default="64,128", help="head sizes K = V")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    backend = describe_backend()
    blas = f"{backend['blas']}, {backend['blas_threads']} threads"
    print(f"{backend['chip']}, {backend['device']}, MLX {backend['mlx']}, {blas}")
    print("paths: " + "; ".join(f"{row['path']} ({row['decay']}; {row['tokens']} tokens)" for row in paths.table()))
    print(f"tokens/s of one layer, T = {options.tokens}, {options.heads} heads")
    print(f"{'rule':14}{'K = V':>6}{'error':>10}" + "".join(f"{f'C = {C}':>10}" for C in CHUNKS) + f"{'decode':>10}")
    for rule in options.rules.split(","):
        for size in map(int, options.sizes.split(",")):
            error = verify(rule, size)
            rates = prefill(rule, options.tokens, options.heads, size, options.repeats)
            one = decode(rule, options.heads, size, options.repeats)
            row = "".join(f"{rates[C]:10,.0f}" for C in CHUNKS)
            print(f"{rule:14}{size:6}{error:10.1e}{row}{one:10,.0f}", flush=True)


if __name__ == "__main__":
    main()
