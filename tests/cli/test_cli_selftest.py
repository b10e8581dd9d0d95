"""`mlxlin selftest`: what it prints and when it fails."""

from __future__ import annotations

from itertools import islice

import pytest

from mlxlin import selftest
from mlxlin.selftest import Row


def test_real_checks_are_printed_as_they_finish(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    real = selftest.rows
    monkeypatch.setattr(selftest, "rows", lambda: islice(real(), 2))
    result = cli("selftest")
    assert result.code == 0 and len(result.out.splitlines()) == 3
    assert "ok" in result.out.splitlines()[0] and result.out.endswith("2 checks, all right\n")


def test_a_wrong_kernel_is_named_and_is_an_error(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("scan", "K 64", 1e-7, 0.001, True), Row("chunk", "K 64", 0.5, 0.001, False, "wrong numbers")]
    monkeypatch.setattr(selftest, "rows", lambda: iter(rows))
    monkeypatch.setattr(selftest, "note", lambda: "There is no Metal here.")
    result = cli("selftest")
    assert result.code == 1 and "WRONG: wrong numbers" in result.out
    lines = result.err.splitlines()
    assert lines[0] == "Note: There is no Metal here."
    assert lines[1] == "Error: 1 of 2 checks gave wrong numbers: chunk." and lines[2].startswith("Hint: ")
