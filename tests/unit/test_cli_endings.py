"""How commands end: exit codes, errors in one line without a traceback, and the help."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cuflash
from cuflash import cli

COMMANDS = ("info", "explain", "compile", "demo")


def _ended(
    root: Path, command: str, environment: dict[str, str] | None = None, **given: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command in a separate process, and return its output and exit code."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    given = {"stdout": subprocess.PIPE, **given}
    return subprocess.run(
        [sys.executable, "-m", "cuflash", *command.split()],
        cwd=root,
        env={**inherited, **(environment or {})},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        **given,
    )


def _fails(monkeypatch: pytest.MonkeyPatch, error: BaseException | type[BaseException]) -> None:
    """Make the demo raise an error."""

    def run(options: object) -> bool:
        raise error

    monkeypatch.setattr(cli, "run", run)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (cuflash.ArgumentValueError("a", "b", "c"), 2),
        (cuflash.ArgumentTypeError("a", "b", "c"), 2),
        (cuflash.UnsupportedError("no"), 2),
        (cuflash.BackendUnavailableError("no"), 1),
        (cuflash.ToolchainError("no"), 1),
        (cuflash.CompileError("no"), 1),
        (cuflash.LaunchError("no"), 1),
        (MemoryError(), 1),
        (FileNotFoundError(2, "No such file", "x"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_misuse_ends_with_2_and_a_failure_with_1(
    error: Exception,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _fails(monkeypatch, error)
    assert cli.main(["demo"]) == code
    said = capsys.readouterr().err
    assert said.startswith("cuflash demo: error: ")
    assert said.count("\n") == 1
    assert said.strip() != "cuflash demo: error:"


def test_an_error_of_the_library_itself_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    _fails(monkeypatch, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


@pytest.mark.parametrize("command", ["info", "info --json", "explain", "explain --json", "--help"])
def test_nobody_reads(command: str, root: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = _ended(root, command, stdout=writing)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("command", ["info", "info --json", "explain"])
def test_a_full_disk_is_said_in_a_line(command: str, root: Path) -> None:
    with open("/dev/full", "w") as full:
        ended = _ended(root, command, stdout=full)
    assert ended.returncode == 1
    name = command.split()[0]
    assert re.fullmatch(rf"cuflash {name}: error: .*No space left.*\n", ended.stderr)


def test_a_terminal_of_ascii_shows_every_path(root: Path) -> None:
    given = {"PYTHONIOENCODING": "ascii", "CUFLASH_CUDA_SRC": "/é"}
    ended = _ended(root, "info", given)
    assert ended.returncode == 0, ended.stderr
    assert r"/\xe9" in ended.stdout


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda one: one.name)
def test_the_demo_ends_as_a_shell_says_what_a_signal_ended(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(command: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, -number)

    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setattr(cli.subprocess, "run", start)
    assert cli.main(["demo", "--backend", "numpy"]) == 128 + number


def test_without_a_command_it_shows_help_and_ends_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    assert all(f"\n    {name} " in answer.err for name in COMMANDS)


def _help(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_are_right(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, examples = _help(command, capsys).partition("\nexamples:\n")
    lines = [line.strip() for line in examples.splitlines()]
    assert 1 <= len(lines) <= 2
    for line in lines:
        assert line.startswith(f"python -m cuflash {command}")
        given = cli._parser().parse_args(line.removeprefix("python -m cuflash ").split())
        assert given.command == command


@pytest.mark.parametrize(
    ("program", "shown"),
    [("/bin/cuflash", "cuflash"), ("/cuflash/__main__.py", "python -m cuflash")],
)
def test_help_names_the_program_that_was_called(
    program: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    assert _help("info", capsys).startswith(f"usage: {shown} info ")


def test_descriptions_are_as_wide_as_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for columns in (60, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        _, description, *_ = _help("compile", capsys).split("\n\n")
        widths = [len(line) for line in description.splitlines()]
        assert columns - 20 < max(widths) <= columns
