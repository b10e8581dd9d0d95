"""`mlxlin bench`: the record, its figures, comparisons, and peers in processes of their own."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

import mlxlin
from mlxlin.bench import Plan, Row
from mlxlin_cli import peer
from mlxlin_cli.peer import Worker
from mlxlin_cli.record import Record, compare, read_record

QUICK = ["bench", "-p", "16,32", "-n", "3", "-r", "2"]


@pytest.fixture(autouse=True)
def small_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxlin.bench.memory_bandwidth", lambda: 1e10)


def row(kind: str = "decode", seconds: Sequence[float] = (1.0, 1.1, 0.9), **changes: object) -> Row:
    made = Row("mlxlin", kind, 64, 10, tuple(seconds), (0, 1, 2), 0, 1000, 500, 10_000)  # type: ignore[arg-type]
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_b74_the_record_says_what_the_numbers_depend_on(cli, tmp_path: Path) -> None:
    result = cli(*QUICK, "--json", str(tmp_path / "a.json"))
    assert result.code == 0
    found = json.loads((tmp_path / "a.json").read_text())
    for key in ("chip", "cores", "memory_bytes", "os", "mlx", "blas", "device", "power", "commit", "mlxlin", "load"):
        assert key in found["machine"]
    assert found["model"]["dtype"] == "float32" and "chunkwise" in found["model"]["path"]
    assert found["settings"] == {"lengths": [16, 32], "contexts": [16, 32], "tokens": 3, "repetitions": 2}
    assert len(found["rows"]) == 6
    assert all(len(r["seconds"]) == len(r["order"]) == 2 and r["reused_tokens"] == 0 for r in found["rows"])
    for words in ("prefill 16", "decode behind 32", "next turn behind 32", "10 GB/s", "keys and values", "±"):
        assert words in result.out


def test_the_default_lengths_are_those_that_fit_the_context(cli, script, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []

    def run(loaded: object, plan: Plan, peer: object) -> None:
        plans.append(plan)
        raise mlxlin.InputError("enough")

    monkeypatch.setattr("mlxlin_cli.bench.run", run)
    for context in (300, 2176, 10**6):
        script.model.context = context
        cli("bench")
    cli("bench", "-p", "7")
    assert [plan.lengths for plan in plans] == [(150,), (512, 2048), (512, 2048, 8192), (7,)]
    assert [plan.contexts for plan in plans] == [plan.lengths for plan in plans]


def test_lengths_beyond_the_context_are_measured_with_a_note(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxlin.models.Model.context", 40)
    assert "Note: 67 tokens are more than the 40 the model was trained for." in cli(*QUICK).err


def test_a_record_is_read_back_and_compared(cli, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert cli(*QUICK, "--json", str(path)).code == 0
    assert json.loads(json.dumps(read_record(path).to_json())) == json.loads(path.read_text())
    result = cli(*QUICK, "--compare", str(path))
    assert result.code == 0 and "against the earlier run" in result.out
    assert sum("x  " in line for line in result.out.splitlines()) == 6


def test_a_difference_within_the_spread_is_none() -> None:
    (same,) = compare([row(seconds=(1.0, 1.2))], [row(seconds=(1.1, 0.9))])
    assert same.verdict == "same within the spread" and same.low < same.ratio < same.high
    (faster,) = compare([row(seconds=(1.0, 1.1))], [row(seconds=(2.0, 2.2))])
    assert faster.verdict == "faster" and faster.ratio == pytest.approx(2.0, rel=1e-3)
    (slower,) = compare([row(seconds=(2.0,))], [row(seconds=(1.0,))])
    assert slower.verdict == "slower"
    assert compare([row()], [row(length=128)]) == []


def test_the_share_of_the_bandwidth_counts_weights_state_and_keys() -> None:
    record = Record({}, {}, {}, bandwidth=1e6, weight_bytes=10_000, drift=0.0, peers={}, rows=[])
    assert record.share(row(seconds=(1.0,))) == pytest.approx((10_000 + 2 * 1000 + 500) * 10 / 1e6)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": 99}', '{"format": 1, "rows": [{}]}'])
def test_what_is_no_record_is_two_lines(cli, tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    result = cli(*QUICK, "--compare", str(path))
    assert result.code == 1 and len(result.err.splitlines()) == 2 and "no benchmark record" in result.err
    assert cli(*QUICK, "--compare", str(tmp_path / "missing")).code == 1


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_the_figures_are_drawn(cli, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    assert cli(*QUICK, "--plot", str(tmp_path / name)).code == 0
    head = (tmp_path / name).read_bytes()[:100]
    assert head.startswith(b"\x89PNG") or b"<?xml" in head


def test_a_drawing_is_refused_before_anything_is_measured(cli, tmp_path: Path, monkeypatch) -> None:
    assert "There is no folder" in cli(*QUICK, "--json", str(tmp_path / "missing" / "a.json")).err
    assert "End its name in" in cli(*QUICK, "--plot", str(tmp_path / "a.gif")).err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "mlxlin[plot]" in cli(*QUICK, "--plot", str(tmp_path / "a.png")).err


@pytest.mark.parametrize("arguments", [["-p", "a,b"], ["-p", ""], ["--peer", "x"], ["--peer", "mlx-lm", "-q", "4"]])
def test_wrong_usage(cli, arguments: list[str]) -> None:
    assert cli("bench", *arguments).code == 2


@pytest.mark.parametrize("arguments", [["-p", "0"], ["-n", "1"], ["-r", "0"]])
def test_a_plan_that_measures_nothing_is_two_lines(cli, arguments: list[str]) -> None:
    result = cli("bench", *arguments)
    assert result.code == 1 and len(result.err.splitlines()) == 2


def script(folder: Path, body: str) -> list[str]:
    path = folder / "peer_script.py"
    path.write_text(textwrap.dedent(body))
    return [sys.executable, str(path)]


SERVE = "from mlxlin_cli.peer import serve"
FAKE = """
    from mlxlin_cli.peer import serve

    class Fake:
        about = {"fake": "1.0"}

        def trial(self, prompt, count, turn):
            print("noise on standard output")
            return {
                "prefill_seconds": 0.5, "token_seconds": [0.1 * i for i in range(count)], "turn_seconds": 0.1,
                "reused_tokens": 0, "state_bytes": len(prompt), "kv_bytes": len(turn), "peak_bytes": 3,
                "tokens": [7] * count,
            }

    serve(Fake)
"""


def test_a_worker_answers_trials(tmp_path: Path, environment: dict[str, str]) -> None:
    with Worker("fake", script(tmp_path, FAKE), environment) as worker:
        assert worker.about == {"fake": "1.0"}
        for count in (2, 3):
            trial = worker.trial([1, 2, 3, 4], count, [5])
            assert (trial.state_bytes, trial.kv_bytes, trial.tokens) == (4, 1, (7,) * count)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "from mlxlin_cli.peer import serve\nserve(lambda: __import__('no_such_peer'))",
            "no-such-peer is not installed",
        ),
        ("from mlxlin_cli.peer import serve\nserve(lambda: 1 / 0)", "ZeroDivisionError"),
        ("import os\nos._exit(3)", "ended with code 3"),
    ],
)
def test_a_worker_that_fails_says_why(tmp_path: Path, environment: dict[str, str], body: str, words: str) -> None:
    with pytest.raises(mlxlin.UnsupportedError, match=words):
        Worker("fake", script(tmp_path, body), environment)


def test_a_peer_beside_us_in_one_run(cli, tmp_path: Path, monkeypatch, environment: dict[str, str]) -> None:
    monkeypatch.setattr(peer, "mlx_lm_worker", lambda *_, **__: Worker("mlx-lm", script(tmp_path, FAKE), environment))
    result = cli(*QUICK, "--peer", "mlx-lm", "--json", str(tmp_path / "a.json"))
    assert result.code == 0 and "against peers in the same run" in result.out and "0 of 32" in result.out
    orders = {r["subject"]: r["order"] for r in json.loads((tmp_path / "a.json").read_text())["rows"]}
    assert not set(orders["mlxlin"]) & set(orders["mlx-lm"])


@pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is not None, reason="mlx-lm is installed")
def test_a_peer_that_is_not_installed_is_two_lines(cli) -> None:
    result = cli(*QUICK, "--peer", "mlx-lm")
    assert result.code == 1 and result.err.endswith("Hint: pip install mlx-lm\n")
