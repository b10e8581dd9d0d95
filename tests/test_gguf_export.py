"""benchmarks/gguf_export.py: the layout in which llama.cpp wants the weights of a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import gguf_export
from benchmarks.gguf_export import SECTIONS, arrange, describe, own_part, renamed, tensors, text_config, tiled
from mlxlin.backend import mx
from mlxlin.bench import Local, same_tokens
from mlxlin.loader import load_model
from mlxlin_cli.peer import Worker, environment
from tests.convert.checkpoints import CONFIG, Weights, save, weights

KEY_HEADS, VALUE_HEADS, SIZE = (
    CONFIG[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "key_head_dim")
)


def mixed(own: Weights, x: np.ndarray, key_head: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """Everything in a linear layer that depends on the order of heads and channels, for one token `x`.

    Args:
        own: the layer's weights.
        key_head: which key head each value head belongs to.
        decay: of each value head, its step size not yet in it.
    """
    channels = own["in_proj_qkv.weight"] @ x * own["conv1d.weight"].reshape(len(own["conv1d.weight"]), -1)[:, -1]
    q, k, v = np.split(channels, [KEY_HEADS * SIZE, 2 * KEY_HEADS * SIZE])
    q, k, v = q.reshape(-1, SIZE)[key_head], k.reshape(-1, SIZE)[key_head], v.reshape(-1, SIZE)
    factor = (own["in_proj_a.weight"] @ x + own["dt_bias"]) * decay * (own["in_proj_b.weight"] @ x)
    z = (own["in_proj_z.weight"] @ x).reshape(-1, SIZE)
    y = (q * k).sum(axis=1, keepdims=True) * v * factor[:, None] * own["norm.weight"] * z
    return own["out_proj.weight"] @ y.ravel()


def test_tiled_and_grouped_heads_are_the_same_layer() -> None:
    prefix = "model.layers.0.linear_attn."
    grouped = {name.removeprefix(prefix): value for name, value in weights().items() if name.startswith(prefix)}
    there = {name: arrange(f"linear_attn.{name}", value, CONFIG) for name, value in grouped.items()}
    x = np.random.default_rng(1).standard_normal(CONFIG["hidden_size"]).astype(np.float32)
    heads = np.arange(VALUE_HEADS)
    ours = mixed(grouped, x, heads // (VALUE_HEADS // KEY_HEADS), -np.exp(grouped["A_log"]))
    np.testing.assert_allclose(mixed(there, x, heads % KEY_HEADS, there["A_log"]), ours, rtol=1e-4, atol=1e-5)
    assert list(tiled(KEY_HEADS, VALUE_HEADS)) == [0, 2, 1, 3]
    assert there["conv1d.weight"].shape == (256, 4)


def test_norms_carry_their_one_but_for_the_gated_one() -> None:
    norms = {own_part(name): value for name, value in weights().items() if name.endswith("norm.weight")}
    raised = {name for name, value in norms.items() if np.array_equal(arrange(name, value, CONFIG), value + 1)}
    assert norms.keys() - raised == {"linear_attn.norm.weight"} and len(raised) == 5
    gated = norms["linear_attn.norm.weight"]
    assert arrange("linear_attn.norm.weight", gated, CONFIG) is gated


def test_every_tensor_has_its_own_name_there_with_or_without_a_model_around_it(tmp_path: Path) -> None:
    raw = weights()
    found = dict(tensors(save(tmp_path, raw), CONFIG))
    assert len(found) == len(raw) and {"blk.0.ssm_a", "blk.3.attn_q.weight", "output.weight"} < found.keys()
    outer = {name: f"model.language_model.{name.removeprefix('model.')}" for name in raw if name != "lm_head.weight"}
    assert all(renamed(inside) == renamed(name) for name, inside in outer.items())
    assert renamed("model.visual.blocks.0.norm1.weight") is None and renamed("mtp.fc.weight") is None


class Written(dict[str, object]):
    """Stands in for gguf's writer: keeps what it is told."""

    def __getattr__(self, name: str):
        return lambda value: self.__setitem__(name, value)


def test_metadata_follow_the_config() -> None:
    found = Written()
    describe(found, CONFIG)
    assert found["add_ssm_inner_size"] == 128 and found["add_rope_dimension_count"] == 8
    assert found["add_rope_dimension_sections"] == (*SECTIONS, 0)
    assert len(found["add_token_list"]) == CONFIG["vocab_size"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"linear_value_head_dim": 16}, "of one size"),
        ({"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}, "n-th"),
    ],
)
def test_what_the_architecture_cannot_express_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        describe(Written(), {**CONFIG, **changes})


def test_another_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mamba2 is no dense Qwen3.5"):
        text_config(save(tmp_path, {}, {"model_type": "mamba2"}))


@pytest.mark.peers
def test_llama_cpp_continues_as_we_do(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    folder = save(tmp_path, weights())
    script = Path(gguf_export.__file__).with_name("llama_peer.py")
    ours = Local(load_model(folder, dtype=mx.float32))
    with Worker("llama.cpp", [sys.executable, str(script), str(folder), "f32", "128"], environment()) as theirs:
        assert same_tokens([ours, theirs], CONFIG["vocab_size"]) == {"mlxlin": 32, "llama.cpp": 32}
        here, there = (subject.trial(list(range(40)), 5, [7, 8, 9]) for subject in (ours, theirs))
    assert here.tokens == there.tokens and len(there.token_seconds) == 5 and there.reused_tokens == 0
    assert (here.state_bytes, here.kv_bytes) == (there.state_bytes, there.kv_bytes)
