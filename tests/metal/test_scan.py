"""The sequential kernel against the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxlin.backend import mx
from mlxlin.metal.recurrence import scan
from mlxlin.recurrences import RULES
from mlxlin.recurrences.reference import NORMALIZER_EPS

from .cases import Case, arguments, assert_equals_reference

CASES = [
    Case("linear", T=5, K=96, V=64, groups=3, dtype=mx.bfloat16, keys="correlated"),
    Case("linear", T=7, B=2, lengths=(7, 2), normalize=True, strided=True),
    Case("decay", T=3, K=256, V=96, groups=4, gates="mixed", strided=True),
    Case("decay", T=4, K=128, V=64, groups=16, dtype=mx.bfloat16, lengths=(4,)),
    Case("decay", T=3, B=2, H=8, K=128, V=80, groups=16, dtype=mx.bfloat16),
    Case("gated_delta", T=4, K=256, V=80, gates="mixed"),
    Case("gated", T=17, B=3, H=2, groups=1, gates="mixed", lengths=(0, 17, 9)),
    Case("delta", T=16, K=128, V=32, groups=1, keys="correlated", beta=2.0),
    Case("gated_delta", T=33, B=2, K=64, V=32, dtype=mx.float16, gates="mixed", keys="correlated", lengths=(31, 33)),
    Case("kda", T=4, K=192, V=32, groups=3, dtype=mx.bfloat16, gates="mixed", strided=True),
    Case("delta_product", T=6, B=2, substeps=3, lengths=(6, 1), gates="mixed", strided=True),
    Case("delta_product", T=5, decay="none", substeps=2, keys="correlated", beta=1.9),
    Case("dplr", T=9, B=2, K=64, V=64, groups=1, gates="mixed", lengths=(3, 9)),
    Case("dplr", T=5, decay="head", groups=4, dtype=mx.bfloat16),
    Case("comba", T=7, B=2, groups=2, gates="mixed", lengths=(7, 3), dtype=mx.bfloat16),
    Case("gated_delta", T=2, H=16, groups=2, V=512, keys="correlated"),
    Case("gated_values", T=9, B=3, K=64, V=96, groups=3, gates="mixed", lengths=(9, 0, 4)),
    Case("gated_values", T=5, B=2, H=2, groups=1, K=256, V=64, dtype=mx.bfloat16, gates="mixed", strided=True),
    Case("gated_values", T=2, H=16, groups=2, V=512, dtype=mx.float16, keys="correlated"),
]


def assert_scan_equals_reference(case: Case) -> None:
    x = case.inputs()
    y, S, Z = scan(arguments(x), normalize=case.normalize, eps=NORMALIZER_EPS)
    assert_equals_reference(x, y, S, Z)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scan_equals_reference(case: Case) -> None:
    assert_scan_equals_reference(case)


@pytest.mark.parametrize("rule", RULES)
def test_b33_a_sequence_has_the_bits_of_its_parts(rule: str) -> None:
    whole = arguments(Case(rule, T=7, gates="mixed", substeps=2 if RULES[rule].substeps else 1).inputs())
    y, S, _ = scan(whole)
    names = [name for name in ("q", "k", "v", "g", "beta", "a", "b") if getattr(whole, name) is not None]
    for split in (1, 4):
        after, outputs = whole.S, []
        for start, end in ((0, split), (split, 7)):
            parts = {name: getattr(whole, name) for name in names}
            parts = {name: z[:, start * z.shape[1] // 7 : end * z.shape[1] // 7] for name, z in parts.items()}
            part, after, _ = scan(replace(whole, **parts, S=after))
            outputs.append(part)
        assert mx.array_equal(mx.concatenate(outputs, axis=1), y) and mx.array_equal(after, S)
