"""Loading: the same numbers from any form, float32 on the CPU, memory checked before anything is read."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import mlxlin
from mlxlin import aliases, memory
from mlxlin.backend import memory_bytes, mx
from mlxlin.convert import convert_checkpoint
from mlxlin.description import describe
from mlxlin.errors import CheckpointError, InputError, ResourceError
from mlxlin.loader import load_model, memory_plans, open_path
from tests.convert.checkpoints import IDS, bf16, config, logits, same, save, weights
from tests.convert.test_formats_mlx_quantized import NARROW, quantised

CPU = mx.default_device() == mx.Device(mx.cpu)


def test_the_demo_model_loads_and_predicts() -> None:
    seen: list[tuple[int, int]] = []
    model, tokenizer = mlxlin.load("demo", progress=lambda done, total: seen.append((done, total)))
    result, _ = model(mx.array([tokenizer.encode("The cat sat")]))
    assert result is not None and bool(mx.all(mx.isfinite(result)))
    assert seen[-1][0] == seen[-1][1] == model.nbytes


def test_importing_the_module_does_not_hide_the_function() -> None:
    importlib.import_module("mlxlin.loader")
    importlib.import_module("mlxlin.description")
    assert callable(mlxlin.load) and callable(mlxlin.describe)


@pytest.mark.skipif(not CPU, reason="states what happens on the CPU")
def test_the_cpu_computes_in_float32_whatever_is_stored(tmp_path: Path) -> None:
    raw = save(tmp_path / "raw", {name: bf16(array) for name, array in weights().items()})
    quarter = convert_checkpoint(raw, tmp_path / "q", bits=4).out
    assert quarter is not None
    for model in (load_model(raw), load_model(quarter), load_model(raw, bits=4)):
        assert model.dtype == mx.float32
        assert model.nbytes == 4 * model.parameter_count


def test_quantising_on_load_equals_converting(tmp_path: Path) -> None:
    raw = save(tmp_path / "raw", {name: bf16(array) for name, array in weights().items()})
    convert_checkpoint(raw, tmp_path / "plain")
    convert_checkpoint(raw, tmp_path / "q", bits=4)
    expected = logits(tmp_path / "q")
    assert same(logits(raw, bits=4), expected)
    assert same(logits(tmp_path / "plain", bits=4), expected)
    assert same(logits(tmp_path / "q", bits=4), expected)  # what it is already
    with pytest.raises(InputError, match="already quantised"):
        logits(tmp_path / "q", bits=8)


def test_another_dtype(tmp_path: Path) -> None:
    raw = save(tmp_path / "raw", weights())
    model = load_model(raw, dtype=mx.bfloat16)
    result, _ = model(mx.array(IDS))
    assert model.dtype == mx.bfloat16 and result is not None
    exact = logits(raw)
    assert float(mx.abs(result - exact).max()) < 0.2 * float(mx.abs(exact).max())


@pytest.mark.skipif(not CPU, reason="states what happens on the CPU")
@pytest.mark.parametrize("kind", ["quantised", "bfloat16"])
def test_a_slower_form_is_used_and_said_when_the_faster_one_does_not_fit(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = save(tmp_path / "raw", {name: bf16(array) for name, array in weights().items()})
    bits = 4 if kind == "quantised" else None
    plans = memory_plans(open_path(raw, bits))
    assert [plan.nbytes for plan in plans] == sorted((plan.nbytes for plan in plans), reverse=True)
    monkeypatch.setattr("mlxlin.loader.available_bytes", lambda: plans[0].nbytes - 1)
    notices: list[str] = []
    model = load_model(raw, bits=bits, notice=notices.append)
    assert model.nbytes <= plans[1].nbytes < plans[0].nbytes
    assert len(notices) == 1 and "slower" in notices[0]
    result, _ = model(mx.array(IDS))
    monkeypatch.undo()
    fast = logits(raw, bits=bits)
    assert result is not None and float(mx.abs(result - fast).max()) < (0.01 if bits else 0.2) * float(
        mx.abs(fast).max()
    )


def test_memory_is_checked_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = save(tmp_path / "raw", weights())
    monkeypatch.setattr("mlxlin.loader.available_bytes", lambda: 1000)
    monkeypatch.setattr("mlxlin.loader.Plan.read", lambda *_: pytest.fail("read something"))
    with pytest.raises(ResourceError, match="needs 0.0 GB of memory, but 0.0 GB are free") as caught:
        load_model(raw)
    assert "-q 4" in caught.value.hint


def test_free_memory_is_a_part_of_the_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert 0 < memory.available_bytes() <= memory_bytes()
    if sys.platform != "linux":
        return
    (tmp_path / "memory.max").write_text("5000000")
    (tmp_path / "memory.current").write_text("1000000")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available_bytes() == 4_000_000
    (tmp_path / "memory.max").write_text("max")
    assert memory.available_bytes() > 4_000_000


def test_strict_in_both_directions(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    convert_checkpoint(save(tmp_path / "raw", weights()), folder)
    manifest = folder / "mlxlin.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"tied": false', '"tied": true'))
    with pytest.raises(CheckpointError, match="unknown parameter 'head.weight'"):
        load_model(folder)
    manifest.write_text(text.replace('"hidden": 96', '"hidden": 80'))
    with pytest.raises(
        CheckpointError, match=r"'layers.0.mlp.gate.weight' in out has shape \(96, 64\), not \(80, 64\)"
    ):
        load_model(folder)


def test_describe_agrees_with_the_loaded_model(tmp_path: Path) -> None:
    for source in (
        "demo",
        save(tmp_path / "raw", weights()),
        save(tmp_path / "q", quantised({}, NARROW)[0], config(quantization=NARROW)),
    ):
        found, model = describe(source), load_model(source)
        assert found.parameter_count == model.parameter_count
        assert found.memory_bytes == model.nbytes
        assert found.state_bytes == model.state_nbytes(0)
        assert found.kv_bytes_per_token == model.kv_bytes_per_token
        assert found.bytes_at(100) == model.nbytes + model.state_nbytes(100)
        assert found.layers == {"gated_delta": 3, "attention": 1} and found.fits
        assert sum(found.kinds.values()) == found.stored_bytes


def test_suggestions_fit_and_prefer_more_bits() -> None:
    assert aliases.suggest(10**6) == []
    for memory_size in (8, 16, 64):
        found = aliases.suggest(memory_size << 30)
        assert found and all(s.nbytes < memory_size << 30 for s in found)
        assert [s.known.billions for s in found] == sorted((s.known.billions for s in found), reverse=True)
    by_alias = {s.alias: s.bits for s in aliases.suggest(16 << 30)}
    assert by_alias["qwen3.5-0.8b"] == 16 and by_alias["qwen3.5-9b"] == 8 and "qwen3.5-27b" not in by_alias


def test_a_folder_that_is_no_model_lacks_weights_rather_than_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(mlxlin.CheckpointError, match="There are no weights"):
        mlxlin.load(tmp_path)
