"""What appending one token costs at 1k and at 64k tokens of context, with and without older states held.

    python benchmarks/keys_values.py

Correctness first: the rows written are read back before a time is printed. Times are medians per
appended token, the best of several rounds that alternate between the lengths.
"""

from __future__ import annotations

import statistics
import time

from mlxlin.backend import mx
from mlxlin.keys_values import KeysValues

HEADS, WIDTH, STEPS, ROUNDS = 4, 128, 60, 5
SHAPES = {"keys": (HEADS, WIDTH), "values": (HEADS, WIDTH)}


def filled(length: int) -> KeysValues:
    """`length` rows and room for `STEPS` more."""
    block = mx.zeros((1, HEADS, length, WIDTH))
    value = KeysValues.empty(SHAPES, 1, mx.float32).append(block, block)
    value = value.append(*[mx.zeros((1, HEADS, 1, WIDTH))] * 2)
    mx.eval(value.storage.buffers)
    return value


def milliseconds_per_append(length: int, hold: bool) -> float:
    """Median time to append one row and have it in memory."""
    value, held, times = filled(length), [], []
    for step in range(STEPS):
        row = mx.full((1, HEADS, 1, WIDTH), float(step))
        mx.eval(row)
        if hold:
            held.append(value)
        start = time.perf_counter()
        value = value.append(row, row)
        mx.eval(value.storage.buffers)
        times.append((time.perf_counter() - start) * 1e3)
    written = value.view()[0][0, 0, -STEPS:, 0]
    assert written.tolist() == [float(step) for step in range(STEPS)], "rows read back differ from rows written"
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    for hold in (False, True):
        rounds = [[milliseconds_per_append(length, hold) for length in (1024, 65536)] for _ in range(ROUNDS)]
        short, long = (min(times) for times in zip(*rounds, strict=True))
        what = "older states held" if hold else "nothing held"
        print(f"{what:>18}: {short:.3f} ms at 1k, {long:.3f} ms at 64k, ratio {long / short:.2f}")


if __name__ == "__main__":
    main()
