"""Dispatches of one decoded token: by layer, and from its embedding to the next token."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from mlxlin.sampling import Sampling

from .tokens import (
    COMBA,
    DENSE,
    EXPERTS,
    HGRN2,
    LINEAR_ATTENTION,
    MAMBA,
    RWKV6,
    SLOTS,
    TIME_MIX,
    layer_dispatches,
    prompt_dispatches,
    token_dispatches,
)

# One more product with packed weights: decay and beta keep 8 bits, so they are not part of the merged projection.
MIXER = Counter(add_norm=1, products=2, decode=1)
ATTENTION = Counter(add_norm=1, products=2, rms_norm=2, rope=2, attention=1, SliceUpdate=2, sigmoid_gated=1)
DENSE_PART = Counter(add_norm=1, products=2, swiglu=1)
# router, chosen and shared experts, whose sum is one product; each of the two pairs of projections is merged
EXPERT_PART = Counter(add_norm=1, products=4, router_topk=1, GatherMM=2, swiglu=2, sigmoid_gated=1)


@pytest.fixture(autouse=True)
def emulator() -> None:
    """None: graphs are exported, nothing runs, and MLX makes the kernels itself."""


PRODUCTS = ("Matmul", "QuantizedMatmul", "AddMM")


def by_kind(found: Counter[str]) -> Counter[str]:
    """Packed or not, a product is a product."""
    names = {"GatherQMM": "GatherMM", "scaled_dot_product_attention": "attention"} | dict.fromkeys(PRODUCTS, "products")
    counted: Counter[str] = Counter()
    for name, n in found.items():
        counted[names.get(name, name)] += n
    return counted


@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16", "4 bits"])
@pytest.mark.parametrize(
    ("config", "part", "limits"),
    [(DENSE, DENSE_PART, (9, 15)), (EXPERTS, EXPERT_PART, (16, 22))],
    ids=["dense", "experts"],
)
def test_dispatches_of_a_layer(
    config: dict[str, Any], part: Counter[str], limits: tuple[int, int], packed: bool
) -> None:
    found = layer_dispatches(config, packed)
    assert by_kind(found["linear layer"]) == MIXER + part + Counter(products=int(packed))
    assert by_kind(found["attention layer"]) == ATTENTION + part
    assert found["linear layer"].total() <= limits[0]
    assert found["attention layer"].total() <= limits[1]
    # embedding (of packed numbers and their scales and biases), last norm, head, logits in float32, position
    assert found["rest"].total() == (8 if packed else 5)


@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16", "4 bits"])
def test_dispatches_of_a_layer_of_mamba2(packed: bool) -> None:
    """Its norm runs over groups of heads."""
    one, two = (token_dispatches(MAMBA | {"num_hidden_layers": n}, packed) for n in (1, 2))
    layer = Counter(add_norm=1, products=2, decode=1, gated_norm=1)
    assert by_kind(two - one) == layer + Counter(products=int(packed))


@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16", "4 bits"])
def test_dispatches_of_a_layer_of_comba(packed: bool) -> None:
    one, two = (token_dispatches(COMBA | {"num_hidden_layers": n}, packed) for n in (1, 2))
    assert by_kind(two - one) == MIXER + DENSE_PART + Counter(products=int(packed))


@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16", "4 bits"])
def test_dispatches_of_a_layer_of_gated_slot_attention(packed: bool) -> None:
    """Its norm runs over all heads."""
    one, two = (token_dispatches(SLOTS | {"num_hidden_layers": n}, packed) for n in (1, 2))
    assert by_kind(two - one) == MIXER + DENSE_PART + Counter(gated_norm=1, products=int(packed))


@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16", "4 bits"])
def test_dispatches_of_a_layer_of_hgrn2_behind_a_convolution(packed: bool) -> None:
    """Its norm runs over all heads."""
    one, two = (token_dispatches(HGRN2 | {"num_hidden_layers": n}, packed) for n in (1, 2))
    assert by_kind(two - one) == MIXER + DENSE_PART + Counter(gated_norm=1, products=int(packed))


@pytest.mark.parametrize(
    ("name", "more", "products"),
    [
        ("elu", {}, 0),
        ("dpfp", {"num_heads": 32, "expand_v": 2.0}, 0),
        ("elementwise_product", {}, 2),  # of queries and of keys
        ("hedgehog", {}, 2),
        ("t2r", {}, 2),
    ],
)
def test_dispatches_of_a_layer_with_a_feature_map(name: str, more: dict[str, Any], products: int) -> None:
    config = LINEAR_ATTENTION | more | {"feature_map": name}
    one, two = (token_dispatches(config | {"num_hidden_layers": n}) for n in (1, 2))
    assert by_kind(two - one) == MIXER + DENSE_PART + Counter(products=products)


@pytest.mark.parametrize(("packed", "limit"), [(False, 25), (True, 26)], ids=["bfloat16", "4 bits"])
def test_dispatches_of_a_layer_of_rwkv6(packed: bool, limit: int) -> None:
    """12 products, one of them of the five low-rank mixes."""
    two, three = (token_dispatches(RWKV6 | {"num_hidden_layers": n}, packed) for n in (2, 3))
    layer = by_kind(three - two)
    assert (layer["products"], layer["decode"], layer["add_norm"]) == (12, 1, 2)
    assert layer.total() <= limit


@pytest.mark.parametrize(("packed", "limit"), [(False, 25), (True, 28)], ids=["bfloat16", "4 bits"])
def test_dispatches_of_a_layer_of_rwkv7(packed: bool, limit: int) -> None:
    """14 products, four of them in pairs of low rank whose inputs differ; packed ones add their biases apart."""
    two, three = (token_dispatches(TIME_MIX | {"num_hidden_layers": n}, packed) for n in (2, 3))
    layer = by_kind(three - two)
    assert (layer["products"], layer["time_mix"], layer["add_norm"]) == (14, 1, 2)
    assert layer.total() <= limit


def test_dispatches_of_a_prompt_in_a_layer_of_mamba2() -> None:
    """As many for any length: what precedes the recurrence, the recurrence in two, what follows it."""
    one, two = (prompt_dispatches(MAMBA | {"num_hidden_layers": n}, 64) for n in (1, 2))
    assert by_kind(two - one) == Counter(add_norm=1, products=2, prefill=1, prep_head=1, chunk=1, gated_norm=1)
    assert (two - one).total() == 7


@pytest.mark.parametrize("config", [DENSE, COMBA, HGRN2], ids=["gated delta net", "comba", "hgrn2"])
def test_dispatches_of_a_prompt_in_a_linear_layer(config: dict[str, Any]) -> None:
    one, two = (prompt_dispatches(config | {"num_hidden_layers": n}, 64) for n in (1, 2))
    layer = by_kind(two - one)
    mixer = Counter(prefill=1, chunk=1, gated_norm=1, **{n: 1 for n in ("prep_head", "prep_channel") if n in layer})
    assert layer == MIXER - Counter(decode=1) + mixer + DENSE_PART
    assert layer.total() == 11


def test_dispatches_of_a_prompt_in_a_layer_of_rwkv7() -> None:
    """What is between the projections costs four, as in other mixers."""
    two, three = (prompt_dispatches(TIME_MIX | {"num_hidden_layers": n}, 64) for n in (2, 3))
    layer = by_kind(three - two)
    assert (layer["products"], layer["add_norm"]) == (14, 2)
    assert [layer[name] for name in ("time_mix_prefill", "prep_channel", "chunk", "time_mix_finish")] == [1, 1, 1, 1]
    assert layer.total() <= 33


# Of 4 layers, above. Sorting and cumulative sums are counted as one, though a large vocabulary takes several passes.
@pytest.mark.parametrize(
    ("sampling", "limit"),
    [
        (Sampling(), 4),
        (Sampling(temperature=0.7), 11),
        (Sampling(temperature=0.7, top_k=20), 15),
        (Sampling(temperature=0.7, top_p=0.9), 16),
        (Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05), 21),
    ],
    ids=["greedy", "temperature", "top-k", "top-p", "all"],
)
def test_dispatches_of_choosing_the_next_token(sampling: Sampling, limit: int) -> None:
    without, whole = token_dispatches(DENSE), token_dispatches(DENSE, sampling=sampling)
    assert (whole - without).total() <= limit
    assert not without - whole


@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16", "4 bits"])
@pytest.mark.parametrize(
    ("config", "linear", "attention"), [(DENSE, 8, 15), (EXPERTS, 15, 22)], ids=["dense", "experts"]
)
def test_a_whole_token_of_24_layers(config: dict[str, Any], linear: int, attention: int, packed: bool) -> None:
    """18 linear layers, one dispatch longer with packed weights, 6 of attention, embedding and head, greedy choice."""
    found = token_dispatches(config | {"num_hidden_layers": 24}, packed, Sampling())
    assert found.total() == 18 * (linear + packed) + 6 * attention + (8 if packed else 5) + 4
