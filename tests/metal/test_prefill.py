"""What stands before a recurrence, for many tokens in one dispatch, against the same in plain operations."""

from __future__ import annotations

import pytest

from mlxlin.backend import mx
from mlxlin.metal.prefill import prefill
from mlxlin.recurrences.mixer import arguments, in_float32

from .cases import TOLERANCE, error, float64
from .test_decode import Call

CALLS = [
    Call("gated_delta_net", T=9, B=2, dtype=mx.bfloat16, lengths=(9, 3), strided=True),
    Call("gated_delta_net-split", T=1),
    Call("delta_net", T=2, B=2, lengths=(0, 2)),
    Call("delta_product", T=5, strided=True),
    Call("kda-bounded", T=7, B=2, dtype=mx.float16, lengths=(7, 4)),
    Call("gla", T=3),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_prefill_equals_operations(call: Call) -> None:
    spec, x = call.projected()
    found, (expected, memory) = prefill(spec, x), arguments(spec, in_float32(x))
    real = mx.arange(call.T) < (call.T if x.lengths is None else x.lengths[:, None])
    for name in ("q", "k", "v", "g", "beta"):
        array, wanted = getattr(found, name), expected.get(name)
        assert (array is None) == (wanted is None)
        if array is None or wanted is None:
            continue
        mask = mx.repeat(mx.broadcast_to(real, (call.B, call.T)), array.shape[1] // call.T, axis=1)
        wanted = mx.where(mask.reshape(*mask.shape, *[1] * (array.ndim - 2)), wanted, mx.zeros(()))
        assert array.dtype == (mx.float32 if name in ("g", "beta") else call.dtype)
        assert error(array, float64(wanted)) < TOLERANCE[array.dtype]
    if memory is not None:
        assert found.memory is not None
        assert mx.array_equal(found.memory.astype(mx.float32), memory.astype(mx.float32))
