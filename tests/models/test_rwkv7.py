"""RWKV-7 under its other names: the first version of fla's, and BlinkDL's bare `.pth` files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlxlin.backend import mx
from mlxlin.convert import convert_checkpoint
from mlxlin.errors import CheckpointError, UnsupportedError
from mlxlin.layerwise import Layerwise
from mlxlin.loader import load_model, open_path
from mlxlin.models import find, parameters
from tests.convert.test_formats_pickles import save_torch
from tests.models.golden import FIXTURES, TOLERANCE, Golden, difference, model_of, plan_of

_MIXES = "rwkvag"
_BLINK = {
    "model.embeddings.": "emb.",
    "model.norm.": "ln_out.",
    "model.layers.": "blocks.",
    ".pre_norm.": ".ln0.",
    ".attn_norm.": ".ln1.",
    ".ffn_norm.": ".ln2.",
    ".attn.": ".att.",
    ".r_proj.": ".receptance.",
    ".k_proj.": ".key.",
    ".v_proj.": ".value.",
    ".o_proj.": ".output.",
    ".g_norm.": ".ln_x.",
    "_lora.lora.2.bias": "0",
    "_lora.lora.0.weight": "1",
    "_lora.lora.2.weight": "2",
}


def golden() -> Golden:
    """A checkpoint whose norms are the plain ones that BlinkDL's program uses too."""
    return Golden.load(FIXTURES / "rwkv7-norms")


def blink(tensors: dict[str, mx.array]) -> dict[str, np.ndarray]:
    """The same weights as BlinkDL's training program saves them."""
    found = {}
    for name, tensor in tensors.items():
        for old, new in _BLINK.items():
            name = name.replace(old, new)
        array = np.array(tensor.T if name[-3:] in (f".{part}{n}" for part in "wavg" for n in "12") else tensor)
        part = name.rpartition(".")[2]
        vector = array.ndim == 1 and ".att." in name and "ln_x" not in name
        found[name] = array.reshape(1, 1, -1) if vector or part.startswith("x_") else array
    found["head.weight"] = found["emb.weight"]
    width = found["emb.weight"].shape[1]
    # Written by the training program, read by nobody.
    found |= {"blocks.0.att.v0": np.ones((1, 1, width), np.float32), "blocks.0.att.v1": np.ones((width, 4), np.float32)}
    return found | {"blocks.0.att.v2": np.ones((4, width), np.float32)}


def test_a_bare_pth_equals_the_source(tmp_path: Path) -> None:
    held = golden()
    save_torch(tmp_path / "rwkv7.pth", blink(held.tensors))
    model = load_model(tmp_path / "rwkv7.pth")
    assert (model.spec.width, len(model.spec.layers)) == (32, 2)
    for row in range(2):
        logits, _ = model(held.row(row))
        assert logits is not None and difference(logits, held.logits(row)) < TOLERANCE
    prepared = open_path(tmp_path / "rwkv7.pth")
    assert {name for name, _ in prepared.dropped} == {f"blocks.0.att.v{n}" for n in range(3)}
    convert_checkpoint(tmp_path / "rwkv7.pth", tmp_path / "out")
    again, _ = load_model(tmp_path / "out")(held.row(0))
    assert mx.array_equal(again, model(held.row(0))[0])


def test_a_pth_of_something_else_has_no_config(tmp_path: Path) -> None:
    save_torch(tmp_path / "other.pth", {"emb.weight": np.ones((4, 4), np.float32)})
    with pytest.raises(CheckpointError, match="model_type"):
        load_model(tmp_path / "other.pth")


def test_mixes_in_one_tensor_as_the_first_version_saved_them() -> None:
    held = golden()
    tensors = dict(held.tensors)
    for layer in range(2):
        at = f"model.layers.{layer}.attn."
        tensors[at + "x_x"] = mx.concatenate([tensors.pop(f"{at}x_{name}")[0] for name in _MIXES])
    logits, _ = model_of(held.config, tensors)(held.row(0))
    assert logits is not None and difference(logits, held.logits(0)) < TOLERANCE


def test_layer_by_layer_equals_the_whole_model() -> None:
    held = golden()
    ids = [int(t) for t in held.row(1)[0]]
    layerwise = Layerwise(open_path(FIXTURES / "rwkv7-norms"), ids)
    x = layerwise.embed()
    for index in range(2):
        y = layerwise.layer(index, x)
        layerwise.layer(index, x * 0, layerwise.items(index))  # trying a layer out leaves nothing behind
        x = y
    assert difference(layerwise.logits(x)[None], held.logits(1)) < TOLERANCE


def test_what_would_change_the_mathematics_is_refused() -> None:
    config = golden().config
    for key, value in {"attn": {"layers": [1]}, "hidden_act": "relu", "norm_bias": False, "norm_first": False}.items():
        with pytest.raises(UnsupportedError, match=key):
            find(config).spec({**config, key: value})
    with pytest.raises(CheckpointError, match="value_dim"):
        find(config).spec({**config, "value_dim": 64})


def test_ranks_the_config_leaves_open() -> None:
    """Absent ones have fixed defaults, null ones grow with the width (fla's RWKV7Config and RWKV7Attention)."""
    config = {"model_type": "rwkv7", "hidden_size": 2048, "num_hidden_layers": 2, "vocab_size": 8}
    names = [f"{name}_low_rank_dim" for name in ("decay", "a", "v", "gate")]
    for given, expected in ((config, (64, 64, 16, 128)), (config | dict.fromkeys(names), (128, 128, 64, 224))):
        mixer = find(given).spec(given).layers[1].mixer
        assert mixer.kind == "rwkv7"
        assert (mixer.decay_rank, mixer.rate_rank, mixer.value_rank, mixer.gate_rank) == expected


def test_low_rank_projections_are_gates() -> None:
    held = golden()
    table = parameters(plan_of(held.config, held.tensors).spec)
    roles = {name: parameter.role for name, parameter in table.items() if name.startswith("layers.1.mixer.")}
    gates = {f"layers.1.mixer.{n}{o}.weight" for n in ("decay", "rate", "value", "gate") for o in ("", "_out")}
    assert {name for name, role in roles.items() if role == "gate"} == gates
