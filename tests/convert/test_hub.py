"""Models from the hub, against a hub of our own on 127.0.0.1: resume, offline, refusals, only the files needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

import mlxlin
from mlxlin.convert import convert_checkpoint, hub
from mlxlin.convert.hub import requests, transfer
from mlxlin.convert.manifest import read_manifest
from mlxlin.convert.resolve import resolve
from mlxlin.errors import CheckpointError, HubError, InputError, ResourceError, UnsupportedError
from tests.convert.checkpoints import bf16, bytes_of, logits, same, save, weights
from tests.convert.fake_hub import COMMIT, Hub, serve
from tests.convert.test_formats_pickles import save_torch
from tests.tokenizer_folders import byte_level, write

REPO = "owner/tiny"
SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transfer, "_RETRIES", 1)
    with serve() as running:
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        folder = save(tmp_path / "origin", weights(), shards=2)
        write(folder, byte_level())
        (folder / "modeling_tiny.py").write_text("raise SystemExit")
        (folder / "model.gguf").write_bytes(b"GGUF" * 5000)
        (folder / "original").mkdir()
        (folder / "original" / "consolidated.pth").write_bytes(b"x" * 9000)
        running.add(REPO, folder)
        yield running


def test_only_the_files_needed_are_downloaded_and_the_model_is_the_same(server: Hub, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    folder = hub.fetch(REPO, progress=lambda done, total: seen.append((done, total)))
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors.index.json", *SHARDS}
    assert same(logits(REPO), logits(tmp_path / "origin"))
    total = sum((folder / name).stat().st_size for name in names)
    assert seen[-1] == (total, total) and [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_b65_a_download_cut_at_60_percent_continues_in_the_next_run(server: Hub, tmp_path: Path) -> None:
    server.cut_after, server.cuts_left = 0.6, 1000
    with pytest.raises(HubError, match="cannot be reached for owner/tiny") as caught:
        hub.fetch(REPO)
    server.cuts_left = 0
    assert "continues" in caught.value.hint
    assert not any((tmp_path / "cache").rglob("snapshots/*/*.safetensors"))
    first = len(server.requests)
    folder = hub.fetch(REPO)
    origin = tmp_path / "origin"
    ranges = [span for _, _, span in server.requests[first:] if span]
    expected = {f"bytes={int(0.6 * (origin / name).stat().st_size)}-" for name in SHARDS}
    assert ranges and set(ranges) <= expected
    for name in SHARDS:
        assert (folder / name).read_bytes() == (origin / name).read_bytes()
    assert not list((tmp_path / "cache").rglob("*-part"))


def test_b65_a_cut_within_one_run_is_retried_with_a_range(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_RETRIES", 4)
    server.cut_after, server.cuts_left = 0.5, 2
    hub.fetch(REPO)
    assert any(span for name in SHARDS for span in server.asked(name))


def test_b65_a_server_without_ranges_sends_it_all_again(server: Hub, tmp_path: Path) -> None:
    server.cut_after, server.cuts_left = 0.6, 1000
    with pytest.raises(HubError):
        hub.fetch(REPO)
    server.cuts_left, server.ranges = 0, False
    folder = hub.fetch(REPO)
    assert (folder / SHARDS[0]).read_bytes() == (tmp_path / "origin" / SHARDS[0]).read_bytes()


def test_b65_when_one_file_fails_what_arrived_of_the_others_is_kept(server: Hub, tmp_path: Path) -> None:
    server.broken, server.slow = SHARDS
    with pytest.raises(HubError, match="error 500"):
        hub.fetch(REPO)
    server.broken = server.slow = ""
    folder = hub.fetch(REPO)
    size = (tmp_path / "origin" / SHARDS[1]).stat().st_size
    first, second = server.asked(SHARDS[1])
    assert first is None and second is not None and int(second.removeprefix("bytes=").rstrip("-")) >= size // 2
    for name in SHARDS:
        assert (folder / name).read_bytes() == (tmp_path / "origin" / name).read_bytes()


def test_b65_a_damaged_download_is_noticed_and_removed(server: Hub, tmp_path: Path) -> None:
    server.corrupt = True
    with pytest.raises(HubError, match="model-0000[12]-of-00002.safetensors was damaged"):
        hub.fetch(REPO)
    assert not list((tmp_path / "cache").rglob("snapshots/*/*.safetensors"))
    server.corrupt = False
    assert same(logits(REPO), logits(tmp_path / "origin"))


def test_b64_offline_uses_the_cache_without_a_request(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fetch(REPO)
    server.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert same(logits(REPO), logits(tmp_path / "origin"))
    assert mlxlin.describe(REPO).spec.vocab == 128
    assert server.requests == []
    for action in (resolve, mlxlin.describe):
        with pytest.raises(HubError, match="owner/other has not been downloaded, and HF_HUB_OFFLINE is set"):
            action("owner/other")
    blob = next((tmp_path / "cache").rglob(f"snapshots/*/{SHARDS[1]}"))
    blob.unlink()
    with pytest.raises(HubError, match=f"incomplete.*{SHARDS[1]}"):
        resolve(REPO)
    assert server.requests == []


def test_b64_offline_by_environment_in_a_fresh_process(server: Hub, tmp_path: Path) -> None:
    program = f"from mlxlin.loader import load_model; print(load_model({REPO!r}).parameter_count)"
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
    runs = []
    for offline in ("0", "1"):
        server.requests.clear()
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**environment, "HF_HUB_OFFLINE": offline},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        runs.append((done.stdout, len(server.requests)))
    assert runs[0][0] == runs[1][0] and runs[0][1] > 0 and runs[1][1] == 0


def test_b64_without_a_connection_the_cached_copy_is_used_and_said(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fetch(REPO)
    for broken in ("unreachable", "server error"):
        if broken == "unreachable":
            monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        else:
            monkeypatch.setattr(constants, "ENDPOINT", server.url)
            server.status = 502
        notices: list[str] = []
        assert hub.fetch(REPO, notice=notices.append).name == COMMIT
        assert len(notices) == 1 and "downloaded before is used" in notices[0]
        with pytest.raises(HubError):
            hub.fetch("owner/other", notice=notices.append)


def test_a_pinned_commit_that_is_complete_needs_no_request(server: Hub) -> None:
    hub.fetch(REPO, COMMIT)
    server.requests.clear()
    assert hub.fetch(REPO, COMMIT).name == COMMIT and server.requests == []
    assert hub.fetch(REPO, "v1").name == COMMIT
    with pytest.raises(HubError, match="no revision 'v9'"):
        hub.fetch(REPO, "v9")


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ((403, "GatedRepo"), "owner/tiny is gated"),
        ((401, "GatedRepo"), "owner/tiny is gated"),
        ((403, ""), r"refuses access to owner/tiny \(403\)"),
        ((429, ""), "too many requests"),
        ((500, ""), "error 500"),
    ],
)
def test_refusals_are_explained(server: Hub, refusal: tuple[int, str], message: str) -> None:
    server.repositories[REPO].refusal = refusal
    with pytest.raises(HubError, match=message) as caught:
        hub.fetch(REPO)
    assert caught.value.hint and "\n" not in caught.value.message + caught.value.hint


def test_a_copy_that_was_cut_in_the_cache_is_noticed_and_fetched_again(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub.fetch(REPO, COMMIT)
    for size in (100, (folder / SHARDS[1]).stat().st_size - 1):
        os.truncate(folder / SHARDS[1], size)
        with monkeypatch.context() as patch:
            patch.setattr(constants, "HF_HUB_OFFLINE", True)
            with pytest.raises(HubError, match=f"downloaded copy of {REPO} is incomplete.*{SHARDS[1]} is truncated"):
                resolve(REPO, COMMIT)
        assert same(logits(REPO, revision=COMMIT), logits(tmp_path / "origin"))


def test_a_model_that_does_not_exist(server: Hub) -> None:
    with pytest.raises(HubError, match="There is no folder owner/nothing here and no such model on the hub"):
        resolve("owner/nothing")


def test_an_empty_name_is_not_the_current_folder(server: Hub) -> None:
    with pytest.raises(CheckpointError, match="is empty"):
        mlxlin.load("")


@pytest.mark.parametrize("name", ["/no/such/dir", "a/b/c", "./here", "~/nothing-here", "x.gguf/y/z"])
def test_b64_a_path_that_does_not_exist_asks_nobody(server: Hub, name: str) -> None:
    with pytest.raises(CheckpointError, match="There is no such file or directory") as caught:
        mlxlin.load(name)
    assert "\n" not in caught.value.message and server.requests == []


def test_a_name_nobody_knows_suggests_the_nearest(server: Hub, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model called 'qwen3.5-4'") as caught:
        mlxlin.load("qwen3.5-4")
    assert "'qwen3.5-4b'" in caught.value.hint and server.requests == []
    for local in ("demo", tmp_path / "origin"):
        with pytest.raises(InputError, match="only hub ids have revisions"):
            resolve(local, "main")
        with pytest.raises(InputError, match="only hub ids have revisions"):
            mlxlin.describe(local, revision="main")


def test_describe_reads_heads_and_downloads_no_weights(server: Hub, tmp_path: Path) -> None:
    large = {name: bf16(array) for name, array in weights().items()}
    server.add("owner/one", save(tmp_path / "one", large))
    expected = mlxlin.describe(tmp_path / "one", bits=4)
    found = mlxlin.describe("owner/one", bits=4)
    assert (found.spec, found.parameter_count, found.kinds) == (expected.spec, expected.parameter_count, expected.kinds)
    assert found.path is None and expected.path == tmp_path / "one"
    spans = server.asked("model.safetensors")
    assert spans and all(span is not None and int(span.rpartition("-")[2]) < 70_000 for span in spans)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    report = convert_checkpoint("owner/one", dry_run=True, bits=4)
    assert report.nbytes == found.stored_bytes and report.out is None
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_header_longer_than_the_first_guess(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_HEAD", 64)
    assert (
        mlxlin.describe(REPO).parameter_count
        == mlxlin.describe(str(Path(constants.HF_HUB_CACHE).parent / "origin")).parameter_count
    )


def test_a_converted_model_records_its_origin(server: Hub, tmp_path: Path) -> None:
    convert_checkpoint(REPO, tmp_path / "out", bits=8)
    assert read_manifest(tmp_path / "out").source["repo"] == REPO
    assert read_manifest(tmp_path / "out").source["revision"] == COMMIT
    server.add("owner/converted", tmp_path / "out")
    assert mlxlin.describe("owner/converted").kinds == mlxlin.describe(tmp_path / "out").kinds
    with pytest.raises(InputError, match="already quantised"):
        mlxlin.describe("owner/converted", bits=4)
    convert_checkpoint("owner/converted", tmp_path / "again")
    assert bytes_of(tmp_path / "again") == bytes_of(tmp_path / "out")
    with pytest.raises(InputError, match="owner/converted is converted already"):
        convert_checkpoint("owner/converted", tmp_path / "other", bits=4)
    assert same(logits("owner/converted"), logits(tmp_path / "out"))


def test_pytorch_files_on_the_hub(server: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "pth"
    folder.mkdir()
    for name in ("a.pth", "b.pth"):
        save_torch(folder / name, weights())
    (folder / "config.json").write_text((tmp_path / "origin" / "config.json").read_text())
    server.add("owner/pth", folder)
    with pytest.raises(CheckpointError, match="holds several models: a.pth, b.pth"):
        mlxlin.load("owner/pth")
    expected = mlxlin.describe(folder / "a.pth")
    server.requests.clear()
    found = mlxlin.describe("owner/pth/a.pth")
    assert (found.spec, found.kinds, found.format) == (expected.spec, expected.kinds, "pytorch")
    assert all(span is not None for span in server.asked("a.pth")) and 0 < len(server.asked("a.pth")) <= 4
    assert not list((tmp_path / "cache").rglob("*.pth"))
    assert same(logits("owner/pth/b.pth"), logits(tmp_path / "origin"))
    with pytest.raises(CheckpointError, match="holds no file c.pth"):
        logits("owner/pth/c.pth")


def test_a_bare_pth_without_a_config_is_complete(server: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    save_torch(folder / "rwkv.pth", weights())
    server.add("owner/bare", folder)
    assert (hub.fetch("owner/bare") / "rwkv.pth").is_file()
    with pytest.raises(CheckpointError, match="model_type"):
        mlxlin.describe("owner/bare")


def test_only_foreign_formats_on_the_hub_are_refused_by_name(server: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    (folder / "model-q4.gguf").write_bytes(b"GGUF")
    server.add("owner/gguf", folder)
    with pytest.raises(UnsupportedError, match="GGUF"):
        resolve("owner/gguf")


def test_an_incomplete_repository_is_noticed(server: Hub) -> None:
    del server.repositories[REPO].files[SHARDS[1]]
    with pytest.raises(HubError, match=f"incomplete on the hub.*{SHARDS[1]}"):
        resolve(REPO)


def test_only_what_the_index_names_is_downloaded(server: Hub) -> None:
    server.repositories[REPO].files["model.safetensors"] = b"a consolidated copy"
    folder = hub.fetch(REPO)
    assert not (folder / "model.safetensors").exists() and server.asked("model.safetensors") == []


def test_a_cache_that_cannot_be_written_is_an_error_of_ours(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ResourceError, match="cannot be written"):
        hub.fetch(REPO)


def test_a_mirror_that_lists_names_only(server: Hub, tmp_path: Path) -> None:
    server.sizes = False
    assert mlxlin.describe(REPO).parameter_count == mlxlin.describe(tmp_path / "origin").parameter_count
    assert same(logits(REPO), logits(tmp_path / "origin"))


def test_a_listing_cannot_name_places_outside_the_cache(server: Hub, tmp_path: Path) -> None:
    files = server.repositories[REPO].files
    files["additional_chat_templates/../../../../../x.jinja"] = b"out"
    assert all(".." not in name for name in requests.look_up(REPO).files)
    folder = hub.fetch(REPO)
    assert not list(tmp_path.rglob("x.jinja")) and (folder / "config.json").is_file()


def test_the_listing_of_a_repository(server: Hub) -> None:
    listing = requests.look_up(REPO)
    content = json.loads(server.repositories[REPO].files["config.json"])
    assert listing.commit == COMMIT and content["model_type"] == "qwen3_5_text"
    assert listing.files["config.json"].digest is not None and len(listing.files["config.json"].digest) == 40
    assert len(listing.files[SHARDS[0]].digest or "") == 64
