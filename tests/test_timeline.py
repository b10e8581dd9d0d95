"""A timeline is at any time where reading everything from scratch would be, and reads little to get there."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxlin import archive
from mlxlin.backend import mx
from mlxlin.errors import InputError
from mlxlin.models import Model
from mlxlin.state import Checkpoint
from mlxlin.timeline import Mark, Timeline, common_prefix
from tests.tiny import CONFIGS, HYBRID, VOCAB, tiny_model

MODELS = {name: tiny_model(config) for name, config in CONFIGS.items()}
kinds = pytest.mark.parametrize("kind", MODELS)
TOLERANCE = 1e-4  # of logits and state entries of order one, in float32, read in other pieces


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def assert_from_scratch(line: Timeline) -> None:
    """The state and the logits are those of a model that reads the line's tokens at once."""
    if not line.tokens:
        return
    expected, fresh = line.model([line.tokens])
    assert expected is not None
    if line.logits is not None:
        got, want = np.array(line.logits[0, 0]), np.array(expected[0, -1])
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
        second, best = np.sort(want)[-2:]
        assert got.argmax() == want.argmax() or best - second < TOLERANCE
    one, other = line.state.arrays(), fresh.arrays()
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(
            np.array(one[name]), np.array(other[name]), rtol=TOLERANCE / 10, atol=TOLERANCE, err_msg=name
        )


class Counting:
    """A model that counts the tokens it reads."""

    def __init__(self, model: Model) -> None:
        self.model, self.read = model, 0

    def __call__(self, ids, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.read += ids.size if isinstance(ids, mx.array) else len(ids[0])
        return self.model(ids, *args, **kwargs)

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)


@kinds
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), budget=st.sampled_from([0, 40_000, 10**9]))
def test_random_play_equals_reading_from_scratch(kind: str, seed: int, budget: int, tmp_path: Path) -> None:
    rng, model = random.Random(seed), MODELS[kind]
    lines = [Timeline(model, budget=budget)]
    for move in range(8):
        line = rng.choice(lines)
        action = rng.choice(["resume", "resume", "advance", "rewind", "fork", "decode", "save"])
        new = tokens(seed + move, rng.choice([1, 2, 5, 17, 70]))
        if action == "resume":
            kept = line.tokens[: rng.randrange(len(line.tokens) + 1)]
            marks = [Mark(len(kept), f"turn {move}")] if kept else []
            reuse = line.resume(kept + new, marks=marks)
            assert line.tokens == kept + new and 0 <= reuse.reused <= reuse.total == line.position
        elif action == "advance":
            line.advance(new)
        elif action == "rewind" and line.tokens:
            line.rewind(rng.randrange(line.position + 1))
        elif action == "fork":
            lines.append(line.fork())
        elif action == "decode" and line.tokens:
            state = line.state
            for token in new[:3]:
                _, state = model([[token]], state)
            line.adopt(new[:3], state)
        elif action == "save":
            arrays, record = line.snapshot()
            archive.write(tmp_path / "line.safetensors", arrays, record)
            again = Timeline(model, budget=budget)
            again.restore_snapshot(*archive.read(tmp_path / "line.safetensors"))
            assert (again.tokens, again.marks) == (line.tokens, line.marks)
            lines[lines.index(line)] = again
        for each in lines:
            assert_from_scratch(each)
            assert len(each.points) <= 1 or each.checkpoint_nbytes <= max(budget, each.points[-1].checkpoint.nbytes)
            assert [p.position for p in each.points] == sorted({p.position for p in each.points})


@kinds
def test_same_calls_give_the_same_bits(kind: str) -> None:
    text = tokens(1, 40)
    one, other = Timeline(MODELS[kind]), Timeline(MODELS[kind])
    one.resume(text, marks=[Mark(30, "turn 1")])
    one.resume(text[:30] + tokens(2, 9))  # somewhere else and back
    one.resume(text)
    other.resume(text, marks=[Mark(30, "turn 1")])
    assert one.logits is not None and other.logits is not None and mx.array_equal(one.logits, other.logits)


@kinds
def test_b49_an_edit_of_the_last_tokens_reads_the_last_tokens(kind: str) -> None:
    model = Counting(MODELS[kind])
    line = Timeline(model)  # type: ignore[arg-type]
    text = tokens(3, 50)
    line.resume(text)
    model.read = 0
    reuse = line.resume(text[:49] + tokens(4, 2))
    assert reuse.reused == 49 and model.read == 2
    assert_from_scratch(line)


@kinds
def test_the_same_prompt_again_reads_at_most_one_token(kind: str) -> None:
    line = Timeline(MODELS[kind])
    text = tokens(5, 30)
    line.resume(text)
    assert line.resume(text).reused == 30  # nothing came between: the logits are at hand
    _, state = line.model([tokens(6, 3)], line.state)
    line.adopt(tokens(6, 3), state)
    assert line.resume(text).reused == 29
    assert_from_scratch(line)


@kinds
def test_b51_all_layers_are_at_one_position(kind: str) -> None:
    line = Timeline(MODELS[kind])
    line.advance(tokens(7, 33))
    line.rewind(32)
    assert line.position == 32 == int(line.state.positions[0])
    assert line.state.kv_length in (0, 32)
    assert_from_scratch(line)


@kinds
def test_b43_what_is_kept_is_not_changed_by_what_follows(kind: str) -> None:
    line = Timeline(MODELS[kind])
    line.advance(tokens(8, 20))
    line.keep("here")
    kept = {
        name: np.array(array) for layer in line.points[-1].checkpoint.recurrent for name, array in (layer or {}).items()
    }
    twin = line.fork()
    twin.advance(tokens(9, 30))
    line.advance(tokens(10, 30))
    again = {
        name: np.array(array) for layer in line.points[1].checkpoint.recurrent for name, array in (layer or {}).items()
    }
    assert all((kept[name] == again[name]).all() for name in kept)
    assert_from_scratch(line), assert_from_scratch(twin)


def test_long_prompts_leave_checkpoints_that_lie_closer_towards_the_end() -> None:
    line = Timeline(MODELS["recurrent"])
    line.advance(tokens(11, 4096))
    assert [point.position for point in line.points] == [2048, 3072, 3584, 4095]
    reuse = line.resume(line.tokens[:3500] + tokens(12, 100))
    assert reuse.reused == 3072
    assert "checkpoint at token 3,072" in reuse.why


def test_an_interrupted_prompt_leaves_a_consistent_line() -> None:
    line = Timeline(MODELS["hybrid"])
    line.advance(tokens(13, 10))
    text = line.tokens + tokens(14, 1500)

    def stop(done: int, total: int) -> None:
        assert 10 < done <= total == 1510
        if done > 900:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        line.resume(text, progress=stop)
    assert_from_scratch(line)
    assert line.tokens == text[: line.position] and line.position >= 10
    line.resume(text)
    assert_from_scratch(line)


def test_the_reason_names_what_changed() -> None:
    line = Timeline(MODELS["hybrid"])
    text = tokens(15, 300)
    marks = [Mark(100, "turn 1"), Mark(200, "turn 2")]
    assert str(line.resume(text, marks=marks)) == "reused 0 of 300 tokens (nothing was read before)"
    assert line.resume(text + [1, 2]).why == "everything read so far"
    changed = text[:250] + [(text[250] + 1) % VOCAB]
    reuse = line.resume(changed, cause="the template rewrote")
    assert str(reuse) == "reused 200 of 251 tokens (checkpoint before turn 2; the template rewrote turn 2)"
    other = [(text[0] + 1) % VOCAB, *text]
    assert line.resume(other).why == "the text changed in its beginning"


def test_forks_share_keys_and_values_until_they_diverge() -> None:
    line = Timeline(MODELS["hybrid"])
    line.advance(tokens(16, 600))
    forks = [line.fork() for _ in range(100)]
    storages = {id(layer.storage) for fork in forks for layer in fork.state.keys_values()}
    assert len(storages) == 1
    line.advance(tokens(17, 5))
    forks[0].advance(tokens(18, 5))
    assert_from_scratch(line), assert_from_scratch(forks[0])
    storages = {id(layer.storage) for fork in forks for layer in fork.state.keys_values()}
    assert len(storages) == 2


@kinds
def test_a_hundred_forks_cost_their_recurrent_states(kind: str) -> None:
    line = Timeline(MODELS[kind], budget=0)  # one checkpoint each
    line.advance(tokens(16, 600))
    alone = Timeline.held_nbytes([line])
    forks = [line.fork() for _ in range(100)]
    assert Timeline.held_nbytes([line, *forks]) == alone
    recurrent, copy = line.state.recurrent_nbytes, line.state.kv_nbytes
    for count, fork in enumerate(forks[:10], 1):
        fork.advance(tokens(17 + count, 1))
        grown = Timeline.held_nbytes([line, *forks]) - alone - count * (recurrent + 4)
        # no more for whom nothing is different; a fork that goes on has keys and values of its own, with room to grow
        assert (grown == 0) if kind == "recurrent" else count * copy <= grown + copy <= count * copy * 1.5 + copy


def test_b43_checkpoints_really_hold_what_they_say() -> None:
    config = {**HYBRID, "hidden_size": 256, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    line = Timeline(tiny_model(config), budget=10**9)
    line.advance(tokens(30, 300))
    line.points.clear()
    kept: list[Checkpoint] = []
    gc.collect(), mx.clear_cache()
    held, told = -mx.get_active_memory(), -line.state.recurrent_nbytes - line.state.kv_capacity_nbytes
    for number in range(20):
        line.advance(tokens(31 + number, 1 if number % 2 else 300))
        line.points.clear()
        kept.append(line.state.checkpoint())
    gc.collect(), mx.clear_cache()
    held, told = held + mx.get_active_memory(), told + line.state.kv_capacity_nbytes + sum(c.nbytes for c in kept)
    # MLX leaves up to 16 kB around a slice of each of three layers; the buffer of a prefill would be 300 kB
    assert told <= held + 1000 and held <= told + 20 * 3 * 16_384, (told, held)


def test_b53_tokens_taken_back_leave_no_trace() -> None:
    for kind, model in MODELS.items():
        for count in range(1, 6):
            line = Timeline(model)
            line.advance(tokens(40, 30))
            line.keep("draft")
            before = {name: np.array(array) for name, array in line.state.arrays().items()}
            logits, _ = model([[7]], line.state)
            _, drafted = model([tokens(41, count)], line.state)
            line.adopt(tokens(41, count), drafted)
            assert line.rewind(30) == 0 and line.state.kv_length in (0, 30)
            assert all((np.array(array) == before[name]).all() for name, array in line.state.arrays().items()), kind
            again, _ = model([[7]], line.state)
            assert logits is not None and again is not None and mx.array_equal(logits, again)


@pytest.mark.parametrize("kind", MODELS)
def test_an_interrupt_at_any_line_leaves_a_consistent_timeline(kind: str) -> None:
    line, text = Timeline(MODELS[kind]), tokens(50, 40)
    line.resume(text, marks=[Mark(10, "turn 1"), Mark(20, "turn 2")])
    other = text[:15] + tokens(51, 20)
    at = 0
    while True:
        at += 1
        fork = line.fork()
        if not interrupted(lambda fork=fork: fork.resume(other, marks=[Mark(15, "turn 2")]), at):
            break
        assert fork.tokens in (text[: fork.position], other[: fork.position])
        assert int(fork.state.positions[0]) == fork.position and fork.state.kv_length in (0, fork.position)
        assert all(point.position <= fork.position for point in fork.points)
        assert all(mark.position <= fork.position for mark in fork.marks)
        if at % 10 == 0:
            assert_from_scratch(fork)
            fork.resume(text)
            assert_from_scratch(fork)
    assert at > 100


def interrupted(run: Callable[[], object], at: int) -> bool:
    """Run with a KeyboardInterrupt at the line of timeline.py with this number, counted as they run; false if done."""
    left = at

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith("timeline.py"):
            return None
        left -= event == "line"
        if left == 0:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_impossible_requests_are_refused() -> None:
    line = Timeline(MODELS["hybrid"])
    with pytest.raises(InputError, match="empty"):
        line.resume([])
    with pytest.raises(InputError, match="token 3 of 0"):
        line.rewind(3)


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2 == common_prefix([1, 2], [1, 2, 4])
    assert common_prefix([], [1]) == 0
