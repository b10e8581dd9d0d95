"""Every path of every rule against the definition, and the properties that make a state a state."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recurrence_problems import GATES, RULE_NAMES, TOLERANCE, Problem, assert_matches, error, make

from mlxlin.backend import mx
from mlxlin.recurrences import RULES, chunkwise, step
from mlxlin.recurrences.rules import check
from mlxlin.recurrences.run import neutral_padding, one_substep

C = 32
LENGTHS = (1, 2, 3, C - 1, C, C + 1, 2 * C - 1, 2 * C, 2 * C + 3, 257)


def few(examples: int) -> settings:
    return settings(max_examples=examples, suppress_health_check=list(HealthCheck), derandomize=True)


@st.composite
def problems(draw: st.DrawFn, lengths: tuple[int, ...] = LENGTHS, dtypes: tuple[mx.Dtype, ...] = tuple(TOLERANCE)):
    rule = draw(st.sampled_from(RULE_NAMES))
    H = draw(st.integers(1, 2))
    return make(
        rule,
        B=draw(st.integers(1, 3)),
        T=draw(st.sampled_from(lengths)),
        H=H,
        HV=H * draw(st.integers(1, 4)),
        K=draw(st.sampled_from((16, 32, 64))),
        V=draw(st.sampled_from((16, 24, 48))),
        n=draw(st.integers(1, 3)),
        gates=draw(st.sampled_from(tuple(GATES))),
        decay=draw(st.sampled_from(RULES[rule].decays)),
        cosine=draw(st.sampled_from((0.0, 0.9))),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 2**16)),
    )


@few(60)
@given(problems(), st.sampled_from((None, 16, C, 64)))
def test_run_equals_the_definition(problem: Problem, chunk: int | None) -> None:
    assert_matches(problem, problem.run(chunk=chunk))


@pytest.mark.parametrize("rule", RULE_NAMES)
@pytest.mark.parametrize("T", LENGTHS)
def test_every_rule_at_every_length(rule: str, T: int) -> None:
    problem = make(rule, B=1, T=T, H=1, HV=2, K=16, V=8, seed=T)
    assert_matches(problem, problem.run(chunk=C))


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_both_paths_run_the_same_call(rule: str) -> None:
    """The step path on a long call and the chunk path on one token: each is right wherever the limit is drawn."""
    for T in (1, 5, 40):
        problem = make(rule, T=T, H=2, HV=6)
        x = one_substep(check(rule, problem.q, problem.k, problem.v, **problem.rest))
        n = x.tokens // T
        for y, S, _ in (step.run(x), chunkwise.run(x, 16)):
            assert_matches(problem, (y[:, n - 1 :: n], S))


@pytest.mark.parametrize("K, V", [(96, 32), (128, 192), (192, 64), (256, 16), (16, 256), (64, 512)])
@pytest.mark.parametrize("rule", ["decay", "gated_delta", "kda", "dplr"])
def test_head_sizes(rule: str, K: int, V: int) -> None:
    problem = make(rule, B=1, T=70, H=1, HV=2, K=K, V=V)
    assert_matches(problem, problem.run())


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_dplr_takes_either_decay(decay: str) -> None:
    for T in (1, 50):
        problem = make("dplr", T=T, decay=decay, gates="wild")
        assert_matches(problem, problem.run())


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("decay", ["none", "head"])
def test_delta_product_takes_any_number_of_substeps(n: int, decay: str) -> None:
    for T in (1, 37):
        problem = make("delta_product", T=T, n=n, decay=decay)
        assert_matches(problem, problem.run())


@few(40)
@given(problems(dtypes=(mx.float32,)), st.data())
def test_two_calls_equal_one(problem: Problem, data: st.DataObject) -> None:
    T = problem.q.shape[1]
    at = data.draw(st.integers(0, T))
    chunk = data.draw(st.sampled_from((None, 16, C)))
    y, S = problem.run(chunk=chunk)
    y1, S1 = problem.tokens(0, at).run(chunk=chunk, state=problem.rest["state"])
    y2, S2 = problem.tokens(at, T).run(chunk=chunk, state=S1)
    assert error(mx.concatenate([y1, y2], axis=1), y) < 1e-5
    assert error(S2, S) < 1e-5


@few(40)
@given(problems(lengths=(1, 2, 3, C + 1, 2 * C + 3)), st.data())
def test_a_padded_row_equals_the_row_alone(problem: Problem, data: st.DataObject) -> None:
    """Whatever stands behind a row's length, NaN included, reaches neither its state nor its outputs."""
    B, T = problem.q.shape[:2]
    lengths = [data.draw(st.integers(0, T)) for _ in range(B)]
    poisoned = poison(problem, lengths)
    y, S = poisoned.run(lengths=mx.array(lengths))
    for row, length in enumerate(lengths):
        alone = problem.rows(row, row + 1)
        y1, S1 = alone.tokens(0, length).run(state=alone.rest["state"])
        assert error(y[row : row + 1, :length], y1) < TOLERANCE[y.dtype]
        assert error(S[row : row + 1], S1) < 1e-5
        assert bool(mx.all(y[row, length:] == 0))


def poison(problem: Problem, lengths: list[int]) -> Problem:
    """NaN in every argument behind each row's length."""
    T = problem.q.shape[1]

    def spoil(x: mx.array) -> mx.array:
        behind = mx.arange(x.shape[1]) >= mx.array(lengths)[:, None] * (x.shape[1] // T)
        return mx.where(behind.reshape(*behind.shape, *[1] * (x.ndim - 2)), mx.array(mx.nan, x.dtype), x)

    arguments = {name: spoil(x) for name, x in problem.rest.items() if name in ("g", "beta", "a", "b")}
    return problem.with_(q=spoil(problem.q), k=spoil(problem.k), v=spoil(problem.v), **arguments)


@pytest.mark.parametrize("rule", RULE_NAMES)
@pytest.mark.parametrize("T", [1, 2, 40])
def test_neutral_tokens_leave_the_state_bit_identical(rule: str, T: int) -> None:
    problem = make(rule, T=T)
    _, S = problem.run(lengths=mx.zeros(2, mx.int32))
    assert bool(mx.array_equal(S, problem.rest["state"]))


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_neutral_padding_is_invisible_to_the_path(rule: str) -> None:
    """After masking, padding is ordinary tokens: no path needs to know of lengths."""
    problem = make(rule, T=20)
    x = check(rule, problem.q, problem.k, problem.v, **problem.rest, lengths=mx.array([20, 7]))
    padded = neutral_padding(x)
    assert padded.lengths is None
    for z in (padded.q, padded.k, padded.v, padded.g, padded.beta, padded.a, padded.b):
        if z is not None:
            assert bool(mx.all(z[1, z.shape[1] // 20 * 7 :] == 0))


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_the_old_state_stays_valid(rule: str) -> None:
    problem = make(rule, T=1)
    S = problem.rest["state"]
    before = mx.array(S)
    mx.eval(before)
    for _ in range(3):
        y, new = problem.run(state=S)
        mx.eval(y, new)
    assert bool(mx.array_equal(S, before))
    assert not bool(mx.array_equal(S, new))


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_8192_tokens(rule: str) -> None:
    """No drift: a fast decay forgets it, so the gates are slow."""
    problem = make(rule, B=1, T=8192, H=1, HV=1, K=16, V=4, n=1, gates="slow", cosine=0.5)
    assert_matches(problem, problem.run())


@pytest.mark.parametrize("rule", ["decay", "gated"])
def test_8192_decode_steps(rule: str) -> None:
    """Every step rounds; what is only added to must not be rounded the same way 8,192 times."""
    problem = make(rule, B=1, T=8192, H=1, HV=1, K=16, V=4, gates="slow", cosine=0.5)
    x = check(rule, problem.q, problem.k, problem.v, **problem.rest)
    S, outputs = x.S, []
    for t in range(x.tokens):
        y, S, _ = step.step(x, t, S, None)
        outputs.append(y)
        if t % 64 == 63:
            mx.eval(S, outputs)
    assert_matches(problem, (mx.concatenate(outputs, axis=1), S))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("T", [1, 2, 40, 130])
def test_linear_attention_with_and_without_normaliser(normalize: bool, T: int) -> None:
    """Keys and queries of a positive feature map, state and normaliser carried across calls."""
    from mlxlin.recurrences import reference, run

    problem = make("linear", T=T, HV=6, K=16)
    q, k, v, S = mx.abs(problem.q), mx.abs(problem.k), problem.v, problem.rest["state"]
    state = (S, mx.abs(S).sum(axis=2)) if normalize else S
    expected, final = reference.scan("linear", q, k, v, state=state, normalize=normalize)
    got, middle = run("linear", q[:, : T // 2], k[:, : T // 2], v[:, : T // 2], state=state, normalize=normalize)
    rest, last = run("linear", q[:, T // 2 :], k[:, T // 2 :], v[:, T // 2 :], state=middle, normalize=normalize)
    assert error(mx.concatenate([got, rest], axis=1), expected) < 1e-5
    for mine, theirs in zip(last, final, strict=True) if normalize else [(last, final)]:
        assert error(mine, theirs) < 1e-5


@pytest.mark.parametrize("T", [1, 3, 40, 130])
def test_the_normaliser_of_a_padded_row_is_that_of_the_row_alone(T: int) -> None:
    """Whatever stands behind a row's length; and none at all leaves it as it was, to the bit."""
    problem = make("linear", B=3, T=T, K=16)
    S = problem.rest["state"]
    problem = problem.with_(q=mx.abs(problem.q), k=mx.abs(problem.k), state=(S, mx.abs(S).sum(axis=2)), normalize=True)
    lengths = [0, T // 2 + 1, T]
    y, (S1, Z1) = poison(problem, lengths).run(lengths=mx.array(lengths))
    assert bool(mx.array_equal(S1[0], S[0])) and bool(mx.array_equal(Z1[0], problem.rest["state"][1][0]))
    for row in (1, 2):
        alone = problem.tokens(0, lengths[row])
        q, k, v = (x[row : row + 1] for x in (alone.q, alone.k, alone.v))
        state = tuple(x[row : row + 1] for x in problem.rest["state"])
        expected, (S2, Z2) = alone.with_(q=q, k=k, v=v, state=state).run()
        assert error(y[row : row + 1, : lengths[row]], expected) < 1e-5
        assert error(S1[row : row + 1], S2) < 1e-5 and error(Z1[row : row + 1], Z2) < 1e-5
