"""A conversion that is cut short leaves no output, an old output untouched, and a second run works (b10)."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxlin.convert import convert_checkpoint, folder
from mlxlin.errors import InputError, MlxlinError, ResourceError
from tests.convert.checkpoints import bytes_of, logits, same, save, weights

PROGRAM = """
import sys
from mlxlin.convert import convert_checkpoint
from mlxlin.errors import MlxlinError
def slow(done, total):
    print(done, flush=True)
    import time; time.sleep(float(sys.argv[3]))
try:
    convert_checkpoint(sys.argv[1], sys.argv[2], bits=8 if "8" in sys.argv[4:] else None, progress=slow)
except MlxlinError as error:
    print(error.message, file=sys.stderr)
    raise SystemExit(1)
"""


def start(
    raw: Path, out: Path, pause: float, *options: str, before: Callable[[], None] | None = None
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(raw), str(out), str(pause), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=before)  # noqa: PLW1509


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return save(tmp_path / "raw", weights())


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("old", [False, True], ids=["new", "over an old output"])
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_b10_a_killed_conversion(tmp_path: Path, raw: Path, old: bool, ending: signal.Signals) -> None:
    out = tmp_path / "out"
    if old:
        convert_checkpoint(raw, out, bits=4)
    before = bytes_of(out) if old else None
    process = start(raw, out, 0.05)
    assert process.stdout is not None and process.stdout.readline()  # it is writing now
    time.sleep(0.1)
    process.send_signal(ending)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert (bytes_of(out) if old else out.exists()) == (before or False)
    if ending == signal.SIGINT:
        assert names(tmp_path) == {"raw"} | ({"out"} if old else set())
    convert_checkpoint(raw, out)
    assert names(tmp_path) == {"raw", "out"} and same(logits(out), logits(raw))


@pytest.mark.parametrize("old", [False, True], ids=["new", "over an old output"])
def test_b10_a_file_size_limit(tmp_path: Path, raw: Path, old: bool) -> None:
    import resource

    out = tmp_path / "out"
    if old:
        convert_checkpoint(raw, out, bits=4)
    before = bytes_of(out) if old else None

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150 * 1024, 150 * 1024))

    process = start(raw, out, 0, before=limit)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors.count("\n") == 1 and "size limit" in errors
    assert names(tmp_path) == {"raw"} | ({"out"} if old else set())
    assert not old or bytes_of(out) == before
    convert_checkpoint(raw, out)
    assert same(logits(out), logits(raw))


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_b10_a_full_disk_at_any_moment(tmp_path: Path, raw: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    convert_checkpoint(raw, out, bits=4)
    before = bytes_of(out)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if call == "write":
            patch.setattr("mlxlin.convert.conversion.write_shard", full)
        else:
            patch.setattr(folder, "_exchange", lambda *_: False)
            patch.setattr(os, call, full)
        with pytest.raises(ResourceError, match="disk is full") as caught:
            convert_checkpoint(raw, out)
    assert caught.value.exit_code == 1 and "\n" not in caught.value.message
    assert bytes_of(out) == before and names(tmp_path) == {"raw", "out"}


@pytest.mark.parametrize("moment", ["first", "second"])
def test_a_replacement_cut_between_its_renames_is_undone_or_finished(
    tmp_path: Path, raw: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    convert_checkpoint(raw, out, bits=4)
    before = bytes_of(out)
    real, calls = os.rename, []

    class Killed(BaseException):
        """Stands for SIGKILL: no handler of the program sees it."""

    def rename(source: Any, target: Any) -> None:
        calls.append(source)
        if len(calls) == (1 if moment == "first" else 2):
            raise Killed
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(folder, "_exchange", lambda *_: False)
        patch.setattr(os, "rename", rename)
        patch.setattr(folder.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            convert_checkpoint(raw, out)
    assert out.exists() == (moment == "first")
    with pytest.raises(MlxlinError, match="no such"):  # any next run restores the old output, even one that fails
        with folder.new_folder(out):
            raise MlxlinError("no such luck")
    assert bytes_of(out) == before and names(tmp_path) == {"raw", "out"}
    convert_checkpoint(raw, out)
    assert same(logits(out), logits(raw)) and names(tmp_path) == {"raw", "out"}


COMMAND = """
import sys, time
from mlxlin.convert import conversion
def slow(*arguments):
    print("writing", flush=True)
    time.sleep(60)
conversion.write_shard = slow
from mlxlin_cli.main import main
sys.argv = ["mlxlin", "convert", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda s: s.name)
def test_b10_a_command_asked_to_end_leaves_nothing(tmp_path: Path, raw: Path, ending: signal.Signals) -> None:
    command = [sys.executable, "-c", COMMAND, str(raw), str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    process.send_signal(ending)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + ending and "Traceback" not in errors
    assert names(tmp_path) == {"raw"}


def test_two_folders_change_places_in_one_step_or_not_at_all(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    exchanged = folder._exchange(tmp_path / "a", tmp_path / "b")
    assert names(tmp_path / "a") == {"b" if exchanged else "a"}
    assert names(tmp_path / "b") == {"a" if exchanged else "b"}
    assert not folder._exchange(tmp_path / "a", tmp_path / "nothing") and names(tmp_path) == {"a", "b"}


def test_b10_an_old_output_is_whole_at_every_moment(tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed right behind the exchange, where there is one: the new output is there, and the next run clears up."""
    out = tmp_path / "out"
    convert_checkpoint(raw, tmp_path / "new")
    convert_checkpoint(raw, out, bits=4)
    real = folder._exchange

    class Killed(BaseException): ...

    def exchange(a: Path, b: Path) -> bool:
        done = real(a, b)
        if done:
            raise Killed
        return done

    with monkeypatch.context() as patch:
        patch.setattr(folder, "_exchange", exchange)
        patch.setattr(folder.shutil, "rmtree", lambda *_, **__: None)
        with contextlib.suppress(Killed):
            convert_checkpoint(raw, out)
    assert bytes_of(out) == bytes_of(tmp_path / "new")
    convert_checkpoint(raw, out, bits=4)
    assert names(tmp_path) == {"raw", "new", "out"}


def test_an_output_that_is_the_folder_one_is_in(tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert_checkpoint(raw, tmp_path / "out")
    (tmp_path / "out" / "below").mkdir()
    for place in (tmp_path / "empty", tmp_path / "out", tmp_path / "out" / "below"):
        place.mkdir(exist_ok=True)
        monkeypatch.chdir(place)
        with pytest.raises(InputError, match="is where this command runs"):
            convert_checkpoint(raw, ".." if place.name == "below" else ".")
    assert same(logits(tmp_path / "out"), logits(raw))


def test_two_conversions_into_one_folder_do_not_mix(tmp_path: Path, raw: Path) -> None:
    out = tmp_path / "out"
    process = start(raw, out, 0.03)
    assert process.stdout is not None and process.stdout.readline()
    with pytest.raises(ResourceError, match="Another process is writing out"):
        convert_checkpoint(raw, out)
    process.communicate(timeout=60)
    assert process.returncode == 0 and same(logits(out), logits(raw))


def test_an_output_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path, raw: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("x")
    with pytest.raises(MlxlinError, match="could not be written"):
        convert_checkpoint(raw, blocked / "out")
