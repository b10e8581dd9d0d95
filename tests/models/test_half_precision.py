"""Models in bfloat16: everything between layers stays in it, recurrent state in float32, results near the source's."""

from __future__ import annotations

from typing import Any

import pytest

from mlxlin.backend import mx
from mlxlin.keys_values import KeysValues
from mlxlin.models import Model
from mlxlin.models.layer import Layer
from mlxlin.models.residual import Residual
from tests.models.golden import FIXTURES, Golden, plan_of

NAMES = sorted(folder.name for folder in FIXTURES.iterdir() if (folder / "golden.safetensors").exists())
FLOAT32 = {"S", "S_values", "Z"}


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_kept_and_near(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    golden = Golden.load(FIXTURES / name)
    plan = plan_of(golden.config, golden.tensors)
    model = Model(plan.spec, {target.name: target.read().astype(mx.bfloat16) for target in plan.targets})
    found: set[Any] = set()
    call = Layer.__call__

    def watched(layer: Layer, x: Residual, *rest: Any) -> Any:
        y, state = call(layer, x, *rest)
        found.add(y.total.dtype)
        return y, state

    monkeypatch.setattr(Layer, "__call__", watched)
    ids = golden.row(1)
    logits, state = model(ids[:, :-1])
    last, state = model(ids[:, -1:], state)
    assert found == {mx.bfloat16} and logits.dtype == last.dtype == mx.float32
    for layer in state.layers:
        arrays = layer.arrays() if isinstance(layer, KeysValues) else layer
        for key, array in arrays.items():
            assert array.dtype == (mx.float32 if key in FLOAT32 else mx.bfloat16), key
    both = mx.concatenate([logits, last], axis=1)
    error = mx.sqrt(mx.square(both - golden.logits(1)).mean()) / golden.logits(1).std()
    assert float(error) < 0.1
