"""`run` on Metal: which kernel serves a call, and what happens when a kernel is wrong on a machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mlxlin.backend import mx
from mlxlin.metal import recurrence
from mlxlin.metal.kernels import Outputs
from mlxlin.recurrences import kernels, paths, probe, run
from mlxlin.recurrences.reference import scan, scan_float64
from mlxlin.recurrences.rules import Inputs

from .cases import Case, assert_equals_reference

CALLS = [
    (Case("gated_delta", T=33, B=2, lengths=(33, 4)), "chunk kernels"),
    (Case("gated_delta", T=31), "scan kernel"),
    (Case("delta_product", T=34, substeps=2, decay="head"), "chunk kernels"),
    (Case("linear", T=40, normalize=True), "scan kernel"),
    (Case("comba", T=5, groups=2), "scan kernel"),
    (Case("comba", T=33), "chunk kernels"),
    (Case("gated_values", T=1, gates="mixed"), "scan kernel"),
    (Case("gated_values", T=40, B=2, gates="mixed", lengths=(40, 3)), "scan kernel"),
    (Case("kda", T=1, K=16), "step"),
    (Case("kda", T=40, K=16), "chunkwise"),
]


@pytest.fixture(autouse=True)
def metal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine whose default device is Metal and that has never run a kernel."""
    monkeypatch.setenv("MLXLIN_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "on_metal", lambda: True)
    probe._verdicts.cache_clear()
    yield
    probe._verdicts.cache_clear()


def call(x: Inputs) -> tuple[mx.array, Any]:
    given = {name: getattr(x, name) for name in ("g", "beta", "a", "b", "lengths") if getattr(x, name) is not None}
    state = x.S if x.Z is None else (x.S, x.Z)
    return run(x.rule.name, x.q, x.k, x.v, **given, state=state, normalize=x.Z is not None)


@pytest.mark.parametrize(("case", "path"), CALLS, ids=lambda value: str(value))
def test_run_serves_each_call_by_its_path(case: Case, path: str) -> None:
    x = case.inputs()
    assert paths.choose(x, None).name == path
    y, state = call(x)
    S, Z = state if isinstance(state, tuple) else (state, None)
    assert_equals_reference(x, y, S, Z)


def test_naming_a_chunk_length_asks_for_plain_operations() -> None:
    assert paths.choose(Case("kda", T=64).inputs(), 16).name == "chunkwise"


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_kernel_that_fails_its_check_is_reported_once_and_replaced(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = kernels.scan
    runs = []

    def faulty(x: Inputs, rows: int | None = None) -> kernels.Result:
        runs.append(x)
        if fault == "raises":
            raise RuntimeError("Unable to build metal library from source")
        y, S, Z = right(x, rows)
        return y * 1.001, S, Z

    monkeypatch.setattr(kernels, "scan", faulty)
    x = Case("decay", T=3).inputs()
    with pytest.warns(probe.KernelWarning, match="decay-head-K32-V32"):
        y, S = call(x)
    assert_equals_reference(x, y, S)
    call(x)
    probe._verdicts.cache_clear()  # another process
    call(x)
    assert len(runs) == 1
    assert len(probe.failures()) == 1


def test_a_kernel_is_checked_once_for_calls_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(probe, "scan_float64", lambda x: (checked.append(x), scan_float64(x))[1])
    for T in (2, 3, 3):
        call(Case("decay", T=T).inputs())
    probe._verdicts.cache_clear()
    call(Case("decay", T=4).inputs())
    assert len(checked) == 1
    assert probe._file().exists()


@pytest.mark.parametrize("part", ["version", "digest", "mx"])
def test_a_verdict_is_of_one_machine_and_version_and_text(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Inputs] = []
    monkeypatch.setattr(probe, "complaint", lambda kernel, x: (checked.append(x), "")[1])
    call(Case("decay", T=2).inputs())
    other = mock.Mock(device_info=lambda: {"device_name": "Apple M9"}) if part == "mx" else lambda *_: "other"
    monkeypatch.setattr(probe, part, other)
    probe._verdicts.cache_clear()  # another process
    call(Case("decay", T=2).inputs())
    assert len(checked) == 2


@pytest.mark.parametrize(
    ("T", "heads", "kind"),
    [(3, 1, "scan<32, 4, 1,"), (3, 512, "scan<32, 4, 2,"), (33, 1, "chunk<32, 1,"), (33, 512, "chunk<32, 4,")],
)
def test_a_kernel_is_checked_as_wide_as_it_runs(T: int, heads: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many heads a SIMD-group takes more values at once, which is another kernel."""
    kinds = []

    def launch(name: str, files: Any, text: str, inputs: Any, outputs: Outputs, *_: Any) -> list[mx.array]:
        kinds.extend([kind in text] if name in kind else [])
        return [mx.zeros(shape, dtype) for shape, dtype in outputs.values()]

    monkeypatch.setattr(recurrence, "launch", launch)
    monkeypatch.setattr(probe, "complaint", lambda kernel, x: (kernel(x), "")[1])
    call(Case("decay", T=T, H=heads, groups=1).inputs())
    assert kinds == [True, True]  # when checked, and then


def test_no_token_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "metal_kernel", None)
    x = Case("gated_delta", T=1).inputs()
    empty = {name: getattr(x, name)[:, :0] for name in ("q", "k", "v", "g", "beta")}
    y, S = run("gated_delta", **empty, state=x.S)
    assert y.shape == (1, 0, 2, 32) and mx.array_equal(S, x.S)
    assert mx.array_equal(scan("gated_delta", **empty, state=x.S)[1], x.S)
