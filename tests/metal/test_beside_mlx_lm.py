"""The work of kernels beside that of mlx-lm's for the same inputs, counted in the same way."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mlxlin.backend import mx
from mlxlin.metal.decode import decode
from mlxlin.metal.recurrence import chunk, scan
from mlxlin.recurrences.samples import sample_mixer
from mlxlin.selftest import MIXERS
from tests.msl import install, last_report

from .cases import Case, arguments
from .measure import Launch, launches_of

pytestmark = pytest.mark.peers


def beside(module: str, call: Callable[[Any], Any]) -> Launch:
    """What a kernel of mlx-lm does in `call`, which gets its module."""
    full = f"mlx_lm.models.{module}"
    with install(strict=False):
        sys.modules.pop(full, None)
        call(importlib.import_module(full))
    sys.modules.pop(full, None)
    return Launch("mlx-lm", last_report())


@pytest.mark.parametrize("rule", ["gated_delta", "kda", "dplr"])
def test_work_beside_the_kernel_of_mlx_lm(rule: str) -> None:
    """The same inputs through mlx-lm's kernel: theirs is one dispatch per call as the scan, chunk needs two."""
    K, groups = (64, 1) if rule == "dplr" else (128, 2)
    x = arguments(Case(rule, T=64, H=2 // groups, K=K, V=K, groups=groups, dtype=mx.bfloat16).inputs())
    g, beta, a, b = x.g, x.beta, x.a, x.b
    assert g is not None
    if rule == "dplr":
        theirs = beside("rwkv7", lambda peer: peer.wkv7_kernel(x.q, mx.exp(g), x.k, x.v, a, b, x.S))
    else:
        theirs = beside("gated_delta", lambda peer: peer.gated_delta_kernel(x.q, x.k, x.v, mx.exp(g), beta, x.S))
    (ours,) = launches_of(lambda: scan(x))
    chunked = launches_of(lambda: chunk(x))
    for launch in (theirs, ours, *chunked):
        print(row_of(launch))
    assert ours.report.simd_ops <= theirs.report.simd_ops
    assert ours.issued_bytes <= 1.05 * theirs.issued_bytes
    assert sum(launch.report.flops for launch in chunked) < 0.1 * theirs.report.flops
    assert sum(launch.issued_bytes for launch in chunked) < 0.5 * theirs.issued_bytes


def test_work_beside_the_token_of_mamba2_of_mlx_lm() -> None:
    """Their kernel is the recurrence and the skip; ours the convolution, activations and time step too."""
    spec = replace(MIXERS["mamba 2"], heads=1, value_heads=16)
    x, (H, V, K) = sample_mixer(spec, 1, 1, mx.bfloat16), (16, 64, 128)
    assert isinstance(x.qkv, mx.array) and x.decay is not None and x.rate is not None and x.skip is not None
    q, k, v = mx.split(x.qkv, [K, 2 * K], axis=-1)
    given = (v.reshape(1, 1, H, V), mx.log(-x.rate), k[:, :, None], q[:, :, None], x.skip.flatten(), x.decay)
    theirs = beside("ssm", lambda peer: peer.ssm_update_kernel(*given, x.decay_bias, x.S, (0.0, 100.0)))
    (ours,) = launches_of(lambda: decode(spec, x))
    for launch in (theirs, ours):
        print(row_of(launch))
    assert ours.report.simd_ops < theirs.report.simd_ops
    assert ours.issued_bytes < theirs.issued_bytes
    assert ours.report.unique_bytes < 1.05 * theirs.report.unique_bytes


def row_of(launch: Launch) -> str:
    report = launch.report
    return (
        f"{launch.name:14} unique {report.unique_bytes:9,} issued {launch.issued_bytes:11,} flops {report.flops:11,} "
        f"products {report.matrix_products:7,} simd {report.simd_ops:7,} special {report.specials:9,} "
        f"barriers {report.barriers:5,}"
    )
