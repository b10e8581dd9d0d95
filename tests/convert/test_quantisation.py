"""Recipes choose, `quantize` packs: bits by role and name, groups that divide a row, bands that change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxlin.backend import mx
from mlxlin.convert import Recipe, convert_checkpoint, make_recipe
from mlxlin.convert.formats.mlx_quantized import dequantize
from mlxlin.convert.quantize import packed_shapes, quantize
from mlxlin.convert.writer import Shape
from mlxlin.errors import InputError, NumericsError
from mlxlin.loader import open_path
from mlxlin.models import QuantSpec
from tests.convert.checkpoints import logits, same, save, weights
from tests.models.golden import FIXTURES

SPECS = [QuantSpec(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
SPECS += [QuantSpec(4, 32, "mxfp4"), QuantSpec(8, 32, "mxfp8"), QuantSpec(4, 16, "nvfp4")]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.mode}-{s.bits}-{s.group_size}")
@pytest.mark.parametrize("lead", [(), (3,)], ids=["matrix", "experts"])
def test_packing_in_bands_gives_the_shapes_and_bits_of_mlx(
    spec: QuantSpec, lead: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxlin.convert.quantize._BAND", 3 * 128)
    matrix = mx.random.normal((*lead, 10, 128), key=mx.random.key(0)).astype(mx.bfloat16)
    blocks = [matrix] if not lead else list(matrix)
    parts = quantize(blocks, matrix.shape, spec, "x")
    whole = mx.quantize(matrix, group_size=spec.group_size, bits=spec.bits, mode=spec.mode)
    assert len(parts) == len(whole) and all(same(a, b) for a, b in zip(parts.values(), whole, strict=True))
    names = {mx.uint32: "U32", mx.uint8: "U8", mx.bfloat16: "BF16"}
    expected = {name: Shape(names[array.dtype], array.shape) for name, array in parts.items()}
    assert packed_shapes(matrix.shape, "BF16", spec) == expected
    back = dequantize(parts, spec, mx.float32)
    direct = mx.dequantize(*whole, group_size=spec.group_size, bits=spec.bits, mode=spec.mode, dtype=mx.float32)
    assert back.dtype == mx.float32 and back.shape == matrix.shape
    assert float(mx.abs(back - direct).max()) < 0.02 * float(mx.abs(direct).max())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(NumericsError, match="layers.3.mlp.up"):
        quantize([mx.full((4, 64), bad)], (4, 64), QuantSpec(4, 64), "layers.3.mlp.up")


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_gates_never_get_fewer_than_eight_bits(bits: int) -> None:
    recipe = make_recipe(bits)
    assert recipe.choose("layers.0.mixer.qkv", (64, 128), "matrix")[0] == QuantSpec(bits, 64)
    assert recipe.choose("embed", (100, 64), "embedding")[0] == QuantSpec(bits, 64)
    assert recipe.choose("layers.0.mixer.beta", (4, 64), "gate")[0] == QuantSpec(8, 64)
    assert recipe.choose("layers.0.mixer.conv", (4, 64), "keep") == (None, "")
    for mode in ("mxfp4", "nvfp4"):
        assert make_recipe(recipe=mode).choose("g", (4, 64), "gate")[0] == QuantSpec(8, 64)


# By the end of their names, in any family: what writes or fades a state, mixes what does, or chooses experts. Gates
# behind a state (`gate`, where it has no low rank) carry no error from token to token, and are projections like others.
_STATE = ["decay", "decay_out", "beta", "forget", "rate", "rate_out", "value_out", "mix_in", "mix_out", "gate_out"]
_STATE += ["router", "shared_gate", "keys", "values", "layer", "layer1", "layer2"]
_KEPT = [
    "A_log",
    "dt_bias",
    "conv",
    "norm",
    "mixer_norm",
    "mlp_norm",
    "q_norm",
    "k_norm",
    "skip",
    "bonus",
    "mix",
    "bias",
]
_KEPT += ["first_mix", "gate_mix", "bounds", "reader", "correction", "k_k", "k_a", "r_k", "embed_norm", "kv_norm"]
_OTHERS = ["qkv", "q", "k", "v", "r", "q_in", "kv", "in", "out", "gate", "value", "key", "up", "down", "embed", "head"]
_OTHERS += ["latent_in", "latent_out"]


@pytest.mark.parametrize("name", sorted(path.parent.name for path in FIXTURES.glob("*/config.json")))
def test_b15_what_a_state_depends_on_keeps_eight_bits_in_every_family(name: str) -> None:
    recipe = make_recipe(2)
    for item in open_path(FIXTURES / name).items:
        module = item.name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        spec, _ = recipe.choose(module, (64, 128), item.role)
        assert last in _STATE + _KEPT + _OTHERS, f"{module} is new: say whether a state depends on it"
        if last in _KEPT:
            assert spec is None, module
        elif last in _STATE or "mixer.value" in module and item.role == "gate":
            assert spec == QuantSpec(8, 64), module
        else:
            assert spec is not None and spec.bits >= 2, module


@pytest.mark.parametrize(
    ("spec", "columns", "group"),
    [
        (QuantSpec(4, 64), 96, 32),
        (QuantSpec(4, 128), 192, 64),
        (QuantSpec(4, 64), 128, 64),
        (QuantSpec(4, 64), 100, None),
    ],
)
def test_the_group_divides_the_row_or_the_matrix_stays_float(spec: QuantSpec, columns: int, group: int | None) -> None:
    chosen, note = Recipe(spec).choose("x", (8, columns), "matrix")
    assert (chosen.group_size if chosen else None) == group
    assert bool(note) == (group != spec.group_size) and (group or "not quantised" in note)


def test_mixed_recipes_and_files(tmp_path: Path) -> None:
    mixed = make_recipe(recipe="mixed-3-6")
    assert mixed.choose("layers.0.mlp.up", (64, 64), "matrix")[0] == QuantSpec(3, 64)
    for name in ("embed", "head", "layers.0.mixer.out", "layers.7.mlp.down"):
        assert mixed.choose(name, (64, 64), "matrix")[0] == QuantSpec(6, 64)
    file = tmp_path / "mine.json"
    overrides = [{"match": "layers.0.*", "bits": 8, "group_size": 32}, {"match": "*.mlp.down", "bits": None}]
    file.write_text(json.dumps({"bits": 4, "gate_bits": 8, "overrides": overrides}))
    mine = make_recipe(recipe=file)
    assert mine.choose("layers.0.mlp.up", (64, 64), "matrix")[0] == QuantSpec(8, 32)
    assert mine.choose("layers.0.mlp.down", (64, 64), "matrix")[0] is None
    assert mine.choose("layers.1.mlp.up", (64, 64), "matrix")[0] == QuantSpec(4, 64)
    raw = save(tmp_path / "raw", weights())
    report = convert_checkpoint(raw, tmp_path / "out", recipe=file)
    chosen = {item.name: item.quantization for item in report.prepared.items}
    assert chosen["layers.0.mlp.up"] == QuantSpec(8, 32) and chosen["layers.1.mlp.down.weight"] is None
    stored = json.loads((tmp_path / "out" / "mlxlin.json").read_text())["options"]["recipe"]
    assert stored == mine.to_json() and "layers.0.*" in mine.describe()
    logits(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 7}, "7 bits"),
        ({"bits": 1}, "1 bits"),
        ({"bits": 4, "group_size": 48}, "groups of 48"),
        ({"group_size": 64}, "needs a number of bits"),
        ({"mode": "mxfp4", "bits": 8}, "mxfp4 with 8 bits"),
        ({"recipe": "mixed-7-9"}, "no recipe 'mixed-7-9'"),
        ({"recipe": "mxfp4", "bits": 4}, "already says how many bits"),
        ({"mode": "ternary"}, "ternary"),
    ],
)
def test_options_that_no_kernel_exists_for_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make_recipe(**options)
    assert caught.value.hint


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"bits": 4, "gates": 8}', '{"bits": 9}', '{"bits": 4, "overrides": [{"bits": 4}]}']
)
def test_recipe_files_that_cannot_be_read_are_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(InputError, match="bad.json|9 bits") as caught:
        make_recipe(recipe=file)
    assert "object" not in caught.value.message, "not in the words of Python"
