"""The text of every kernel as MLX hands it to Metal's compiler; nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from mlxlin.backend import mx
from mlxlin.metal import kernels
from mlxlin.metal.decode import decode, replay, replay_keys
from mlxlin.metal.layers import add_norm, gated_norm, router_topk
from mlxlin.metal.prefill import prefill
from mlxlin.metal.recurrence import chunk, scan
from mlxlin.metal.rwkv7 import finish, prepare, time_mix
from mlxlin.recurrences.reference import NORMALIZER_EPS
from mlxlin.recurrences.rwkv7 import sample
from tests.msl import metal_kernel
from tests.msl.gen import dtype_name
from tests.msl.preamble import original

from . import test_chunk, test_decode, test_prefill, test_scan
from .cases import arguments
from .test_layers import normal


@contextmanager
def recorded() -> Iterator[dict[str, str]]:
    """The texts, preamble included, of the kernels that are called, by the names MLX gives them; they return zeros."""
    texts: dict[str, str] = {}

    def make(**given: Any) -> Callable[..., list[mx.array]]:
        kernel = metal_kernel(**given)

        def call(
            *, inputs: Sequence[Any], output_shapes: Sequence[Any], output_dtypes: Sequence[mx.Dtype], **_: Any
        ) -> list[mx.array]:
            arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
            found = kernel.generate(
                [(dtype_name(x.dtype), x.shape) for x in arrays], [dtype_name(dtype) for dtype in output_dtypes], None
            )
            texts[found.kernel_name] = original() + found.text
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return call

    kernels.kernel.cache_clear()
    with mock.patch.object(mx.fast, "metal_kernel", make):
        yield texts
    kernels.kernel.cache_clear()


def call_every_kernel() -> None:
    """With every rule and option: the calls that the emulator runs."""
    for case in test_scan.CASES:
        scan(arguments(case.inputs()), normalize=case.normalize, eps=NORMALIZER_EPS)
    for case in test_chunk.CASES:
        for columns in (1, 2, 4) if case.V % 32 == 0 else (1, 2):
            chunk(arguments(case.inputs()), columns=columns)
    for mixer in test_decode.CALLS:
        spec, x = mixer.projected()
        decode(spec, x)
        tape, accepted = decode(spec, x, tape=True).tape, mx.zeros((mixer.B,), mx.int32)
        assert tape is not None
        replay(spec, x.S, tape, accepted)
        if x.S_keys is not None:
            replay_keys(spec, x.S_keys, tape, accepted)
    for mixer in test_prefill.CALLS:
        prefill(*mixer.projected())
    call_time_mixes()
    call_layers()


def call_time_mixes() -> None:
    for K, dtype in ((64, mx.bfloat16), (32, mx.float32), (128, mx.float16), (256, mx.bfloat16)):
        x = sample(2, K, 2, dtype)
        time_mix(x)
        time_mix(x, tape=True)
        out = x.v.reshape(2, 2, 2, K)
        finish(x, prepare(x).k, out)


def call_layers() -> None:
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        x = normal(1, 2, 1024, dtype=dtype)
        for centered in (False, True):
            add_norm(x, x, x[0, 0], 1e-6, centered=centered, bias=x[0, 0] if centered else None)
            gated_norm(x, x, x[0, 0], 1e-6, centered=centered, activation="silu", groups=4, lengths=mx.array([1]))
        skip, v = normal(16, 1), x.reshape(1, 2, 16, 64)
        gated_norm(x, x, None, None, activation="sigmoid", groups=16, skip=skip, v=v)
        gated_norm(x, x, x[0, 0], 1e-6, activation="silu", groups=2, gate_first=True, skip=skip, v=v)
        router_topk(normal(1, 3, 256, dtype=dtype), 8, score="sigmoid", correction=normal(256), groups=8, groups_kept=4)
        router_topk(normal(1, 3, 512, dtype=dtype), 10)
