"""States on disk: prefixes shared by a machine's conversations, and named sessions, with several processes at them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mlxlin import archive
from mlxlin.backend import mx
from mlxlin.errors import ResourceError, SessionError
from mlxlin.store import PrefixStore, SessionStore
from mlxlin.timeline import Mark, Timeline
from tests.test_timeline import MODELS, Counting, assert_from_scratch, tokens


def test_b48_a_stored_prefix_is_found_by_another_process(tmp_path: Path) -> None:
    model = Counting(MODELS["hybrid"])
    shared = tokens(19, 200)
    store = PrefixStore(model.model.fingerprint, tmp_path)
    first = Timeline(model, store=store)  # type: ignore[arg-type]
    first.resume(shared + tokens(20, 20), marks=[Mark(200, "turn 1", shared=True)])
    model.read = 0
    second = Timeline(model, store=PrefixStore(model.model.fingerprint, tmp_path))  # type: ignore[arg-type]
    reuse = second.resume(shared + tokens(21, 30))
    assert (reuse.reused, model.read) == (200, 30) and "stored earlier" in reuse.why
    assert_from_scratch(second)
    other = PrefixStore("another model", tmp_path)
    assert other.find(shared, 0, model.model.fresh()) is None


def test_a_damaged_prefix_is_a_miss_and_goes(tmp_path: Path) -> None:
    model, text = MODELS["recurrent"], tokens(22, 100)
    store = PrefixStore("f", tmp_path)
    _, state = model([text])
    store.put(text, state)
    (path,) = tmp_path.glob("*/*.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert store.find(text, 0, model.fresh()) is None and not path.exists()


def test_the_store_keeps_to_its_budget_and_gives_up_the_oldest(tmp_path: Path) -> None:
    model = MODELS["recurrent"]
    texts = [tokens(30 + i, 100) for i in range(4)]
    states = [model([text])[1] for text in texts]
    size = sum(array.nbytes for array in states[0].arrays().values())
    store = PrefixStore("f", tmp_path, budget=int(size * 2.9))
    for age, (text, state) in enumerate(zip(texts, states, strict=True)):
        store.put(text, state)
        for path in tmp_path.glob("*/*.safetensors"):
            if path.stat().st_mtime > 10**6:
                os.utime(path, (age, age))
    assert [store.find(text, 0, model.fresh()) is not None for text in texts] == [False, False, True, True]


def test_sessions_are_listed_loaded_and_removed(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    store.save("my chat", {"a": mx.ones((2,))}, {"turns": []})
    assert [info.name for info in store.list()] == ["my chat"] and store.exists("my chat")
    assert store.load("my chat")[1]["turns"] == []
    with pytest.raises(SessionError, match="no session 'other'"):
        store.load("other")
    for bad in ("", "../up", ".hidden", "a/b", "tab\t"):
        with pytest.raises(SessionError, match="no name"):
            store.path(bad)
    store.remove("my chat")
    assert store.list() == []


def test_small_and_huge_prefixes_are_not_kept(tmp_path: Path) -> None:
    model, text = MODELS["hybrid"], tokens(40, 600)
    _, small = model([text[:100]])
    _, large = model([text])
    store = PrefixStore("f", tmp_path, budget=large.nbytes - 1)
    store.put(text[:63], small)
    assert not list(tmp_path.glob("*/*"))
    store.put(text[:100], small)
    store.put(text, large)  # would only drive out all the others
    assert [path.name.split("-")[0] for path in tmp_path.glob("*/*")] == ["100"]
    assert store.find(text, 36, model.fresh()) is not None
    assert store.find(text, 37, model.fresh()) is None, "reading 63 tokens is no slower"


def test_b45_a_prefix_of_another_length_is_a_miss(tmp_path: Path) -> None:
    model, text = MODELS["hybrid"], tokens(41, 100)
    store = PrefixStore("f", tmp_path)
    store.put(text, model([text[:90]])[1])
    assert store.find(text, 0, model.fresh()) is None


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")
def test_files_are_their_owner_s_alone(tmp_path: Path) -> None:
    home, before = tmp_path / "state" / "home", os.umask(0o022)
    try:
        text = tokens(42, 100)
        PrefixStore("f", home / "prefixes").put(text, MODELS["recurrent"]([text])[1])
        store = SessionStore(home / "sessions")
        claim = store.claim("chat")
        store.save("chat", {}, {})
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "state").rglob("*")} | {
        tmp_path / "state": (tmp_path / "state").stat().st_mode & 0o777
    }
    assert len(modes) == 8 and all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items()), modes
    claim.release()


CHURN = """
    import random, sys
    from pathlib import Path
    from mlxlin.backend import mx
    from mlxlin.store import PrefixStore
    from tests.tiny import RECURRENT, tiny_model
    model, rng, hits = tiny_model(RECURRENT), random.Random(int(sys.argv[1])), 0
    store = PrefixStore(model.fingerprint, Path("store"), budget=20_000)
    for _ in range(80):
        text = [rng.randrange(12)] * rng.choice([100, 150])
        found = store.find(text, 0, model.fresh())
        if found is None:
            store.put(text, model([text])[1])
            continue
        hits += 1
        one, other = (state.arrays()["layers.0.S"] for state in (found[1], model([text[:found[0]]])[1]))
        assert mx.allclose(one, other, atol=1e-4).item(), (text[0], found[0])
    print(hits)
"""


def python(code: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_share_a_store_within_its_budget(tmp_path: Path) -> None:
    processes = [python(CHURN, tmp_path, str(seed)) for seed in (1, 2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    assert all(int(out) > 5 for out, _ in outputs)
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert files and sum(path.stat().st_size for path in files) <= 20_000
    for path in files:
        archive.read(path)


def test_a_session_belongs_to_one_chat_until_its_process_ends(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    code = """
        import sys
        from pathlib import Path
        from mlxlin.store import SessionStore
        claim = SessionStore(Path(".")).claim("chat")
        print("claimed", flush=True)
        sys.stdin.read()
    """
    process = python(code, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "claimed\n"
    store.save("chat", {}, {})
    for refused in (store.claim, store.remove):
        with pytest.raises(SessionError, match="open in another chat"):
            refused("chat")
    store.claim("other").release()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    claim = store.claim("chat")
    with pytest.raises(SessionError, match="open in another chat"):
        store.claim("chat")
    claim.release(), claim.release()
    store.remove("chat")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_an_error_for_people(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be written"):
        SessionStore(tmp_path / "file" / "sessions").claim("chat")


def test_what_was_said_is_read_without_the_arrays(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    said = ["Gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n \udcff"]  # no terminal's bytes are refused
    store.save("chat", {"S": mx.random.normal((100,))}, {"turns": said})
    path = store.path("chat")
    assert store.record("chat")["turns"] == store.load("chat")[1]["turns"] == said
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert store.record("chat")["turns"]
    with pytest.raises(SessionError, match="damaged"):
        store.load("chat")
    for at in random.Random(0).sample(range(whole.index(b"turns"), whole.index(b"turns") + 20), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(SessionError, match="damaged"):
            store.record("chat")


def test_what_can_be_no_session_is_not_listed(tmp_path: Path) -> None:
    for name in (" a", "a?b", "\udcff", ".hidden"):
        (tmp_path / f"{name}.safetensors").touch()
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "real.safetensors").touch()
    assert [info.name for info in SessionStore(tmp_path).list()] == ["real"]
