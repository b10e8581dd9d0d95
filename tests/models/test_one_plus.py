"""Zero-centred norms in half precision: the one is added in float32, as transformers adds it."""

from __future__ import annotations

import numpy as np

from mlxlin.backend import mx
from mlxlin.models.values import ONE_PLUS, Place


def test_the_one_is_not_rounded_away() -> None:
    stored = (mx.random.normal((64,)) * 0.01).astype(mx.bfloat16)
    exact = np.array(stored.astype(mx.float32)) + np.float32(1)
    np.testing.assert_array_equal(np.array(ONE_PLUS.apply([stored], Place(None, False))), exact)


def test_b01_mlx_files_have_it_already() -> None:
    stored = mx.ones((4,)).astype(mx.bfloat16)
    assert mx.array_equal(ONE_PLUS.apply([stored], Place(None, True)), stored)
