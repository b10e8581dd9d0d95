"""The same checkpoint in the spellings that the hub, transformers and MLX tools use for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError, UnsupportedError
from mlxlin.models import Model, QuantSpec, find
from mlxlin.models.mixers import latent
from mlxlin.models.moe import _SORTED_FROM, Moe
from mlxlin.models.params import Params
from mlxlin.models.spec import MoeSpec
from tests.models.golden import FIXTURES, TOLERANCE, Golden, difference, model_of, plan_of

Tensors = dict[str, mx.array]


def fused_experts(tensors: Tensors) -> Tensors:
    """All experts in one tensor, gate and up together, as the hub stores Qwen3.5's."""
    out = {name: array for name, array in tensors.items() if ".experts." not in name}
    for layer in {name.split(".mlp.")[0] for name in tensors if ".mlp.experts." in name}:
        stacked = {p: stack(tensors, f"{layer}.mlp.experts", f"{p}_proj") for p in ("gate", "up", "down")}
        out[f"{layer}.mlp.experts.gate_up_proj"] = mx.concatenate([stacked["gate"], stacked["up"]], axis=1)
        out[f"{layer}.mlp.experts.down_proj"] = stacked["down"]
    return out


def mlx_experts(tensors: Tensors) -> Tensors:
    """Stacked under switch_mlp; convolutions and norms as MLX tools write them."""
    out: Tensors = {}
    for name, array in tensors.items():
        if name.endswith("conv1d.weight"):
            array = array.swapaxes(1, 2)
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            array = array + 1
        if ".experts." not in name:
            out[name] = array
    for layer in {name.split(".mlp.")[0] for name in tensors if ".mlp.experts." in name}:
        for part in ("gate_proj", "up_proj", "down_proj"):
            out[f"{layer}.mlp.switch_mlp.{part}.weight"] = stack(tensors, f"{layer}.mlp.experts", part)
    return out


def stack(tensors: Tensors, prefix: str, part: str) -> mx.array:
    count = len({name for name in tensors if name.startswith(prefix + ".") and name.endswith(f".{part}.weight")})
    return mx.stack([tensors[f"{prefix}.{expert}.{part}.weight"] for expert in range(count)])


@pytest.mark.parametrize("change", [fused_experts, mlx_experts])
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
def test_experts_in_every_layout(name: str, change: Callable[[Tensors], Tensors]) -> None:
    golden = Golden.load(FIXTURES / name)
    logits, _ = model_of(golden.config, change(golden.tensors))(golden.row(1))
    assert difference(logits, golden.logits(1)) < TOLERANCE


def test_packed_experts() -> None:
    """Quantised stacks of MLX checkpoints, in prefill (sorted) and decoding."""
    golden = Golden.load(FIXTURES / "qwen3_5_moe")
    source, rounded = {}, {}
    for name, array in mlx_experts(golden.tensors).items():
        rounded[name] = source[name] = array
        if ("switch_mlp" in name or "shared_expert." in name) and array.shape[-1] % 32 == 0:
            packed = mx.quantize(array, group_size=32, bits=4)
            stem = name.removesuffix("weight")
            source |= {stem + part: a for part, a in zip(("weight", "scales", "biases"), packed, strict=True)}
            rounded[name] = mx.dequantize(*packed, group_size=32, bits=4)
    plan = plan_of(golden.config, source)
    stems = {t.name.removesuffix(".scales") for t in plan.targets if t.name.endswith(".scales")}
    assert any("experts" in stem for stem in stems)
    model = Model(plan.spec, {t.name: t.read() for t in plan.targets}, dict.fromkeys(stems, QuantSpec(4, 32)))
    plain = model_of(golden.config, rounded)
    ids = golden.row(0)
    assert ids.size * 2 > _SORTED_FROM
    expected, _ = plain(ids)
    assert difference(model(ids)[0], expected) < TOLERANCE
    _, state = model(ids[:, :-1])
    assert difference(model(ids[:, -1:], state)[0], expected[:, -1:]) < TOLERANCE


def kimi_hub(config: dict[str, Any]) -> dict[str, Any]:
    """The hub's spelling of a Kimi Linear config: a part of its own for the linear layers, counted from one."""
    renamed = {
        k: v for k, v in config.items() if not k.startswith("linear_") and k not in ("layer_types", "mlp_layer_types")
    }
    kinds = config["layer_types"]
    renamed["linear_attn_config"] = {
        "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"],
        "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"],
        "head_dim": config["linear_head_dim"],
        "num_heads": config["linear_num_heads"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
    }
    return renamed | {"mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"}


@pytest.mark.parametrize("name", ["kimi_linear", "kimi_linear-ranks"])
def test_kimi_in_the_hubs_spelling(name: str) -> None:
    golden = Golden.load(FIXTURES / name)
    dense = {f"block_sparse_moe.{p}_proj": f"mlp.{p}_proj" for p in ("gate", "up", "down")}
    tensors = {}
    for key, array in golden.tensors.items():
        key = next((key.replace(old, new) for old, new in dense.items() if old in key), key)
        tensors[key] = array.reshape(1, 1, -1, 1) if key.endswith("A_log") else array
    config = kimi_hub(golden.config)
    assert difference(model_of(config, tensors)(golden.row(1))[0], golden.logits(1)) < TOLERANCE
    config["linear_attn_config"]["kda_layers"].pop()
    with pytest.raises(CheckpointError, match="do not name every layer once"):
        find(config).spec(config)


def test_olmo_in_transformers_spelling() -> None:
    golden = Golden.load(FIXTURES / "olmo_hybrid")
    rename = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    tensors = {}
    for key, array in golden.tensors.items():
        for old, new in rename.items():
            key = key.replace(old, new)
        tensors[key] = array
    for layer in {key.split("q_conv1d")[0] for key in golden.tensors if "q_conv1d" in key}:
        parts = [tensors.pop(f"{layer}{p}_conv1d.weight") for p in "qkv"]
        tensors[f"{layer}conv1d.weight"] = mx.concatenate(parts)
    assert difference(model_of(golden.config, tensors)(golden.row(1))[0], golden.logits(1)) < TOLERANCE


def test_ling_layers_and_architectures() -> None:
    golden = Golden.load(FIXTURES / "bailing_hybrid")
    beyond = {f"model.layers.4.{part}": mx.zeros((2,)) for part in ("attention.q_proj.weight", "eh_proj.weight")}
    plan = plan_of(golden.config, golden.tensors | beyond)
    assert sorted(name for name, _ in plan.dropped) == sorted(beyond)
    assert plan.notices == ["dropped 2 MTP tensors (multi-token prediction head)"]
    derived = {k: v for k, v in golden.config.items() if k != "layer_types"}
    assert find(derived).spec(derived) == plan.spec
    unheard = golden.config | {"architectures": ["BailingMoeV9ForCausalLM"]}
    with pytest.raises(UnsupportedError, match="BailingMoeV9ForCausalLM"):
        find(unheard)
    assert find(golden.config | {"architectures": ["BailingMoeV2_5ForCausalLM"]}) is not find(golden.config)
    with pytest.raises(UnsupportedError, match="layer_group_size"):
        find(derived).spec(derived | {"layer_group_size": 3})


@pytest.mark.parametrize("name", ["bailing_moe_linear", "bailing_moe_v2_5"])
def test_ring_as_mlx_tools_write_it(name: str) -> None:
    golden = Golden.load(FIXTURES / name)
    tensors = {}
    for key, array in golden.tensors.items():
        if ".experts." not in key:
            tensors[key.replace("mlp.gate.weight", "mlp.gate.gate_proj.weight")] = array
    for layer in {key.split(".experts.")[0] for key in golden.tensors if ".experts." in key}:
        for part in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{layer}.switch_mlp.{part}.weight"] = stack(golden.tensors, f"{layer}.experts", part)
    for key in [key for key in tensors if key.endswith("kv_b_proj.weight")]:
        expanded = tensors.pop(key).reshape(golden.config["num_attention_heads"], -1, golden.config["kv_lora_rank"])
        keys, values = mx.split(expanded, [golden.config["qk_nope_head_dim"]], axis=1)
        tensors[key.replace("kv_b_proj", "embed_q")] = keys.swapaxes(-1, -2)
        tensors[key.replace("kv_b_proj", "unembed_out")] = values
    tensors["model.layers.4.attention.g_proj.weight"] = mx.zeros((2, 2))  # of the layer that predicts further ahead
    plan = plan_of(golden.config, tensors)
    assert plan.notices == ["dropped 1 MTP tensors (multi-token prediction head)"]
    logits, _ = Model(plan.spec, {t.name: t.read() for t in plan.targets})(golden.row(1))
    assert difference(logits, golden.logits(1)) < TOLERANCE


@pytest.mark.parametrize("key", ["mla_use_nope", "moe_router_activation_func", "attention_bias", "moe_layer_freq"])
def test_kimi_keys_that_change_the_mathematics_are_refused(key: str) -> None:
    config = Golden.load(FIXTURES / "kimi_linear").config
    other = {
        "mla_use_nope": False,
        "moe_router_activation_func": "softmax",
        "attention_bias": True,
        "moe_layer_freq": 2,
    }
    with pytest.raises(UnsupportedError, match=key):
        find(config).spec(config | {key: other[key]})


@pytest.mark.parametrize("name", ["kimi_linear", "bailing_hybrid", "kimi_linear-ranks"])
@pytest.mark.parametrize("first", [1, 1000])
def test_latent_attention_expanded_or_not_is_the_same(monkeypatch: pytest.MonkeyPatch, name: str, first: int) -> None:
    """Also behind remembered latents, and in padded batches."""
    monkeypatch.setattr(latent, "_EXPAND_FROM", first)
    golden = Golden.load(FIXTURES / name)
    model = model_of(golden.config, golden.tensors)
    one, state = model(golden.row(0)[:, :30])
    two, _ = model(golden.row(0)[:, 30:], state)
    assert difference(mx.concatenate([one, two], axis=1), golden.logits(0)) < TOLERANCE
    both, _ = model(golden.expected["ids"], lengths=golden.lengths)
    assert difference(both[1:, : golden.lengths[1]], golden.logits(1)) < TOLERANCE


def test_routing_prefers_groups_and_corrected_scores() -> None:
    """Checked against the definition, one token at a time."""
    spec = MoeSpec(8, 2, 4, score="sigmoid", correction=True, groups=4, groups_kept=2, normalized=True, factor=1.5)
    router, correction = mx.random.normal((8, 6), key=mx.random.key(1)), mx.random.normal((8,), key=mx.random.key(2))
    arrays = {"router.weight": router, "correction": correction}
    arrays |= {f"experts.{n}.weight": mx.zeros((8, 4, 6) if n != "down" else (8, 6, 4)) for n in ("gate", "up", "down")}
    x = mx.random.normal((50, 6), key=mx.random.key(3))
    indices, weights = Moe(spec, Params(arrays, {})).route(x @ router.T)
    scores = mx.sigmoid(x @ router.T)
    for token in range(50):
        wanted = (scores[token] + correction).tolist()
        strength = [sum(wanted[2 * g : 2 * g + 2]) for g in range(4)]
        groups = sorted(range(4), key=lambda g: -strength[g])[:2]
        best = sorted((e for e in range(8) if e // 2 in groups), key=lambda e: -wanted[e])[:2]
        assert sorted(indices[token].tolist()) == sorted(best)
        chosen = [scores[token, e].item() for e in indices[token].tolist()]
        assert difference(weights[token], mx.array([1.5 * c / sum(chosen) for c in chosen])) < 1e-6


@pytest.mark.parametrize("better", [0, 1])
def test_an_exact_router_tells_experts_apart_that_half_precision_does_not(better: int) -> None:
    """Two experts whose logits, near 16, differ by 1/256: bfloat16 has steps of 1/8 there."""
    router = mx.full((2, 32), 0.5)
    router[better, 0] += 2**-8
    arrays = {"router.weight": router}
    arrays |= {f"experts.{n}.weight": mx.ones((2, 4, 32)) for n in ("gate", "up")}
    arrays["experts.down.weight"] = mx.stack([mx.full((32, 4), float(expert)) for expert in range(2)])
    moe = Moe(MoeSpec(2, 1, 4, exact_router=True), Params({k: a.astype(mx.bfloat16) for k, a in arrays.items()}, {}))
    y = moe(mx.ones((1, 1, 32), dtype=mx.bfloat16))  # expert 0 answers 0, expert 1 something large
    assert (float(mx.abs(y).max()) > 1) == (better == 1)
