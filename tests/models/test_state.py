"""States of real models: values, batches, saving, and the faults that states have had elsewhere."""

from __future__ import annotations

import functools

import pytest

from mlxlin.backend import mx
from mlxlin.errors import InputError, SessionError
from mlxlin.models import Model
from mlxlin.models.activations import softplus
from mlxlin.models.mixers.convolution import short_convolution
from mlxlin.models.norms import UnitVectors
from mlxlin.models.params import Params
from mlxlin.state import State
from tests.models.golden import FIXTURES, TOLERANCE, Golden, difference, model_of, plan_of

HYBRIDS = ["qwen3_5", "gla-hybrid", "kda-hybrid"]


@functools.cache
def model(name: str, dtype: mx.Dtype = mx.float32) -> Model:
    golden = Golden.load(FIXTURES / name)
    if dtype == mx.float32:
        return model_of(golden.config, golden.tensors)
    plan = plan_of(golden.config, golden.tensors)
    return Model(plan.spec, {t.name: t.read().astype(dtype) for t in plan.targets})


def tokens(count: int, seed: int = 0, batch: int = 1) -> mx.array:
    return mx.random.randint(0, 60, (batch, count), key=mx.random.key(seed))


def same(a: State, b: State) -> bool:
    """Bit for bit."""
    x, y = a.arrays(), b.arrays()
    return x.keys() == y.keys() and all(bool(mx.array_equal(x[name], y[name])) for name in x)


@pytest.mark.parametrize("name", HYBRIDS)
def test_b43_decoding_never_changes_a_held_state(name: str) -> None:
    _, snapshot = model(name)(tokens(9))
    before = {key: mx.array(array) for key, array in snapshot.arrays().items()}
    mx.eval(list(before.values()))
    state = snapshot
    for step in range(10):
        _, state = model(name)(tokens(1, step), state)
        mx.eval(state.leaves())
    after = snapshot.arrays()
    assert all(bool(mx.array_equal(before[key], after[key])) for key in before)
    assert state.positions.item() == 19


@pytest.mark.parametrize("name", HYBRIDS)
def test_forks_are_independent(name: str) -> None:
    run = model(name)
    _, base = run(tokens(20))
    left, _ = run(tokens(5, 1), base)
    right, _ = run(tokens(5, 2), base)
    again, _ = run(tokens(5, 1), base)
    assert difference(left, again) == 0.0
    whole, _ = run(mx.concatenate([tokens(20), tokens(5, 2)], axis=1))
    assert difference(right, whole[:, 20:]) < TOLERANCE


@pytest.mark.parametrize("name", HYBRIDS)
def test_b51_restoring_brings_every_layer_back_to_one_position(name: str) -> None:
    run = model(name)
    _, early = run(tokens(12))
    point = early.checkpoint()
    _, late = run(tokens(30, 1), early)
    expected, _ = run(tokens(7, 2), early)
    kept = early.kv_length
    del early
    back = late.restore(point)
    assert back.kv_length == kept and back.positions.item() == 12
    logits, _ = run(tokens(7, 2), back)
    assert difference(logits, expected) < TOLERANCE
    with pytest.raises(SessionError):
        back.restore(late.checkpoint()) if kept else back.restore(model("kda")(tokens(2))[1].checkpoint())


@pytest.mark.parametrize("name", HYBRIDS)
def test_b45_saved_and_loaded_states_continue_alike(name: str) -> None:
    run = model(name)
    _, state = run(mx.concatenate([tokens(11), tokens(11, 5)]), lengths=[11, 4])
    loaded = State.from_arrays({k: mx.array(v) for k, v in state.arrays().items()}, run.fresh())
    assert same(state, loaded)
    assert difference(run(tokens(3, 8, 2), loaded)[0], run(tokens(3, 8, 2), state)[0]) == 0.0


def test_b45_an_incomplete_saved_state_is_refused() -> None:
    run = model("qwen3_5")
    _, state = run(tokens(5))
    arrays = state.arrays()
    for name in arrays:
        with pytest.raises(SessionError, match=name):
            State.from_arrays({k: v for k, v in arrays.items() if k != name}, run.fresh())
    with pytest.raises(SessionError, match="layers.0.extra"):
        State.from_arrays({**arrays, "layers.0.extra": mx.zeros((1,))}, run.fresh())
    with pytest.raises(SessionError, match="layers.0.S"):
        State.from_arrays({**arrays, "layers.0.S": arrays["layers.0.S"].astype(mx.bfloat16)}, run.fresh())
    shorter = {k: v[:, :, :-1] if k.endswith(("keys", "values")) else v for k, v in arrays.items()}
    with pytest.raises(SessionError, match="different lengths"):
        State.from_arrays({**shorter, "layers.3.keys": arrays["layers.3.keys"]}, run.fresh())


@pytest.mark.parametrize("name", ["qwen3_5", "kda", "retnet"])
def test_b41_recurrent_state_is_float32_whatever_the_weights_are(name: str) -> None:
    run = model(name, mx.bfloat16)
    assert run.dtype == mx.bfloat16
    _, state = run(tokens(70))
    for step in range(40):
        _, state = run(tokens(1, step), state)
        mx.eval(state.leaves())
    recurrent = [layer for layer in state.layers if isinstance(layer, dict)]
    assert recurrent and all(layer["S"].dtype == mx.float32 for layer in recurrent)
    saved = {k: mx.array(v) for k, v in state.arrays().items()}
    assert all(array.dtype == mx.float32 for key, array in saved.items() if key.endswith(".S"))
    assert same(State.from_arrays(saved, run.fresh()), state)


@pytest.mark.parametrize("name", ["qwen3_5", "gated_deltanet-hybrid", "kda", "gla-gqa", "linear_attn-elu", "retnet"])
def test_b39_batched_prompts_equal_prompts_alone(name: str) -> None:
    run, counts = model(name), [3, 27, 1, 59]
    prompts = [tokens(count, seed) for seed, count in enumerate(counts)]
    padded = mx.concatenate([mx.pad(p, [(0, 0), (0, 59 - p.shape[1])]) for p in prompts])
    logits, together = run(padded, lengths=counts, logits="last")
    alone = [run(p, logits="last") for p in prompts]
    for _ in range(6):
        best = mx.argmax(logits[:, -1:], axis=-1)
        for row, (single, state) in enumerate(alone):
            assert difference(logits[row : row + 1], single) < TOLERANCE
            assert mx.argmax(single[:, -1:], axis=-1).item() == best[row].item()
            alone[row] = run(best[row : row + 1], state)
        logits, together = run(best, together)


def test_rows_can_be_picked_out_of_a_batch() -> None:
    run = model("qwen3_5")
    batch = mx.concatenate([tokens(9, seed) for seed in range(3)])
    _, state = run(batch, lengths=[9, 2, 5])
    picked = state.rows([2, 0, 2])
    assert picked.batch == 3 and picked.positions.tolist() == [5, 9, 5]
    logits, _ = run(mx.array([[1], [2], [1]]), picked)
    whole, _ = run(mx.array([[2], [0], [1]]), state)
    assert difference(logits, mx.stack([whole[2], whole[0], whole[2]])) < TOLERANCE


def test_b34_one_token_first_equals_the_first_of_many() -> None:
    run = model("qwen3_5")
    poisoned = {name: mx.full(array.shape, mx.nan) for name, array in run.fresh().arrays().items() if ".S" in name}
    fresh = run.fresh().arrays()
    stale = State.from_arrays({**fresh, **poisoned}, run.fresh())
    mx.eval(run(tokens(1), stale)[1].leaves())  # somebody else's broken state must not reach a fresh one
    one, _ = run(tokens(9)[:, :1])
    many, _ = run(tokens(9))
    assert difference(one, many[:, :1]) < TOLERANCE


def test_b34_a_broken_row_does_not_reach_its_neighbour() -> None:
    run = model("gla-hybrid")
    _, state = run(mx.concatenate([tokens(6), tokens(6, 1)]))
    arrays = {
        k: mx.concatenate([v[:1], mx.full(v[1:].shape, mx.nan)]) if ".S" in k else v for k, v in state.arrays().items()
    }
    broken = State.from_arrays(arrays, run.fresh())
    ids = tokens(4, 3, 2)
    assert difference(run(ids, broken)[0][:1], run(ids, state)[0][:1]) == 0.0


@pytest.mark.parametrize("name", ["qwen3_5", "gated_deltanet", "gla-gqa", "kda-hybrid"])
def test_b33_windows_of_a_prompt_equal_the_whole(name: str) -> None:
    run, ids = model(name), tokens(48)
    whole, end = run(ids)
    state, pieces = None, []
    for start in (0, 16, 32):
        logits, state = run(ids[:, start : start + 16], state)
        pieces.append(logits)
    assert difference(mx.concatenate(pieces, axis=1), whole) < TOLERANCE
    assert all(difference(a, end.arrays()[k]) < TOLERANCE for k, a in state.arrays().items() if k.endswith(".S"))


@functools.cache
def decoded(count: int) -> tuple[State, list[mx.array], list[mx.array]]:
    """A state, and the logits and first recurrent matrix behind each of `count` tokens read one by one from there."""
    run = model("qwen3_5")
    _, start = run(tokens(10, 7))
    state, logits, matrices = start, [], []
    for t in range(count):
        one, state = run(tokens(131)[:, t : t + 1], state)
        logits.append(one)
        matrices.append(state.arrays()["layers.0.S"])
        mx.eval(logits[-1], state.leaves())
    return start, logits, matrices


@pytest.mark.parametrize("length", [1, 2, 15, 16, 63, 64, 65, 127, 128, 131])
def test_b31_any_length_from_a_state_equals_one_token_at_a_time(length: int) -> None:
    start, logits, matrices = decoded(131)
    together, after = model("qwen3_5")(tokens(131)[:, :length], start)
    assert difference(together, mx.concatenate(logits[:length], axis=1)) < TOLERANCE
    assert difference(after.arrays()["layers.0.S"], matrices[length - 1]) < TOLERANCE


@pytest.mark.parametrize("name", HYBRIDS)
def test_b37_no_tokens_change_nothing(name: str) -> None:
    run = model(name)
    for state in (run.fresh(), run(tokens(5))[1]):
        logits, after = run(mx.zeros((1, 0), dtype=mx.int32), state)
        assert logits.shape == (1, 0, run.vocab_size) and same(state, after)
    _, short = run(tokens(5), lengths=[0])
    assert all(
        difference(a, run.fresh().arrays()[k]) == 0.0
        for k, a in short.arrays().items()
        if "keys" not in k and "values" not in k and k != "slots"
    )


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_b36_b37_convolution_remembers_raw_inputs(length: int) -> None:
    """Sequences shorter than the kernel, with a bias, in two parts: the memory is inputs, not activations."""
    x, weight, bias = (mx.random.normal(shape) for shape in ((2, 12, 6), (4, 6), (6,)))
    empty = mx.zeros((2, 3, 6))
    whole, end = short_convolution(x, empty, weight, bias, None)
    first, memory = short_convolution(x[:, :length], empty, weight, bias, None)
    second, after = short_convolution(x[:, length:], memory, weight, bias, None)
    assert difference(mx.concatenate([first, second], axis=1), whole) < 1e-6
    assert difference(memory, mx.concatenate([empty, x], axis=1)[:, length : length + 3]) == 0.0
    assert difference(after, end) == 0.0 and difference(end, x[:, -3:]) == 0.0
    _, ragged = short_convolution(x, empty, weight, bias, mx.array([length, 12]))
    assert difference(ragged[:1], memory[:1]) == 0.0 and difference(ragged[1:], end[1:]) == 0.0


def test_the_convolution_memory_does_not_keep_the_prompt_alive() -> None:
    x = mx.random.normal((1, 4096, 256))
    _, memory = short_convolution(x, mx.zeros((1, 3, 256)), mx.ones((4, 256)), None, None)
    mx.eval(memory)
    del x
    mx.clear_cache()
    before = mx.get_active_memory()
    del memory
    assert before - mx.get_active_memory() < 100_000


def test_b57_extreme_gates_are_a_reset_or_nothing_never_nan() -> None:
    from mlxlin.models.mixers.gates import Decay

    spec = model("qwen3_5").spec.layers[0].mixer
    heads = spec.value_heads
    arrays = {"A_log": mx.full((heads,), 100.0), "dt_bias": mx.zeros((heads,))}
    decay = Decay(spec, Params(arrays, {}))
    g = decay(mx.array([-200.0, -1.0, 200.0])[None, :, None] * mx.ones((1, 3, heads)))
    assert g[0, 0].tolist() == [0.0] * heads
    assert bool(mx.all(mx.exp(g[0, 1:]) == 0)) and not bool(mx.any(mx.isnan(g)))
    assert softplus(mx.array([-200.0, 200.0])).tolist() == [0.0, 200.0]


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e-4])
def test_b61_unit_vectors_of_nothing_are_nothing(size: float) -> None:
    unit = UnitVectors(1.0, 16, Params({}, {}), mx.float32)(mx.full((1, 1, 1, 16), size))
    expected = size / (16 * size * size + 1e-6) ** 0.5
    assert difference(unit, mx.full((1, 1, 1, 16), expected)) < 1e-6


def test_sizes_are_what_is_held() -> None:
    run = model("qwen3_5")
    _, state = run(tokens(37))
    attention = run.spec.layers[3].mixer
    per_token = 2 * attention.kv_heads * attention.head_dim * 4
    assert run.kv_bytes_per_token == per_token and state.kv_nbytes == 37 * per_token
    assert state.nbytes == run.state_nbytes(37) == state.recurrent_nbytes + state.kv_nbytes
    assert state.kv_capacity_nbytes >= state.kv_nbytes
    assert state.recurrent_nbytes == sum(a.nbytes for k, a in state.arrays().items() if k.endswith((".S", ".conv")))


def test_wrong_shapes_are_named() -> None:
    run = model("qwen3_5")
    _, state = run(tokens(3))
    for call in (
        lambda: run(mx.zeros((3,), dtype=mx.int32)),
        lambda: run([[1, 2], [3]]),
        lambda: run([[run.vocab_size]]),
        lambda: run(mx.array([[1, run.vocab_size]])),
        lambda: run(mx.array([[1, -1]])),
        lambda: run(mx.array([[1.0, 2.0]])),
        lambda: run(tokens(3, 0, 2), state),
        lambda: run(tokens(3), lengths=[4]),
        lambda: run(tokens(3), lengths=[1, 2]),
        lambda: run(tokens(3), logits="first"),
        lambda: model("gated_deltanet")(tokens(1), state),
    ):
        with pytest.raises(InputError):
            call()
