"""Measuring: what is timed and what is not, proven with a clock that only moves when work is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from mlxlin import bench
from mlxlin.bench import Local, Plan, Row, Trial, drift, measure, same_tokens
from mlxlin.errors import InputError, NumericsError

LAUNCH, READ, STEP, COMPILE = 0.001, 0.01, 0.1, 50.0  # seconds: a call, a prompt token, a new token, the first call


class Lazy:
    """A result whose cost is paid when it is first waited for, as with MLX's arrays."""

    def __init__(self, machine: Machine, cost: float) -> None:
        self._machine, self._cost = machine, cost

    def wait(self) -> None:
        self._machine.now += self._cost
        self._cost = 0.0


@dataclass
class FakeState:
    position: int
    result: Lazy
    recurrent_nbytes: int = 1000

    @property
    def positions(self) -> list[int]:
        return [self.position]

    @property
    def kv_nbytes(self) -> int:
        return 10 * self.position

    def leaves(self) -> list[Lazy]:
        return [self.result]


@dataclass
class Machine:
    """Clock, model and generation in one. `reads` are all prompts; the first call costs COMPILE more."""

    now: float = 0.0
    start_position: int = 0
    forgets: int = 0
    cost: Callable[[float], float] = lambda cost: cost

    def __post_init__(self) -> None:
        self.reads: list[list[int]] = []
        self.compiled = False

    def clock(self) -> float:
        return self.now

    def evaluate(self, *results: Any) -> None:
        for result in results:
            for lazy in result if isinstance(result, list) else [result]:
                lazy.wait()

    def fresh(self) -> FakeState:
        return FakeState(self.start_position, Lazy(self, 0.0))

    def prefill(self, model: Machine, tokens: Sequence[int], state: FakeState) -> tuple[Lazy, FakeState]:
        self.reads.append(list(tokens))
        self.now += LAUNCH
        once = 0.0 if self.compiled else COMPILE
        self.compiled = True
        result = Lazy(self, self.cost(len(tokens) * READ) + once)
        return result, FakeState(state.position + len(tokens) - self.forgets, result)

    def decode(self, model: Machine, logits: Lazy, state: FakeState, *_: Any, max_tokens: int) -> FakeDecoding:
        return FakeDecoding(self, FakeState(state.position + max_tokens, Lazy(self, 0.0)), max_tokens)


@dataclass
class FakeDecoding:
    machine: Machine
    state: FakeState
    max_tokens: int

    def __iter__(self) -> Iterator[Any]:
        self.machine.now += 0.7  # whatever lies between the prompt and the first token belongs to neither rate
        for number in range(self.max_tokens):
            self.machine.now += self.machine.cost(STEP)
            yield type("Step", (), {"token": number})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(bench, "prefill", made.prefill)
    monkeypatch.setattr(bench, "decode", made.decode)
    return made


def local(machine: Machine) -> Local:
    return Local(machine, clock=machine.clock, evaluate=machine.evaluate)  # type: ignore[arg-type]


def rows(machine: Machine, plan: Plan) -> dict[tuple[str, int], Row]:
    return {(row.kind, row.length): row for row in measure([local(machine)], plan, vocab=100)}


PLAN = Plan(lengths=(20, 128), contexts=(128,), count=10, repetitions=3)


def test_b69_the_first_call_is_not_counted_and_the_timer_stops_after_evaluation(machine: Machine) -> None:
    found = rows(machine, PLAN)
    for length in (20, 128):
        row = found["prefill", length]
        assert row.seconds == pytest.approx([length * READ + LAUNCH] * 3)
        assert row.median == pytest.approx(length / (length * READ + LAUNCH))


def test_b71_the_decode_rate_has_neither_prefill_nor_first_token_in_it(machine: Machine) -> None:
    row = rows(machine, PLAN)["decode", 128]
    assert row.tokens == 9 and row.seconds == pytest.approx([9 * STEP] * 3)
    assert row.median == pytest.approx(10.0)


def test_b73_no_prompt_is_read_twice_and_the_next_turn_is_a_row_of_its_own(machine: Machine) -> None:
    found = rows(machine, PLAN)
    prompts = [tuple(tokens) for tokens in machine.reads]
    assert len(set(prompts)) == len(prompts)
    beginnings = [tokens[:2] for tokens in prompts]
    assert len(set(beginnings)) == len(beginnings)
    assert {row.reused_tokens for row in found.values()} == {0}
    turn = found["turn", 128]
    assert turn.tokens == bench.TURN and turn.seconds == pytest.approx([bench.TURN * READ + LAUNCH] * 3)


def test_b73_reuse_is_an_error(machine: Machine) -> None:
    machine.start_position = 5
    with pytest.raises(NumericsError, match="reused 5 tokens"):
        rows(machine, PLAN)


def test_a_prompt_that_was_not_read_whole_is_an_error(machine: Machine) -> None:
    machine.forgets = 1
    with pytest.raises(NumericsError, match="behind the prompt"):
        rows(machine, PLAN)


def test_b74_values_and_their_order_are_kept(machine: Machine) -> None:
    found = rows(machine, PLAN)
    # lengths 20 and 128, warm-up first, every other repetition backwards: 0 1 | 3 2 | 4 5 | 7 6
    assert found["prefill", 20].order == (3, 4, 7)
    assert found["prefill", 128].order == found["decode", 128].order == (2, 5, 6)
    assert set(found) == {("prefill", 20), ("prefill", 128), ("decode", 128), ("turn", 128)}


def test_b74_spread_and_drift_show_a_machine_getting_warm(machine: Machine) -> None:
    machine.cost = lambda cost: cost * (1 + machine.now / 200)
    found = list(rows(machine, replace(PLAN, repetitions=6)).values())
    assert drift(found) < -bench.DRIFT
    assert all(row.spread > 0.01 for row in found)
    assert drift([replace(row, seconds=(1.0,) * 6) for row in found]) == 0


def test_all_tokens_are_generated_or_it_is_an_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*args: Any, max_tokens: int, **options: Any) -> FakeDecoding:
        return machine.decode(*args, max_tokens=max_tokens - 1, **options)

    monkeypatch.setattr(bench, "decode", short)
    with pytest.raises(NumericsError, match="9 tokens instead of 10"):
        rows(machine, Plan((), (128,), 10, 1))


@pytest.mark.parametrize(
    "wrong",
    [{"lengths": (), "contexts": ()}, {"lengths": (0,)}, {"count": 1}, {"repetitions": 0}],
)
def test_a_plan_that_measures_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        replace(PLAN, **wrong)


class Peer:
    """A subject with fixed times."""

    def __init__(self, name: str, tokens: tuple[int, ...], log: list[str]) -> None:
        self.name, self._tokens, self._log = name, tokens, log

    def trial(self, prompt: Sequence[int], count: int, turn: Sequence[int]) -> Trial:
        self._log.append(f"{self.name} {tuple(prompt)}")
        times = tuple(float(number) for number in range(count))
        return Trial(1.0, times, 1.0, 0, 1, 1, 1, self._tokens[:count])


def test_subjects_read_the_same_prompts_in_turn() -> None:
    log: list[str] = []
    subjects = [Peer("a", (1,) * 9, log), Peer("b", (1,) * 9, log)]
    found = measure(subjects, Plan((4,), (), 4, 2), vocab=100)
    names, prompts = zip(*(entry.split(" ", 1) for entry in log), strict=True)
    assert names == ("a", "b", "b", "a", "a", "b")
    assert all(prompts[i] == prompts[i + 1] for i in (0, 2, 4)) and len(set(prompts)) == 3
    assert [row.subject for row in found] == ["a", "b"]


def test_equal_greedy_tokens_are_counted_up_to_the_first_difference() -> None:
    subjects = [Peer("a", (1, 2, 3, 4), []), Peer("b", (1, 2, 9, 4), []), Peer("c", (1, 2, 3, 4), [])]
    assert same_tokens(subjects, vocab=100, count=4) == {"a": 4, "b": 2, "c": 4}


def test_bandwidth_is_measured() -> None:
    assert 1e8 < bench.memory_bandwidth(2**22, repetitions=2) < 1e13


def test_the_shipped_model_is_measured() -> None:
    from mlxlin.loader import load_model

    model = load_model("demo")
    found = measure([Local(model)], Plan((33,), (33,), 4, 2), model.vocab_size)
    assert [row.kind for row in found] == ["prefill", "decode", "turn"]
    assert all(row.median > 0 and len(row.seconds) == 2 for row in found)
    assert found[0].state_bytes + found[0].kv_bytes == model.state_nbytes(33)
