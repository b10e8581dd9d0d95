"""Predicted times on Apple chips, from work that was counted. Predictions, not measurements: no Apple GPU was used.

    python benchmarks/roofline.py            # kernels on a chip, and decode speed of models beside published figures
    python benchmarks/roofline.py --chip "M4 Max" --tokens 4096

What is counted: the work of every kernel (bytes, operations, matrix products, SIMD functions) by the emulator in
tests/msl, on small calls, scaled by tokens and heads; the dispatches of a decode step, 4-bit weights and 8-bit gates,
in the graph that MLX exports, up to and including the choice of the next token.

What is assumed, and from where (nothing here is fitted to this project's kernels):
- Bandwidth and cores by Apple's and reviewers' tables; four schedulers of 32 lanes per core at 1.4 GHz.
- Cycles of one scheduler per SIMD-group instruction (public reverse engineering, M1 class): a fused multiply-add 1, a
  special function 4, a shuffle 2, an 8x8x8 float32 matrix product 16 / 0.8, and 16 bytes loaded or stored per cycle.
- A kernel takes the longer of its bytes at full bandwidth and its cycles on all schedulers, no shorter than one
  SIMD-group's share, plus one dispatch. Latency that nothing hides, spilled registers and sinking clocks are not in it:
  expect real kernels at a third to all of the predicted speed.
- A dependent dispatch costs 2.15 us (a published run: 646 dispatches of a 0.8B model on an M2 Max, 8 bits, 3.85 ms of
  which 2.46 ms are bytes). A decode step takes its bytes at full bandwidth plus its dispatches.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mlxlin.backend import mx
from mlxlin.metal.recurrence import chunk, scan
from mlxlin.sampling import Sampling
from tests.metal.cases import Case, arguments
from tests.metal.conftest import emulated
from tests.metal.measure import Launch, launches_of
from tests.metal.tokens import DENSE, EXPERTS, layer_dispatches, token_dispatches

DISPATCH = 2.15e-6
CLOCK, SCHEDULERS = 1.4e9, 4
CYCLES = {"fma": 1.0, "special": 4.0, "shuffle": 2.0, "product": 16 / 0.8}
BYTES_PER_CYCLE = 16


@dataclass(frozen=True)
class Chip:
    """Memory bandwidth in bytes per second and GPU cores."""

    bandwidth: float
    cores: int


CHIPS = {
    "M1": Chip(68e9, 8),
    "M2 Pro": Chip(200e9, 19),
    "M2 Max": Chip(400e9, 38),
    "M3 Max": Chip(400e9, 40),
    "M4": Chip(120e9, 10),
    "M4 Max": Chip(546e9, 40),
    "M5": Chip(153e9, 10),
    "M3 Ultra": Chip(819e9, 80),
}


@dataclass(frozen=True)
class Work:
    """One kernel's work, over all its SIMD-groups: unique bytes, scheduler cycles, and how many groups share them."""

    unique: float
    cycles: float
    groups: float

    @classmethod
    def of(cls, launch: Launch) -> Work:
        report = launch.report
        shuffles = report.simd_ops - report.matrix_products
        cycles = (
            report.flops / 2 / 32 * CYCLES["fma"]
            + report.specials / 32 * CYCLES["special"]
            + shuffles * CYCLES["shuffle"]
            + report.matrix_products * CYCLES["product"]
            + launch.issued_bytes / BYTES_PER_CYCLE
        )
        return cls(report.unique_bytes, cycles, report.threads / 32)

    def grown(self, longer: Work, tokens: float, counted: tuple[int, int], heads: int) -> Work:
        """For `tokens` and `heads`, a straight line through this and the work of the second token count."""
        step = (tokens - counted[0]) / (counted[1] - counted[0])

        def line(a: float, b: float) -> float:
            return heads * (a + step * (b - a))

        return Work(
            line(self.unique, longer.unique), line(self.cycles, longer.cycles), line(self.groups, longer.groups)
        )

    def seconds(self, chip: Chip) -> float:
        """Predicted time of the launch."""
        busy = min(self.groups, chip.cores * SCHEDULERS)
        return max(self.unique / chip.bandwidth, self.cycles / busy / CLOCK) + DISPATCH


@dataclass(frozen=True)
class Published:
    """A decode speed somebody published: model, chip, runtime, tokens per second."""

    model: str
    chip: str
    runtime: str
    speed: float


# Bytes of a decode step with 4-bit weights: weights, state twice, no context (public configurations); layers.
MODELS = {"Qwen3.5-0.8B": (461e6, 24), "Qwen3.5-4B": (2466e6, 32), "Qwen3.5-9B": (4564e6, 32)}
PUBLISHED = (
    Published("Qwen3.5-0.8B", "M4", "mlx_lm", 192),
    Published("Qwen3.5-4B", "M4", "mlx_lm", 39),
    Published("Qwen3.5-9B", "M4", "mlx_lm", 22),
    Published("Qwen3.5-9B", "M2 Max", "Rapid-MLX (on mlx-lm)", 63.5),
    Published("Qwen3.5-4B", "M5", "Rapid-MLX (on mlx-lm)", 46.9),
)
MLX_LM_DISPATCHES = 646 / 24  # per layer, published


def kernels(rule: str, tokens: int, heads: int, K: int, V: int) -> dict[str, list[Work]]:
    """The launches of `scan` and `chunk` for one row of `tokens`, counted at two lengths with one head."""
    counted = (32, 64)
    found: dict[str, list[list[Work]]] = {"scan": [], "chunk": []}
    with emulated():
        for T in counted:
            x = arguments(Case(rule, T=T, K=K, V=V, groups=1, dtype=mx.bfloat16).inputs())
            found["scan"].append([Work.of(launch) for launch in launches_of(lambda x=x: scan(x))])
            columns = 2 if K <= 128 else 1
            launches = launches_of(lambda x=x, columns=columns: chunk(x, columns=columns))
            found["chunk"].append([Work.of(launch) for launch in launches])
    return {
        name: [a.grown(b, tokens, counted, heads) for a, b in zip(short, long, strict=True)]
        for name, (short, long) in found.items()
    }


def print_kernels(chip: str, tokens: int) -> None:
    print(f"Recurrence kernels of one layer, {tokens} tokens, 32 value heads, K = V = 128, bfloat16, {chip}:")
    for rule in ("gated_delta", "decay", "kda", "dplr"):
        for name, works in kernels(rule, tokens, 32, 128, 128).items():
            total = sum(work.seconds(CHIPS[chip]) for work in works)
            rows = 32 * 128 * tokens
            cycles = sum(work.cycles for work in works) / rows
            print(
                f"  {rule:12} {name:6} {1e3 * total:8.3f} ms  {1e6 * total / tokens:7.3f} us/token  "
                f"{cycles:6.1f} scheduler cycles per value row and token"
            )
    print("  published calibration: about 138 cycles for mlx-lm's first kernel, half of that for its packed one")


def print_decode() -> None:
    for name, config in (("dense", DENSE), ("with experts", EXPERTS)):
        for part, found in layer_dispatches(config, packed=True).items():
            print(f"Dispatches per token, {name}, {part}: {found.total()}  {dict(found)}")
    parts = {part: found.total() for part, found in layer_dispatches(DENSE, packed=True).items()}
    linear, attention, rest = parts.values()
    without = token_dispatches(DENSE, packed=True)
    choices = {"greedy": Sampling(), "top-k and top-p": Sampling(temperature=0.7, top_k=20, top_p=0.9)}
    choosing = {name: (token_dispatches(DENSE, True, how) - without).total() for name, how in choices.items()}
    print(f"Dispatches of choosing the token: {choosing}")
    print("\nDecode, 4-bit weights, no context, greedy: predicted tokens/s, and what was published for mlx-lm")
    for row in PUBLISHED:
        nbytes, layers = MODELS[row.model]
        seconds = nbytes / CHIPS[row.chip].bandwidth
        dispatches = layers * (0.75 * linear + 0.25 * attention) + rest + choosing["greedy"]
        ours = seconds + DISPATCH * dispatches
        theirs = seconds + DISPATCH * layers * MLX_LM_DISPATCHES
        print(
            f"  {row.model:13} {row.chip:7} mlxlin {1 / ours:6.1f}   mlx-lm {1 / theirs:6.1f}, "
            f"published {row.speed:5.1f} ({row.runtime}; {row.speed * theirs:.0%} of the prediction)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=CHIPS, default="M3 Max")
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    print("Predictions from counted work; see the assumptions in this file. No Apple GPU was used.\n")
    print_kernels(options.chip, options.tokens)
    print()
    print_decode()


if __name__ == "__main__":
    main()
