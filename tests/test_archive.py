"""Files of arrays are whole, checksummed, finite, and replaced only by whole ones."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mlxlin import archive
from mlxlin.backend import mx
from mlxlin.errors import NumericsError, ResourceError, SessionError


def arrays() -> dict[str, mx.array]:
    return {
        "half": mx.random.normal((3, 4)).astype(mx.bfloat16),
        "transposed": mx.random.normal((4, 6)).T,
        "every second": mx.random.normal((100, 6))[::2],
        "integers": mx.arange(5),
        "empty": mx.zeros((0, 3)),
        "scalar": mx.array(3.0),
        "S": mx.random.normal((2, 3, 8, 8)),
    }


def test_b46_everything_comes_back(tmp_path: Path) -> None:
    saved, record = arrays(), {"turns": [{"role": "user", "content": "Grüße 안녕"}], "none": None}
    archive.write(tmp_path / "a.safetensors", saved, record)
    loaded, again = archive.read(tmp_path / "a.safetensors")
    assert again == {**record, "format": archive.FORMAT} and loaded.keys() == saved.keys()
    for name, array in saved.items():
        assert loaded[name].dtype == array.dtype and loaded[name].shape == array.shape
        assert mx.array_equal(loaded[name], array)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_b42_numbers_that_are_not_finite_are_never_saved(tmp_path: Path, bad: float) -> None:
    path = tmp_path / "a.safetensors"
    archive.write(path, {"S": mx.ones((2,))}, {})
    with pytest.raises(NumericsError, match="'S'"):
        archive.write(path, {"S": mx.array([1.0, bad])}, {})
    assert mx.array_equal(archive.read(path)[0]["S"], mx.ones((2,)))


def test_b42_numbers_that_are_not_finite_are_refused_at_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "isfinite", lambda array: mx.array(True))
    archive.write(tmp_path / "a.safetensors", {"S": mx.array([float("nan")])}, {})
    monkeypatch.undo()
    with pytest.raises(SessionError, match="not finite"):
        archive.read(tmp_path / "a.safetensors")


def test_any_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    archive.write(path, {"S": mx.random.normal((7,))}, {"tokens": [1, 2, 3]})
    whole = path.read_bytes()
    rng = random.Random(0)
    for at in {*rng.sample(range(len(whole)), 60), len(whole) - 1}:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        try:
            loaded, record = archive.read(path)
        except SessionError:
            continue
        pytest.fail(f"byte {at} of {len(whole)} was changed unnoticed: {loaded} {record}")


@pytest.mark.parametrize("kept", [0, 1, 7, 100, -1])
def test_truncated_and_missing_files_are_named(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(SessionError, match="no file a.safetensors"):
        archive.read(path)
    archive.write(path, {"S": mx.random.normal((70,))}, {})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(SessionError, match="damaged"):
        archive.read(path)


def test_another_format_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "FORMAT", 99)
    archive.write(tmp_path / "a.safetensors", {}, {})
    monkeypatch.undo()
    with pytest.raises(SessionError, match="format 99"):
        archive.read(tmp_path / "a.safetensors")


def child(code: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs file size limits")
def test_b10_a_full_disk_leaves_the_older_file(tmp_path: Path) -> None:
    archive.write(tmp_path / "a.safetensors", {"S": mx.ones((2,))}, {"age": "old"})
    process = child(
        """
        import resource, signal
        from pathlib import Path
        from mlxlin import archive
        from mlxlin.backend import mx
        from mlxlin.errors import ResourceError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            archive.write(Path("a.safetensors"), {"S": mx.ones((100_000,))}, {})
        except ResourceError as error:
            print(error.message)
        """,
        tmp_path,
    )
    out, err = process.communicate(timeout=60)
    assert "a.safetensors could not be saved" in out, err
    assert archive.read(tmp_path / "a.safetensors")[1]["age"] == "old"
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_what_killed_writers_left_is_swept_away(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.safetensors.old.safetensors", tmp_path / ".a.safetensors.new.safetensors"
    old.write_text(""), new.write_text("")
    os.utime(old, (0, 0))
    archive.write(tmp_path / "a.safetensors", {}, {})
    assert not old.exists() and new.exists()


def test_an_unwritable_folder_is_an_error_for_people(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="could not be saved"):
        archive.write(tmp_path / "file" / "a.safetensors", {}, {})


def test_a_killed_save_never_loses_the_older_file(tmp_path: Path) -> None:
    rng = random.Random(1)
    code = """
        import itertools
        from pathlib import Path
        from mlxlin import archive
        from mlxlin.backend import mx
        print("ready", flush=True)
        for age in itertools.count():
            archive.write(Path("a.safetensors"), {"S": mx.full((200_000,), age)}, {"age": age})
            print(age, flush=True)
    """
    for _ in range(4):
        process = child(code, tmp_path)
        assert process.stdout is not None
        process.stdout.readline(), process.stdout.readline()
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        loaded, record = archive.read(tmp_path / "a.safetensors")
        assert mx.all(loaded["S"] == record["age"])
