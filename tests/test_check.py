"""How far two models are apart, and bits raised where they matter until a target is met."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from mlxlin.backend import mx
from mlxlin.check import TOKENS, check_conversion, compare, measure, sample_tokens
from mlxlin.convert import Recipe, convert_checkpoint, make_recipe
from mlxlin.convert.resolve import DEMO
from mlxlin.errors import InputError, NumericsError
from mlxlin.layerwise import Layerwise
from mlxlin.loader import load_model, open_path
from mlxlin.models import QuantSpec
from mlxlin.target import recipe_for
from tests.convert.checkpoints import bytes_of, save, weights
from tests.models.golden import FIXTURES, TOLERANCE, difference

TEXT = np.random.default_rng(0).integers(0, 128, 48).tolist()
NAMES = sorted(folder.name for folder in FIXTURES.iterdir() if (folder / "golden.safetensors").exists())


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """The tiny model, its first layer made so large that it decides everything."""
    made = weights()
    made["model.layers.0.mlp.down_proj.weight"] *= 20
    return save(tmp_path / "raw", made)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("length", [2, 64, 65, 130])
def test_the_numbers_are_those_of_their_definitions(length: int) -> None:
    rng = np.random.default_rng(length)
    ours, theirs = rng.normal(size=(2, length, 5)).astype(np.float32) * 2
    tokens = rng.integers(0, 5, length)
    p, q = softmax(ours), softmax(theirs)
    kl = (p * np.log(p / q)).sum(-1)
    found = measure(mx.array(ours), mx.array(theirs), tokens.tolist())
    assert found.kl == pytest.approx(kl.mean(), rel=1e-4) and found.worst_kl == pytest.approx(kl.max(), rel=1e-4)
    assert found.agreement == (p.argmax(-1) == q.argmax(-1)).mean() and found.places == length
    losses = [-np.log(x[range(length - 1), tokens[1:]]).mean() for x in (p, q)]
    assert found.perplexities == pytest.approx(tuple(np.exp(losses)), rel=1e-4)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(InputError, match="vocabularies differ: 5 and 4"):
        measure(mx.zeros((3, 5)), mx.zeros((3, 4)), [0, 1, 2])
    with pytest.raises(NumericsError):
        measure(mx.zeros((3, 5)), mx.full((3, 5), math.nan), [0, 1, 2])
    with pytest.raises(InputError, match="at least two tokens"):
        compare(open_path(DEMO), open_path(DEMO), [1])


@pytest.mark.parametrize("name", NAMES)
def test_layer_by_layer_is_the_model(name: str) -> None:
    prepared = open_path(FIXTURES / name)
    tokens = (np.arange(20) * 7 % prepared.spec.vocab).tolist()
    model = Layerwise(prepared, tokens)
    expected, _ = load_model(FIXTURES / name)(mx.array([tokens]))
    assert expected is not None and difference(model.logits(model.hidden())[None], expected) < TOLERANCE


def test_a_head_in_blocks_and_a_quantised_model(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxlin.layerwise._HEAD_ROWS", 50)
    convert_checkpoint(raw, tmp_path / "q", bits=4)
    for source in (raw, tmp_path / "q"):
        model = Layerwise(open_path(source), TEXT)
        expected, _ = load_model(source)(mx.array([TEXT]))
        assert expected is not None and difference(model.logits(model.hidden())[None], expected) < 1e-3


def test_the_built_in_text_on_the_shipped_model(tmp_path: Path) -> None:
    assert len(sample_tokens(DEMO)) == TOKENS
    tokens = sample_tokens(DEMO)[:96]
    same, *closer = (compare(open_path(DEMO), open_path(DEMO, bits), tokens) for bits in (None, 8, 4, 2))
    assert same.kl == 0 and same.agreement == 1 and same.perplexities[0] == same.perplexities[1]
    assert 1 < same.perplexities[0] < 4096
    assert 0 < closer[0].kl < closer[1].kl < closer[2].kl
    assert closer[0].agreement > closer[2].agreement
    convert_checkpoint("demo", tmp_path / "out", bits=4)
    seen: list[tuple[int, int]] = []
    found = check_conversion(
        "demo", tmp_path / "out", tokens=tokens, progress=lambda done, total: seen.append((done, total))
    )
    assert found == closer[1] and seen == [(n, 4) for n in (1, 2, 3, 4)] * 2


@pytest.mark.parametrize("share", [0.5, 0.05])
def test_bits_are_raised_where_they_matter_until_the_target_is_met(raw: Path, tmp_path: Path, share: float) -> None:
    start = compare(open_path(raw), open_path(raw, 4), TEXT)
    recipe, found = recipe_for(raw, make_recipe(4), share * start.kl, tokens=TEXT)
    assert found.kl <= share * start.kl
    report = convert_checkpoint(raw, tmp_path / "out", recipe=recipe)
    assert compare(open_path(raw), open_path(tmp_path / "out"), TEXT) == found
    bits = {i.name: i.quantization.bits if i.quantization else 16 for i in report.prepared.items if i.role == "matrix"}
    first, rest = ([n for name, n in bits.items() if name.startswith("layers.0.") == own] for own in (True, False))
    assert min(first) > max(rest) >= 4
    assert report.nbytes < 0.6 * convert_checkpoint(raw, dry_run=True).nbytes


def test_a_target_next_to_nothing_ends_with_the_source_itself(raw: Path) -> None:
    recipe, found = recipe_for(raw, make_recipe(recipe="mxfp4"), 1e-12, tokens=TEXT)
    assert found.kl <= 1e-12
    assert not convert_checkpoint(raw, dry_run=True, recipe=recipe).prepared.quantization


def test_a_target_that_is_met_already_changes_nothing(raw: Path) -> None:
    recipe, found = recipe_for(raw, make_recipe(4), 100.0, tokens=TEXT)
    assert found is not None and found.kl > 0
    assert recipe.overrides == () and recipe.request is not None and recipe.request.target_kl == 100.0


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan])
def test_targets_that_cannot_be_are_refused(raw: Path, target: float) -> None:
    with pytest.raises(InputError, match="above 0"):
        recipe_for(raw, make_recipe(4), target, tokens=TEXT)
    with pytest.raises(InputError, match="number of bits to start from"):
        recipe_for(raw, Recipe(), 0.1, tokens=TEXT)


def test_b01_converting_twice_within_one_target_changes_nothing(raw: Path, tmp_path: Path) -> None:
    target = 0.5 * compare(open_path(raw), open_path(raw, 4), TEXT).kl
    recipe, _ = recipe_for(raw, make_recipe(4), target, tokens=TEXT)
    convert_checkpoint(raw, tmp_path / "a", recipe=recipe)
    assert f"raised to stay within {target:g} nats" in (tmp_path / "a" / "README.md").read_text()
    again, measured = recipe_for(tmp_path / "a", make_recipe(4), target, tokens=TEXT)
    assert measured is None
    convert_checkpoint(tmp_path / "a", tmp_path / "b", recipe=again)
    convert_checkpoint(tmp_path / "a", tmp_path / "c", recipe=recipe)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b") == bytes_of(tmp_path / "c")
    others = [recipe_for(tmp_path / "a", make_recipe(3), target)[0], recipe_for(tmp_path / "a", make_recipe(4), 9.0)[0]]
    for other in [*others, make_recipe(4)]:
        with pytest.raises(InputError, match="a is converted already; it cannot be converted to other quantisation"):
            convert_checkpoint(tmp_path / "a", tmp_path / "d", recipe=other)
    convert_checkpoint(raw, tmp_path / "plain", bits=4)
    with pytest.raises(InputError, match="plain is converted already"):
        convert_checkpoint(tmp_path / "plain", tmp_path / "d", recipe=again)


def test_many_exceptions_are_counted_in_words() -> None:
    recipe = Recipe(QuantSpec(4, 64))
    for n in range(9):
        recipe = recipe.with_override(f"layers.{n}.mlp.up", QuantSpec(6, 64) if n else None)
    assert recipe.describe().endswith("8 matrices 6-bit affine, groups of 64; 1 matrices as they are")
