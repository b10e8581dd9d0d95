"""Which model this is, told from its declaration and its numbers: what saved states depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import numpy as np

from mlxlin.backend import mx
from mlxlin.models.params import QuantSpec
from mlxlin.models.spec import ModelSpec

_SAMPLES = 256  # numbers looked at per parameter, spread over it: another training or rounding changes some of them


def fingerprint(spec: ModelSpec, params: Mapping[str, mx.array], quantization: Mapping[str, QuantSpec]) -> str:
    """64 hexadecimal digits, equal for equal models however they were stored, cheap even for large ones."""
    total = hashlib.sha256(json.dumps(spec.to_json(), sort_keys=True).encode())
    samples = {}
    for name, array in sorted(params.items()):
        total.update(f"{name} {array.shape} {array.dtype} {quantization.get(name.removesuffix('.weight'))}\n".encode())
        at = mx.array(
            np.linspace(0, array.size - 1, min(_SAMPLES, array.size)).astype(
                np.int32 if array.size < 2**31 else np.int64
            )
        )
        picked = array.reshape(-1)[at]
        samples[name] = picked if array.dtype == mx.uint32 else picked.astype(mx.float32)
    mx.eval(samples)
    for name in sorted(samples):
        total.update(np.array(samples[name]).tobytes())
    return total.hexdigest()
