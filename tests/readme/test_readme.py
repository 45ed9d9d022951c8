"""Every command of the README runs: as it stands there, or shortened where the comment says so."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from kvxfer.result.file import read_result
from kvxfer.result.tables import render

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ ")
]
MAKE = [command for command in COMMANDS if command.startswith("make ")]
KVXFER = [command for command in COMMANDS if command.startswith("kvxfer ")]

SHORTER = ["--setup-repeats", "1", "--max-seconds", "0.3"]
"""Added to every bench: less is measured, nothing else changes."""

FIT_S = "10"


def run(words: list[str], where: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(words, cwd=where, env=environment, capture_output=True, text=True, timeout=300)


def shortened(command: str) -> list[str]:
    words = command.split()
    if words[1] != "bench":
        return words
    if "--tokens" not in words:
        words += ["--tokens", "128" if "--fit" in words else "512"]  # a shorter prompt has a smaller grid
    if "--fit" in words:
        words += ["--fit-seconds", "1"]
    if "layers" in words:  # of real layers on CPUs that others use too, more are refused beyond some seconds
        words[words.index("--tokens") + 1] = "8"
    return words + SHORTER


def test_every_command_is_known() -> None:
    assert [c for c in COMMANDS if c not in MAKE + KVXFER] == ["mkdir clients && cp prefill1.key clients/"]
    assert {"make bench", "make test", "make test-full"} == set(MAKE)


def test_commands_of_one_host(tmp_path: Path) -> None:
    """In the order of the README, in one directory: later ones read what earlier ones wrote."""
    ran = 0
    for command in KVXFER:
        if "10.0.0.2" in command or " keys " in command:
            continue
        done = run(shortened(command), tmp_path)
        assert done.returncode == 0, (command, done.stderr)
        assert "Traceback" not in done.stderr
        ran += 1
    assert ran >= 5


def test_commands_of_two_hosts(tmp_path: Path) -> None:
    """Both on loopback here; the address is the only thing that is changed."""
    commands = [command.replace("10.0.0.2", "127.0.0.1") for command in KVXFER]
    for command in commands:
        if " keys " in command:
            done = run(command.split(), tmp_path)
            assert done.returncode == 0, done.stderr
    (copying,) = [command for command in COMMANDS if command.startswith("mkdir ")]
    subprocess.run(copying, shell=True, cwd=tmp_path, check=True, timeout=10)

    (serve,) = [command for command in commands if " serve " in command]
    (bench,) = [command for command in commands if "--peer" in command]
    port = str(20_000 + os.getpid() % 20_000)
    words = [str(Path(sys.executable).parent / "kvxfer"), *serve.split()[1:], "--port", port]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            assert "waiting on 127.0.0.1" in server.stderr.readline()
            done = run(shortened(bench.replace("7420", port)), tmp_path)
            assert done.returncode == 0, done.stderr
            assert "tcp/lo" in done.stdout
        finally:
            server.terminate()
            assert server.wait(timeout=10) == 130


@pytest.mark.slow
def test_make_bench(tmp_path: Path) -> None:
    """As it stands, but one prompt length and little time; what is set up already must not be done again."""
    began = time.time()
    arguments = "BENCH_ARGS=--tokens 512 " + " ".join(SHORTER)
    done = run(["make", "-C", str(ROOT), "bench", arguments], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "llama-3.1-70b" in done.stdout
    assert (ROOT / ".venv" / "installed").stat().st_mtime < began


@pytest.mark.parametrize("target", ["test", "test-full"])
def test_the_test_commands_exist(target: str, tmp_path: Path) -> None:
    """They run this test, so here they are only looked at."""
    done = run(["make", "-C", str(ROOT), "--dry-run", target], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "pytest" in done.stdout


def test_links_to_files_lead_somewhere() -> None:
    for text in (README, *(path.read_text() for path in (ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / target).exists() or (ROOT / "docs" / target).exists(), target


def test_the_result_shown_is_the_committed_one_as_it_is_printed() -> None:
    (shown,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    committed = re.findall(r"\]\((bench/results/[^)]+\.json)\)", README)[0]
    console = Console(width=120, file=io.StringIO())
    render(read_result(ROOT / committed), console)
    printed, words = console.file.getvalue().split("\nWhat the words mean\n")  # type: ignore[attr-defined]
    assert shown == printed
    assert words


def test_the_peers_shown_are_the_committed_ones() -> None:
    (committed,) = re.findall(r"\]\((bench/results/[^)]+-peers\.json)\)", README)
    words = [sys.executable, str(ROOT / "bench" / "peers" / "markdown.py"), str(ROOT / committed)]
    assert run(words, ROOT).stdout in README


def test_the_verdict_shown_is_what_plan_prints(tmp_path: Path) -> None:
    (command, shown) = re.findall(r"^\$ (kvxfer plan .*)\n(Verdict: [^`]*)```", README, re.MULTILINE)[0]
    assert shown in run(command.split(), tmp_path).stdout


def test_nothing_is_left_to_be_filled_in() -> None:
    assert not re.findall(r"\bRESULT\w*|\bTODO\b", README)
    assert (ROOT / "bench" / "results").is_dir()
