"""Every family against its source live: other weights, other sizes and other tokens in each run.

The sources run in processes of their own: transformers must not see flash-linear-attention, whose kernels it would use.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlxlin.backend import mx
from tests.models.golden import TOLERANCE, Golden, difference, model_of
from tests.parity.cases import CASES

pytestmark = pytest.mark.parity
ROOT = Path(__file__).resolve().parents[2]
SEED = random.SystemRandom().randrange(1 << 30)


def missing(source: str) -> str:
    """Why a source cannot be run here; empty where it can."""
    if source == "mlx-lm":
        return "" if importlib.util.find_spec("mlx_lm") else "needs mlx-lm"
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        return "needs torch and transformers"
    if source == "fla" and not os.environ.get("MLXLIN_FLA"):
        return "MLXLIN_FLA does not name a folder with flash-linear-attention"
    return ""


@pytest.fixture(scope="module", params=["transformers", "fla", "mlx-lm"])
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint for each case of one source."""
    if why := missing(request.param):
        pytest.skip(why)
    folder = tmp_path_factory.mktemp(request.param)
    names = [name for name, case in CASES.items() if case.source == request.param]
    command = [sys.executable, "-W", "ignore", "-m", "tests.parity.sources", str(folder), *names]
    done = subprocess.run([*command, "--vary", "--seed", str(SEED)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"seed {SEED}: {done.stderr[-3000:]}"
    return folder


def test_live_checkpoints_equal_their_source(checkpoints: Path, subtests: pytest.Subtests) -> None:
    for folder in sorted(checkpoints.iterdir()):
        with subtests.test(case=folder.name, seed=SEED):
            compare(Golden.load(folder))


def compare(golden: Golden) -> None:
    """Prefill, split prefill and decoding, and a padded batch."""
    model = model_of(golden.config, golden.tensors)
    ids, cut = golden.row(0), random.Random(SEED).randrange(1, golden.lengths[0])
    whole, _ = model(ids)
    assert difference(whole, golden.logits(0)) < TOLERANCE
    first, state = model(ids[:, :cut])
    pieces = [first]
    for t in range(cut, ids.shape[1]):
        one, state = model(ids[:, t : t + 1], state)
        mx.eval(one, state.leaves())
        pieces.append(one)
    assert difference(mx.concatenate(pieces, axis=1), golden.logits(0)) < TOLERANCE, f"cut at {cut}"
    together, _ = model(golden.expected["ids"], lengths=golden.lengths)
    for row, length in enumerate(golden.lengths):
        assert difference(together[row : row + 1, :length], golden.logits(row)) < TOLERANCE


def test_the_shipped_model_predicts_as_in_transformers() -> None:
    if why := missing("transformers"):
        pytest.skip(why)
    import torch
    from transformers import AutoModelForCausalLM

    folder = ROOT / "mlxlin" / "demo"
    source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config, tensors = json.loads((folder / "config.json").read_text()), mx.load(str(folder / "model.safetensors"))
    model = model_of(config, {name: array.astype(mx.float32) for name, array in tensors.items()})
    ids = torch.randint(0, config["vocab_size"], (1, 400), generator=torch.Generator().manual_seed(SEED))
    with torch.no_grad():
        expected = source(ids).logits
    found, _ = model(mx.array(ids.numpy()).astype(mx.int32))
    assert difference(found, mx.array(expected.numpy())) < TOLERANCE * float(expected.abs().max())
    losses = [
        float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))
        for logits in (torch.from_numpy(np.array(found)), expected)
    ]
    assert abs(losses[0] - losses[1]) < 1e-5
