"""The wheel as a user gets it: installed into a venv of its own, used from outside the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(ROOT))
    (path,) = out.glob("kvxfer-*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a venv that holds the wheel and what it depends on, and nothing else."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=120)
    python = venv / "bin" / "python"
    pip(str(python), "install", "--constraint", str(ROOT / "constraints.txt"), str(wheel))
    return python


def pip(python: str, *words: str) -> None:
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr


def run(python: Path, where: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(python), *words], cwd=where, capture_output=True, text=True, timeout=120)


def test_the_wheel_carries_its_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "kvxfer/result/schema.json",
        "kvxfer/model/presets.json",
        "kvxfer/topology/catalogue/links.json",
        "kvxfer/py.typed",
    ):
        assert wanted in names
    assert any(name.startswith("kvxfer/_native") and name.endswith(".so") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "csrc/")) or name.endswith(".md")]


def test_plan_knows_presets_and_links(python: Path, tmp_path: Path) -> None:
    done = run(python, tmp_path, "-m", "kvxfer.plan", "--model", "70b", "--link", "ndr", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["assumptions"]["link_gbit"] == [400.0]


def test_everything_is_found_in_the_venv(python: Path, tmp_path: Path) -> None:
    code = (
        "import kvxfer, kvxfer._native, kvxfer.result.file as f; f.schema(); "
        "print(kvxfer.__file__, kvxfer._native.__file__)"
    )
    done = run(python, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert all(str(python.parents[1]) in path for path in done.stdout.split())


def test_bench_runs_and_needs_no_torch(python: Path, tmp_path: Path) -> None:
    words = ["--tokens", "64", "--setup-repeats", "1", "--max-seconds", "0.3", "--json", "result.json"]
    done = run(python, tmp_path, "-m", "kvxfer.bench", "--model", "8b", *words)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "result.json").read_text())["results"]
    assert (row["status"], row["verified"], row["transport"]) == ("ok", "full", "tcp/lo")
    assert run(python, tmp_path, "-c", "import torch").returncode != 0


def test_the_console_script_is_there(python: Path, tmp_path: Path) -> None:
    done = subprocess.run([str(python.parent / "kvxfer"), "doctor"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "backend   tcp" in done.stdout
