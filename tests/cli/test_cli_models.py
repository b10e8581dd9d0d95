"""`convert`, `info` and `models`, on the shipped model."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import mlxlin
from mlxlin import check
from tests.convert.checkpoints import save, weights


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A home and a hub cache of this test's own, no network, its own working folder."""
    monkeypatch.setenv("MLXLIN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def hub_copy(folder: Path, repo: str) -> Path:
    """The shipped model as if it had been downloaded as `repo`."""
    commit = "0" * 40
    place = folder / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = place / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    for file in (Path(mlxlin.__file__).parent / "demo").iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    return place


def test_a_conversion_says_what_became_of_everything(cli, tmp_path: Path) -> None:
    result = cli("convert", "demo", "-q", "4")
    assert result.code == 0 and result.err == ""
    assert "Written to demo-4bit" in result.out and "4-bit affine, groups of 64" in result.out
    assert "every tensor of the source was used" in result.out
    recipe = "4-bit affine, groups of 64; gates of the state 8-bit affine, groups of 64; vectors as they are"
    assert f"recipe: {recipe}" in result.out
    assert (tmp_path / "demo-4bit" / "mlxlin.json").is_file()
    assert str(tmp_path / "demo-4bit") in cli("models").out
    again = cli("convert", "demo-4bit", "copy")
    assert "copied" in again.out and (tmp_path / "copy" / "mlxlin.json").is_file()


def test_a_dry_run_names_every_tensor_and_writes_nothing(cli, tmp_path: Path) -> None:
    result = cli("convert", "demo", "-q", "4", "--dry-run")
    assert result.code == 0 and "Nothing was written" in result.out
    assert "model.layers.0.linear_attn.A_log" in result.out and "layers.0.mixer.A_log, float32" in result.out
    assert re.search(r"model.embed_tokens.weight +embed, 4-bit affine, groups of 64 +\d+ kB", result.out)
    assert not list(tmp_path.glob("demo*"))


def test_what_is_dropped_is_said_once(cli, tmp_path: Path) -> None:
    save(tmp_path / "x", {**weights(), "mtp.fc.weight": np.ones((2, 2), np.float32)})
    for options in (["--dry-run"], ["out"]):
        assert cli("convert", "x", *options).err.count("MTP") == 1


@pytest.mark.parametrize("how", [["-q", "mxfp4"], ["-q", "mixed-3-6"], ["-q", "4", "--group-size", "32"]], ids=str)
def test_whatever_a_conversion_can_do_is_done_on_load_too(cli, how: list[str], tmp_path: Path) -> None:
    assert cli("convert", "demo", "out", *how).code == 0
    converted, direct = cli("info", "out"), cli("info", "demo", *how)
    stored = [re.search(r"^weights .*$", result.out, re.MULTILINE) for result in (converted, direct)]
    assert stored[0] is not None and stored[1] is not None and stored[0][0] == stored[1][0]
    said = [cli("generate", "hi", "-n", "4", "--temp", "0", *o).out for o in (["-m", "out"], ["-m", "demo", *how])]
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "arguments",
    [["nowhere"], ["demo", "--group-size", "64"], ["demo", "-q", "7"], ["demo", "-q", "4", "--recipe", "mxfp4"]],
)
def test_a_conversion_that_cannot_be_is_two_lines(cli, arguments: list[str], tmp_path: Path) -> None:
    result = cli("convert", *arguments)
    assert (result.code, result.out) == (1, "") and len(result.err.splitlines()) == 2
    assert not list(tmp_path.glob("*bit")) and not list(tmp_path.glob("*-mlxlin"))


def test_bits_within_a_target_and_a_check(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check, "TOKENS", 48)
    result = cli("convert", "demo", "out", "-q", "3", "--target-kl", "0.1", "--check")
    assert result.code == 0 and (tmp_path / "out" / "mlxlin.json").is_file()
    met, checked = re.findall(r"divergence (0\.\d{4}) nats", result.out)
    assert met == checked and 0 < float(met) <= 0.1
    assert "3-bit affine" in result.out and re.search(r"perplexity \d+\.\d+ -> \d+\.\d+", result.out)


def test_options_that_contradict_each_other_are_wrong_usage(cli) -> None:
    assert cli("convert", "demo", "--check", "--dry-run").code == 2


def test_what_is_not_ours_is_not_overwritten(cli, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    assert cli("convert", "demo", "mine").code == 1
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("arguments", [["info"], ["info", "demo"], ["-m", "demo", "info"], ["info", "-m", "demo"]])
def test_info_tells_model_memory_and_machine(cli, arguments: list[str]) -> None:
    result = cli(*arguments)
    assert result.code == 0 and result.err == ""
    for words in (
        "gated_delta",
        "attention",
        "2.67 M",
        "per token",
        "8,192",
        "Fits",
        "MLX",
        "chunkwise",
        "3 x two kernels",
    ):
        assert words in result.out


def test_info_of_a_model_that_does_not_fit(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxlin.description.available_bytes", lambda: 5_000_000)
    assert re.search(r"Does not fit: it needs \d+\.\d+ MB, 5 MB are free\.", cli("info").out)
    found = mlxlin.describe("demo")
    monkeypatch.setattr("mlxlin.description.available_bytes", lambda: found.bytes_at(648))
    assert "Fits up to 648 of its 8,192 tokens" in cli("info").out


def test_models_lists_the_hub_cache_and_says_what_runs(cli, tmp_path: Path) -> None:
    hub_copy(tmp_path, "someone/tiny")
    broken = hub_copy(tmp_path, "someone/other")
    for config in broken.glob("snapshots/*/config.json"):
        config.write_text('{"model_type": "nothing_we_know"}')
    rows = {line.split()[0]: line for line in cli("models", "list").out.splitlines()}
    assert rows["someone/tiny"].endswith("yes") and rows["demo"].endswith("yes")
    assert "nothing_we_know" in rows["someone/other"]


def test_models_are_removed_by_name_only_when_confirmed(cli, tmp_path: Path) -> None:
    place = hub_copy(tmp_path, "someone/tiny")
    cli("convert", "demo", "converted")
    assert cli("models", "rm", "someone/tiny").code == 2 and place.exists()
    assert "Removed someone/tiny" in cli("models", "rm", "someone/tiny", "--yes").err and not place.exists()
    assert cli("models", "rm", "converted", "-y").code == 0 and not (tmp_path / "converted").exists()
    assert "someone/tiny" not in cli("models").out and "converted" not in cli("models").out
    missing = cli("models", "rm", "demo", "-y")
    assert missing.code == 1 and "is part of mlxlin" in missing.err and len(missing.err.splitlines()) == 2


def test_a_folder_that_only_looks_like_ours_is_never_removed(cli, tmp_path: Path) -> None:
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "mlxlin.json").write_text("{}")
    assert cli("models", "rm", "stranger", "-y").code == 1 and (tmp_path / "stranger").exists()


def test_suggestions_fit_the_machine(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mlxlin.__dict__, "describe_backend", lambda: {"memory_bytes": 16 * 10**9})
    lines = cli("models", "suggest").out.splitlines()
    assert any(line.startswith("qwen3.5-9b") and "-q 8" in line for line in lines)
    assert not any(line.startswith("qwen3.5-35b") for line in lines)
    monkeypatch.setitem(mlxlin.__dict__, "describe_backend", lambda: {"memory_bytes": 10**6})
    assert "None of the models" in cli("models", "suggest").err
