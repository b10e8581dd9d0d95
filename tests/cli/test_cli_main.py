"""The command group: help, usage, errors as two lines, exit codes, closed pipes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

import mlxlin
from mlxlin.recurrences import probe
from mlxlin.recurrences.probe import trusted_by_key
from mlxlin_cli import main
from mlxlin_cli.info import machine_table

HEAVY = ("mlx", "numpy", "rich", "prompt_toolkit", "jinja2", "tokenizers", "huggingface_hub", "matplotlib")


def test_help_imports_nothing_heavy(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run_python(f"""
        import sys
        from mlxlin_cli.main import run
        assert run(["--help"]) == 0
        for command in {main.COMMANDS!r}:
            assert run([command, "--help"]) == 0
        print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
    """)
    assert done.stderr == "[]\n"
    assert "Exit codes" in done.stdout and "Examples" in done.stdout


@pytest.mark.parametrize(
    "command",
    [[name] for name in main.COMMANDS]
    + [["models", name] for name in ("list", "suggest", "rm")]
    + [["sessions", name] for name in ("list", "show", "rm")],
    ids=" ".join,
)
def test_every_command_has_a_help_with_examples(cli, command: list[str]) -> None:
    result = cli(*command, "--help")
    assert result.code == 0 and f"    mlxlin {' '.join(command)}" in result.out[result.out.index("Example") :]


def test_no_command_shows_the_help(cli) -> None:
    result = cli()
    assert result.code == 0 and "Commands:" in result.out and result.err == ""


@pytest.mark.parametrize("before", [True, False])
def test_info_says_whether_mlx_was_there_first(
    run_python: Callable[..., subprocess.CompletedProcess[str]], before: bool
) -> None:
    done = run_python(f"""
        {"import mlx.core as mx; mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))" if before else ""}
        from mlxlin_cli.main import run
        assert run(["info"]) == 0
    """)
    line = next(line for line in done.stdout.splitlines() if line.startswith("MLX "))
    assert ("imported by this process before mlxlin" in line) == before


def test_version(cli) -> None:
    assert cli("--version").out == f"mlxlin {mlxlin.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["generat", "hi"], "'generate'"),
        (["generate", "--tmp", "1", "hi"], "'--temp'"),
        (["generate", "--temp", "warm", "hi"], "mlxlin generate --help"),
        (["generate", "-n", "-1", "hi"], "mlxlin generate --help"),
        (["generate", "hi", "there"], "mlxlin generate --help"),
        (["--colour"], "mlxlin --help"),
    ],
)
def test_wrong_usage_is_two_lines_and_code_2(cli, arguments: list[str], suggestion: str) -> None:
    result = cli(*arguments)
    lines = result.err.splitlines()
    assert result.code == 2 and result.out == ""
    assert len(lines) == 2 and lines[0].startswith("Error: ") and lines[1].startswith("Hint: ")
    assert suggestion in lines[1]


def test_a_deliberate_error_is_two_lines_and_code_1(cli, script, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(source: str, **_: object) -> None:
        raise mlxlin.CheckpointError("There is no such\nfolder.", "Name another.")

    monkeypatch.setitem(mlxlin.__dict__, "load", load)
    result = cli("generate", "hi")
    assert (result.code, result.out) == (1, "")
    assert result.err == "Error: There is no such folder.\nHint: Name another.\n"


@pytest.mark.parametrize("kind", [mlxlin.MlxlinError, *mlxlin.MlxlinError.__subclasses__()])
def test_an_error_without_a_hint_of_its_own_has_that_of_its_kind(cli, script, monkeypatch, kind: type) -> None:
    def load(source: str, **_: object) -> None:
        raise kind("config.json is not valid JSON.")

    monkeypatch.setitem(mlxlin.__dict__, "load", load)
    lines = cli("generate", "hi").err.splitlines()
    assert len(lines) == 2 and lines[1] == f"Hint: {kind.usual_hint}" and kind.usual_hint.endswith(".")
    assert kind is mlxlin.MlxlinError or kind.usual_hint != mlxlin.MlxlinError.usual_hint


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_unexpected_error_has_no_traceback_unless_asked(cli, script, where: str) -> None:
    def broken(number: int) -> None:
        raise RuntimeError("[matmul] shapes")

    script.model.before = broken
    plain = cli("generate", "hi")
    assert plain.code == 1 and len(plain.err.splitlines()) == 2
    assert "RuntimeError: [matmul] shapes" in plain.err and "--debug" in plain.err
    debug = cli(*(["--debug", "generate", "hi"] if where == "before" else ["generate", "hi", "--debug"]))
    assert "Traceback" in debug.err and "in broken" in debug.err


@pytest.mark.parametrize("arguments", [["-m", "x", "generate", "hi"], ["generate", "hi", "-m", "x"]])
def test_the_model_may_be_named_before_or_after_the_command(cli, script, arguments: list[str]) -> None:
    assert cli(*arguments).code == 0
    assert [source for source, _ in script.loads] == ["x"]


def test_the_shipped_model_is_the_default(cli, script) -> None:
    cli("generate", "hi", "-q", "4", "--revision", "v1")
    assert script.loads[0][0] == "demo"
    assert script.loads[0][1]["bits"] == 4 and script.loads[0][1]["revision"] == "v1"


def test_interruption_is_130(cli, script) -> None:
    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    script.model.before = interrupt
    result = cli("generate", "hi")
    assert result.code == 130 and result.err == "Interrupted.\n"


def test_a_closed_pipe_ends_quietly(command_line: list[str], environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [*command_line, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux")
def test_a_full_disk_is_two_lines(command_line: list[str], environment: dict[str, str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command_line, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert error == "Error: No space left on device." and hint.startswith("Hint: ") and "space" in hint


def test_a_closed_standard_output_is_no_crash(command_line: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *command_line, "--help"], stderr=subprocess.PIPE, text=True, env=environment
    )
    assert done.returncode == 0 and done.stderr == ""


def test_a_kernel_that_is_not_used_is_one_note_in_words(cli, script, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(source: str, **options: object) -> object:
        trusted_by_key("scan-decay-head-K32-V32", lambda: "results are off by 1.0e-02")
        trusted_by_key("scan-decay-head-K32-V32", lambda: "examined again")
        return script.load(source, **options)

    monkeypatch.setattr(mlxlin, "load", load)
    probe._verdicts.cache_clear()
    result = cli("generate", "hi")
    notes = [line for line in result.err.splitlines() if line.startswith("Note: ")]
    assert result.code == 0 and len(notes) == 1
    assert notes[0].startswith("Note: the Metal kernel 'scan' failed its check on this machine and is not used: res")
    assert "results are off by 1.0e-02" in machine_table().splitlines()[-1]
    probe._verdicts.cache_clear()
