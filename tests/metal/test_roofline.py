"""What benchmarks/roofline.py predicts, beside what others have published."""

from __future__ import annotations

import re

import pytest

from benchmarks import roofline
from mlxlin.metal.recurrence import chunk
from tests.msl import SUPPORTED

from .cases import Case, arguments
from .conftest import emulated
from .measure import launches_of


@pytest.fixture(autouse=True)
def emulator() -> None:
    """None: dispatches are counted in exported graphs."""


def test_published_speeds_are_most_of_those_predicted_and_never_far_beyond(capsys: pytest.CaptureFixture[str]) -> None:
    roofline.print_decode()
    out = capsys.readouterr().out
    shares = [int(share) for share in re.findall(r"(\d+)% of the prediction", out)]
    assert len(shares) == len(roofline.PUBLISHED) and all(80 <= share <= 105 for share in shares)
    ours, theirs = (list(map(float, re.findall(rf" {name} +([\d.]+)", out))) for name in ("mlxlin", "mlx-lm"))
    assert all(a > b for a, b in zip(ours, theirs, strict=True))


def test_work_grows_along_a_straight_line() -> None:
    """Work at twice the length counted is what the line through two shorter ones says."""
    if not SUPPORTED:
        pytest.skip("the Metal emulator runs on x86-64 Linux")

    def work(T: int) -> list[roofline.Work]:
        x = arguments(Case("decay", T=T).inputs())
        return [roofline.Work.of(launch) for launch in launches_of(lambda: chunk(x))]

    with emulated():
        one, two, four = (work(T) for T in (32, 64, 128))
    for a, b, c in zip(one, two, four, strict=True):
        grown = a.grown(b, 128, (32, 64), 1)
        assert abs(grown.unique / c.unique - 1) < 0.02 and abs(grown.cycles / c.cycles - 1) < 0.02
        many = a.grown(b, 128, (32, 64), 512)
        assert many.seconds(roofline.CHIPS["M1"]) > many.seconds(roofline.CHIPS["M3 Max"]) > roofline.DISPATCH
