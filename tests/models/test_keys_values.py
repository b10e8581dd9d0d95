"""Append-only keys and values: sharing, forks, truncation, cost."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlin.backend import mx
from mlxlin.errors import InputError
from mlxlin.keys_values import KeysValues

SHAPES = {"keys": (2, 8), "values": (2, 4)}


def rows(count: int, start: int = 0) -> tuple[mx.array, mx.array]:
    """Rows whose every number is the row's index."""
    index = mx.arange(start, start + count, dtype=mx.float32)[None, None, :, None]
    return mx.broadcast_to(index, (1, 2, count, 8)), mx.broadcast_to(index, (1, 2, count, 4))


def indices(value: KeysValues) -> list[int]:
    """The row indices a value holds, after checking that keys and values agree everywhere."""
    keys, values = (np.array(a) for a in value.view())
    assert (keys == keys[:, :1, :, :1]).all() and (values == keys[:, :1, :, :1]).all()
    return [int(n) for n in keys[0, 0, :, 0]]


def test_append_keeps_older_values() -> None:
    empty = KeysValues.empty(SHAPES, 1, mx.float32)
    three = empty.append(*rows(3))
    five = three.append(*rows(2, 3))
    assert (indices(empty), indices(three), indices(five)) == ([], [0, 1, 2], [0, 1, 2, 3, 4])
    assert three.storage is five.storage


def test_fork_copies_once_and_only_the_diverging_side() -> None:
    base = KeysValues.empty(SHAPES, 1, mx.float32).append(*rows(3))
    one = base.append(*rows(1, 10))
    other = base.append(*rows(1, 20))
    again = other.append(*rows(1, 30))
    assert indices(one) == [0, 1, 2, 10] and indices(again) == [0, 1, 2, 20, 30]
    assert one.storage is base.storage and other.storage is again.storage is not base.storage


def test_append_below_a_dead_end_writes_in_place() -> None:
    value = KeysValues.empty(SHAPES, 1, mx.float32).append(*rows(3))
    longer = value.append(*rows(4, 3))
    storage = value.storage
    del longer
    gc.collect()
    assert value.append(*rows(1, 9)).storage is storage


def test_truncate_is_a_length() -> None:
    value = KeysValues.empty(SHAPES, 1, mx.float32).append(*rows(6))
    short = value.truncate(2)
    assert short.storage is value.storage and indices(short) == [0, 1]
    assert indices(short.append(*rows(1, 7))) == [0, 1, 7] and indices(value) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(InputError, match="Cannot truncate"):
        short.truncate(3)


def test_appending_copies_no_buffer_while_older_values_are_held() -> None:
    """One more row behind 16 MB of them must not need another 16 MB, however many values are held."""
    shapes = {"keys": (2, 64), "values": (2, 64)}
    value = KeysValues.empty(shapes, 1, mx.float32).append(*(mx.zeros((1, 2, 16384, 64)) for _ in range(2)))
    value = value.append(*(mx.ones((1, 2, 1, 64)) for _ in range(2)))  # grows here, not below
    mx.eval(value.storage.buffers)
    held, growths = [value], value.storage.growths
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(20):
        value = value.append(*(mx.ones((1, 2, 1, 64)) for _ in range(2)))
        mx.eval(value.storage.buffers)
        held.append(value)
    assert value.storage.growths == growths
    assert mx.get_peak_memory() - before < 1 << 20
    assert [v.length for v in held] == list(range(16385, 16406))


def test_growth_copies_are_rare() -> None:
    value = KeysValues.empty({"keys": (1, 1)}, 1, mx.float32)
    for _ in range(3000):
        value = value.append(mx.zeros((1, 1, 1, 1)))
    assert value.storage.growths <= 10 and value.storage.capacity < 2 * value.length
    assert value.nbytes == 3000 * 4 <= value.capacity_nbytes


@settings(max_examples=60)
@given(st.data())
def test_any_history_equals_lists(data: st.DataObject) -> None:
    """Random appends, truncations and forks against plain lists."""
    held: list[tuple[KeysValues, list[int]]] = [(KeysValues.empty(SHAPES, 1, mx.float32), [])]
    fresh = 1
    for _ in range(data.draw(st.integers(1, 12))):
        value, expected = held[data.draw(st.integers(0, len(held) - 1))]
        if data.draw(st.booleans()):
            count = data.draw(st.integers(0, 3))
            held.append((value.append(*rows(count, fresh)), [*expected, *range(fresh, fresh + count)]))
            fresh += count
        else:
            length = data.draw(st.integers(0, len(expected)))
            held.append((value.truncate(length), expected[:length]))
        if len(held) > 3 and data.draw(st.booleans()):
            held.pop(data.draw(st.integers(0, len(held) - 1)))
    for value, expected in held:
        assert indices(value) == expected
