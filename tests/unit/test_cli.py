"""Running commands: exit statuses, errors as lines, and finding a command by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer

from kvxfer import cli
from kvxfer.errors import PeerLostError, UnavailableError, UsageError, WrongBytesError

ROOT = Path(__file__).parents[2]


def kvxfer(*argv: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "kvxfer.cli", *argv]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, check=False)


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (UsageError("a; b"), 2, "prog: error: a; b"),
        (UnavailableError("no port"), 3, "prog: error: no port"),
        (WrongBytesError("byte 7"), 4, "prog: error: byte 7"),
        (PeerLostError("gone"), 5, "prog: error: gone"),
        (MemoryError(), 3, "prog: error: not enough memory"),
        (OSError(28, "No space left on device"), 3, "prog: error: cannot write: No space left on device"),
        (KeyboardInterrupt(), 130, "prog: interrupted"),
        (typer.Abort(), 130, "prog: interrupted"),
        (ValueError("x\ny"), 1, "prog: unexpected failure: ValueError: x y (run again with --debug for the traceback)"),
    ],
)
def test_errors_become_a_line_and_a_status(
    error: BaseException, status: int, says: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_silence_stdout", lambda: None)
    monkeypatch.setattr(cli, "_ignore_interruptions", lambda: None)  # the tests' own, here

    def command() -> None:
        raise error

    assert cli.run(command, [], "prog") == status
    err = capfd.readouterr().err
    assert err.startswith(says)
    assert len(err.splitlines()) == 1
    assert cli.run(command, ["--debug"], "prog") == status
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interruption_while_the_interpreter_ends_changes_nothing(number: str) -> None:
    code = f"""
import atexit, os, signal, sys
from kvxfer import cli

def interrupted():
    raise KeyboardInterrupt

cli.end_in_order()
atexit.register(os.kill, os.getpid(), signal.{number})
sys.exit(cli.guarded(interrupted, "prog", False))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "prog: interrupted\n")


def test_a_closed_pipe_is_quiet(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_silence_stdout", lambda: None)

    def broken() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    assert cli.guarded(broken, "prog", debug=False) == 1
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("status", [None, 0, 4])
def test_a_returned_status_is_the_exit_status(status: int | None) -> None:
    def command() -> int | None:
        return status

    assert cli.run(command, [], "prog") == (status or 0)


def test_typer_exit_is_the_exit_status() -> None:
    def command() -> None:
        raise typer.Exit(6)

    assert cli.run(command, [], "prog") == 6


def test_the_command_line_is_in_the_context() -> None:
    seen = []

    def command(context: typer.Context, model: Annotated[str, typer.Option()] = "8b") -> None:
        seen.append((context.obj, model))

    assert cli.run(command, ["--debug", "--model", "70b"], "kvxfer bench") == 0
    assert seen == [(["kvxfer", "bench", "--model", "70b"], "70b")]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, (_, about) in cli.COMMANDS.items():
        assert name in out
        assert about in out


def test_no_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "Usage" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvxfer 0.")


def test_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plam"]) == 2
    assert "did you mean plan?" in capsys.readouterr().err


def test_a_command_by_name_is_the_module_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--json", "-", "--tokens", "512"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == ["kvxfer", "plan", "--json", "-", "--tokens", "512"]


@pytest.mark.parametrize("argv", [["--debug", "plan", "--tokens", "x"], ["plan", "--tokens", "x", "--debug"]])
def test_debug_reaches_the_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert "Traceback" in capsys.readouterr().err


def test_full_disk_on_standard_output() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        done = kvxfer("plan", stdout=full.fileno())
    assert done.returncode == 3
    assert done.stderr.startswith("kvxfer plan: error: ")
    assert len(done.stderr.splitlines()) == 1


def test_reader_that_closes_early() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = kvxfer("plan", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_help_needs_no_typer() -> None:
    code = "import sys; from kvxfer import cli; cli.main(['--help']); sys.exit('typer' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, stdout=subprocess.DEVNULL
    )
