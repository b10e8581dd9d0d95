"""The check that runs on the user's machine."""

from __future__ import annotations

from typing import Any

import pytest

from mlxlin import selftest
from mlxlin.backend import mx
from mlxlin.metal.mixer import FusedSpec
from mlxlin.recurrences import RULES, kernels
from mlxlin.recurrences.rules import Inputs

from .test_decode import SPECS

SMALL = ((32, 32, 2, mx.float32), (32, 64, 1, mx.bfloat16))


def test_without_metal_the_operations_are_checked_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "SIZES", SMALL)
    rows = list(selftest.rows())
    assert "no Metal" in selftest.note()
    assert all(row.ok and row.seconds > 0 and row.error < 8e-3 for row in rows)
    assert {(row.kernel, row.shape.split(",")[0]) for row in rows} == {
        (path, rule) for path in ("step", "chunkwise") for rule in RULES
    }


def test_on_metal_every_kernel_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "on_metal", lambda: True)
    monkeypatch.setattr(selftest, "SIZES", SMALL[:1])
    monkeypatch.setattr(selftest, "RULES", {name: RULES[name] for name in ("gated_delta", "gated")})
    around: dict[str, Any] = {"taps": 4, "q_norm": "l2", "k_norm": "l2", "beta": "sigmoid", "gate": "silu"}
    spec = FusedSpec(1, 2, 32, 64, "delta", "head", norm=True, eps=1e-6, **around)
    monkeypatch.setattr(selftest, "MIXERS", {"small": spec})
    rows = list(selftest.rows())
    assert selftest.note() == ""
    assert [row for row in rows if not row.ok] == []
    assert {row.kernel for row in rows} == {
        "scan",
        "scan, many heads",
        "chunk",
        "chunk, many heads",
        "decode",
        "replay",
        "prefill",
        "time_mix",
        "time_mix_prefill",
        "add_norm",
        "gated_norm",
        "router_topk",
    }


def test_replaying_slots_is_checked_for_both_states() -> None:
    check = selftest._decode_replay_check("slots", SPECS["slots-conv"])
    assert len(check.expected()) == 2
    assert selftest._row(check).ok


def test_wrong_and_failing_kernels_are_rows_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Inputs) -> kernels.Result:
        return x.v * 2, x.S, None

    def failing(x: Inputs) -> kernels.Result:
        raise ValueError("Thread group size (512) is greater than the maximum")

    size = SMALL[0]
    checks = [selftest._recurrence_check("scan", kernel, 3, "delta", "none", size) for kernel in (wrong, failing)]
    off, raised = map(selftest._row, checks)
    assert not off.ok and off.complaint == "wrong numbers"
    assert not raised.ok and raised.complaint.startswith("ValueError: Thread group size")
