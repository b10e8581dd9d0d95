"""Every family against its source: logits, states, split prefill, decoding, padded batches, greedy text."""

from __future__ import annotations

import functools
import json

import pytest

from mlxlin.backend import mx
from mlxlin.models import Model, ModelSpec
from tests.models.golden import FIXTURES, TOLERANCE, Golden, difference, model_of

NAMES = sorted(folder.name for folder in FIXTURES.iterdir() if (folder / "golden.safetensors").exists())


@functools.cache
def loaded(name: str) -> tuple[Golden, Model]:
    golden = Golden.load(FIXTURES / name)
    return golden, model_of(golden.config, golden.tensors)


pytestmark = pytest.mark.parametrize("name", NAMES)


def test_logits_and_states_equal_the_source(name: str) -> None:
    golden, model = loaded(name)
    for row in range(2):
        logits, state = model(golden.row(row))
        assert logits is not None and difference(logits, golden.logits(row)) < TOLERANCE
        arrays = state.arrays()
        for key, expected in golden.expected.items():
            if key.startswith("layers."):
                assert arrays[key].dtype == mx.float32
                assert difference(arrays[key], expected[row : row + 1]) < TOLERANCE * max(
                    1.0, float(mx.abs(expected).max())
                )


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (40,), (64,), (63, 65), (17, 18, 50), (70,)], ids=str)
def test_prefill_can_be_split_anywhere(name: str, cuts: tuple[int, ...]) -> None:
    golden, model = loaded(name)
    ids, state, pieces = golden.row(0), None, []
    for start, stop in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
        logits, state = model(ids[:, start:stop], state)
        pieces.append(logits)
    assert difference(mx.concatenate(pieces, axis=1), golden.logits(0)) < TOLERANCE


def test_token_by_token_equals_the_source(name: str) -> None:
    golden, model = loaded(name)
    ids, state, pieces = golden.row(1), None, []
    for t in range(ids.shape[1]):
        logits, state = model(ids[:, t : t + 1], state)
        pieces.append(logits)
        mx.eval(state.leaves())
    assert difference(mx.concatenate(pieces, axis=1), golden.logits(1)) < TOLERANCE


def test_padded_rows_equal_rows_alone(name: str) -> None:
    golden, model = loaded(name)
    ids, lengths = golden.expected["ids"], golden.lengths
    together, state = model(ids, lengths=lengths)
    assert together is not None
    for row, length in enumerate(lengths):
        assert difference(together[row : row + 1, :length], golden.logits(row)) < TOLERANCE
    last, _ = model(ids, lengths=lengths, logits="last")
    expected = mx.concatenate([golden.logits(row)[:, -1:] for row in range(2)])
    assert difference(last, expected) < TOLERANCE
    # The rows go on as if they had been alone, also through another padded call.
    more, some = mx.array([[5, 9, 11], [7, 0, 0]]), [3, 1]
    padded, state = model(more, state, lengths=some)
    single, state = model(mx.array([[3], [4]]), state)
    for row, count in enumerate(some):
        alone, after = model(golden.row(row))
        steps, after = model(more[row : row + 1, :count], after)
        final, after = model(mx.array([[3 + row]]), after)
        assert difference(padded[row : row + 1, :count], steps) < TOLERANCE
        assert difference(single[row : row + 1], final) < TOLERANCE
        assert state.positions[row] == after.positions[0] == golden.lengths[row] + count + 1


def test_greedy_text_equals_the_source(name: str) -> None:
    golden, model = loaded(name)
    expected = golden.expected["greedy"].tolist()
    prompt = 21
    logits, state = model([expected[:prompt]], logits="last")
    produced = []
    for _ in expected[prompt:]:
        token = int(mx.argmax(logits[0, -1]))
        produced.append(token)
        logits, state = model([[token]], state)
    assert produced == expected[prompt:]


def test_description_survives_json(name: str) -> None:
    golden, model = loaded(name)
    assert ModelSpec.from_json(json.loads(json.dumps(model.spec.to_json()))) == model.spec
