"""What a call costs apart from arithmetic: nodes of the graph, memory, and being compiled."""

from __future__ import annotations

import gc
import io

import pytest
from recurrence_problems import RULE_NAMES, error, make

from mlxlin.backend import mx
from mlxlin.recurrences import chunkwise

C = 32


def nodes(rule: str, T: int) -> int:
    """Operations in the graph of one call."""
    problem = make(rule, B=1, T=T, H=1, HV=2, K=16, V=16)
    mx.eval(problem.q, problem.k, problem.v, *problem.rest.values())
    y, S = problem.run(chunk=C)
    dot = io.StringIO()
    mx.export_to_dot(dot, y, S)
    return dot.getvalue().count("label")


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_the_graph_grows_by_chunks_not_by_tokens(rule: str) -> None:
    """Same number of chunks, same graph; each further chunk costs a constant; none per token."""
    substeps = 2 if rule == "delta_product" else 1
    chunk = C // substeps
    three, four = nodes(rule, 3 * chunk), nodes(rule, 4 * chunk)
    assert nodes(rule, 9 * chunk) - nodes(rule, 8 * chunk) == four - three <= 20
    assert nodes(rule, 3 * chunk - 1) == nodes(rule, 3 * chunk - chunk // 4)


@pytest.mark.parametrize("rule", ["gated_delta", "kda", "decay", "dplr"])
def test_memory_is_flat_in_the_number_of_tokens(rule: str) -> None:
    """Beyond inputs and outputs, four times the tokens need no more memory."""

    def extra(T: int) -> int:
        problem = make(rule, B=1, T=T, H=2, HV=2, K=32, V=32)
        mx.eval(problem.q, problem.k, problem.v, *problem.rest.values())
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        y, S = problem.run(chunk=C)
        mx.eval(y, S)
        return int(mx.get_peak_memory()) - before - 2 * y.nbytes - S.nbytes  # outputs: the pieces and their join

    piece = chunkwise.TOKENS_AT_ONCE
    assert extra(16 * piece) < 1.2 * extra(4 * piece)


@pytest.mark.parametrize("rule", RULE_NAMES)
@pytest.mark.parametrize("T", [1, 16, 100])
def test_the_state_keeps_no_other_buffer_alive(rule: str, T: int) -> None:
    problem = make(rule, B=1, T=T, H=2, HV=4, K=32, V=32)
    mx.eval(problem.q, problem.k, problem.v, *problem.rest.values())
    gc.collect()
    before = mx.get_active_memory()
    _, S = problem.run()
    mx.eval(S)
    del _
    gc.collect()
    assert mx.get_active_memory() - before <= S.nbytes + 4096


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_short_calls_stay_lazy(rule: str) -> None:
    """A decode step and a prompt of a few pieces are only described, so that a caller can pipeline them."""
    for T in (1, 2, 300):
        problem = make(rule, B=1, T=T, H=1, K=16, V=16)
        mx.eval(problem.q, problem.k, problem.v, *problem.rest.values())
        mx.synchronize()
        before = mx.get_active_memory()
        y, S = problem.run()
        assert mx.get_active_memory() - before < 4096
        mx.eval(y, S)


@pytest.mark.parametrize("rule", ["linear", "gated_delta", "kda", "dplr"])
@pytest.mark.parametrize("T", [1, 40])
def test_a_call_can_be_compiled(rule: str, T: int) -> None:
    problem = make(rule, B=1, T=T, H=1, K=16, V=16)
    names = [name for name in problem.rest if name != "state"]

    def decode(q: mx.array, k: mx.array, v: mx.array, S: mx.array, *rest: mx.array) -> tuple[mx.array, mx.array]:
        return problem.with_(q=q, k=k, v=v, state=S, **dict(zip(names, rest, strict=True))).run()

    arguments = (problem.q, problem.k, problem.v, problem.rest["state"], *[problem.rest[name] for name in names])
    y, S = mx.compile(decode)(*arguments)
    want_y, want_S = problem.run()
    assert error(y, want_y) < 1e-6 and error(S, want_S) < 1e-6


def test_pieces_cover_every_token_once() -> None:
    for tokens in (1, 15, 16, 17, 63, 64, 65, 1024, 1025, 5000):
        pieces = list(chunkwise.cut(tokens, 64))
        assert [start for start, _, _ in pieces] == [0] + [stop for _, stop, _ in pieces[:-1]]
        assert pieces[-1][1] == tokens
        for start, stop, length in pieces:
            assert length in (16, 32, 64) and stop - start <= chunkwise.TOKENS_AT_ONCE
