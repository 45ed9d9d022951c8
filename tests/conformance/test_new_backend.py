"""docs/adding-a-backend.md makes a backend: its commands, one after another, on a copy of the sources."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "adding-a-backend.md").read_text()
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
]
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 1000,
    "intermediate_size": 512,
}


def run(command: str, directory: Path, seconds: float = 900) -> str:
    """The output of a shell command that has to succeed. cmake is the one that the project's own build uses."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, shell=True, cwd=directory, env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def package_with(tree: Path) -> Path:
    """A Python that has this package with the native part of that tree, and all else from this one's packages."""
    nanobind = run(f"{sys.executable} -m nanobind --cmake_dir", tree).strip()
    run(
        f"cmake -S . -B build/mine -DKVXFER_PYTHON=ON -DPython_EXECUTABLE={sys.executable} -Dnanobind_DIR={nanobind}"
        " && cmake --build build/mine --target _native --parallel 2",
        tree,
    )
    home = tree / "venv"
    venv.create(home)
    packages = next(home.glob("lib/python*/site-packages"))
    shutil.copytree(ROOT / "kvxfer", packages / "kvxfer")
    shutil.copytree(ROOT / "topology", packages / "kvxfer" / "topology" / "catalogue", dirs_exist_ok=True)
    (native,) = (tree / "build" / "mine").rglob("_native*.so")
    shutil.copy(native, packages / "kvxfer")
    # The path alone: what an editable install of this package put there is not run.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin" / "python"


@pytest.mark.slow
def test_a_backend_made_by_the_document_conforms_and_is_measured(tmp_path: Path) -> None:
    tree = tmp_path / "kvxfer"
    for folder in ("csrc", "topology"):
        shutil.copytree(ROOT / folder, tree / folder)
    shutil.copy(ROOT / "CMakeLists.txt", tree)
    assert len(COMMANDS) == 10
    said = [run(command, tree) for command in COMMANDS]
    assert re.search(r"^[5-9]\d passed, 0 failed$", said[-1], re.MULTILINE), said[-1]
    assert "ok      mine/moving.one_piece" in said[-1]

    python = package_with(tree)
    model = tmp_path / "config.json"
    model.write_text(json.dumps(MODEL))
    usual = f"--model {model} --tokens 70 --setup-repeats 1 --max-seconds 0.2"
    run(f"{python} -m kvxfer.bench {usual} --backend mine,tcp --json result.json", tmp_path)
    mine, tcp = json.loads((tmp_path / "result.json").read_text())["results"]
    assert (mine["backend"], mine["status"], mine["verified"]) == ("mine", "ok", "full")
    assert mine["transport"] == "mine/lo"
    assert (mine["bytes"], mine["descriptors"]) == (tcp["bytes"], tcp["descriptors"])
    assert mine["verified_bytes"] == 2 * mine["bytes"]
