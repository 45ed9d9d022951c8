"""`kvxfer plan` from the outside: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from example_result import example_result
from jsonschema import Draft202012Validator

from kvxfer import plan
from kvxfer.result.file import schema

HEAVY = ("torch", "numpy", "scipy", "zmq", "cupy")


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert plan.main([*argv, "--json", "-"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_tables_say_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--model", "70b", "--params", "70e9"]) == 0
    text = capsys.readouterr().out
    for word in (
        "Assumed, not measured: 4 GPUs",
        "400 TFLOP/s",
        "70e9 parameters (--params)",
        "Verdict:",
        "seed",
        "full",
    ):
        assert word in text


def test_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys)
    assert document["models"][0]["name"] == "llama-3.1-8b"
    assert [row["tokens"] for row in document["ratio"]] == [512, 512, 2048, 2048, 8192, 8192]
    assert document["assumptions"]["link_gbit"] == [100, 200, 400]
    assert document["verdict"]["cases"]


def test_document_has_the_fields_of_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, "--model", "70b", "--dtype", "bf16,fp8,fp8_e4m3", "--tokens", "100")
    rules = schema()["properties"]
    for field, value in document.items():
        Draft202012Validator(rules[field]).validate(value)
    assert document["command"][:4] == ["kvxfer", "plan", "--model", "70b"]
    assert [model["dtype"] for model in document["models"]] == ["bf16", "fp8_e4m3"]
    assert document["models"][0]["bytes_by_tokens"] == {"100": 112 * 327_680}


def test_bytes_per_token_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, "--tokens", "16", "--kv-bytes-per-token", "1024")
    assert document["models"][0]["kv_bytes_per_token"] == 1024
    assert document["ratio"][0]["bytes"] == 16 * 1024


def test_other_families_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, "--model", "gemma-3-27b", "--tokens", "512,8192")
    (model,) = document["models"]
    assert (model["kv_bytes_per_token"], model["fixed_bytes_per_request"]) == (81_920, 443_023_360)
    assert model["bytes_by_tokens"] == {"512": 62 * 512 * 8192, "8192": 8192 * 81_920 + 443_023_360}
    assert [row["bytes"] for row in document["ratio"][::2]] == list(model["bytes_by_tokens"].values())


def test_prefix_hits(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "70b", "--tokens", "8192", "--prefix-hit-prefill", "0.9", "--prefix-hit-decode", "0.5"]
    document = planned(capsys, *argv)
    assert document["ratio"][0]["bytes"] == 4096 * 327_680
    assert document["models"][0]["bytes_by_tokens"] == {"8192": 8192 * 327_680}
    assert document["assumptions"]["prefix_hit_decode"] == 0.5


def test_multi_token_prediction_and_packed_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, "--model", "deepseek-v3.2", "--with-mtp", "--dtype", "fp8,fp8_ds_mla")
    assert [model["kv_bytes_per_token"] for model in document["models"]] == [62 * 708, 62 * 788]
    assert not any("left out" in notice for notice in document["notices"])
    assert any("fp8_e4m3 cache of deepseek-v3.2 as fp8_ds_mla" in notice for notice in document["notices"])


def test_json_file_and_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert plan.main(["--quiet", "--json", str(path)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(path.read_text())["ratio"]


def test_measured_times_are_beside_and_what_is_missing_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(example_result()))
    argv = ["--model", "70b", "--measured", str(path)]
    document = planned(capsys, *argv)
    scopes = {entry["scope"] for row in document["ratio"] for entry in row["measured"]}
    assert scopes == {"loopback"}
    assert any("not measured" in notice and "2,048 tokens" in notice for notice in document["notices"])
    assert any("loopback" in notice and "no verdict" in notice for notice in document["notices"])
    assert document["verdict"] is None
    assert plan.main(argv) == 0
    out = capsys.readouterr().out
    assert "MEASURED" in out
    assert "Verdict" not in out


def test_a_row_through_memory_is_no_loopback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = example_result()
    for row in [*result["results"], *result["cost_model"]]:
        row["scope"] = "host"
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    document = planned(capsys, "--model", "70b", "--measured", str(path))
    assert {entry["scope"] for row in document["ratio"] for entry in row["measured"]} == {"host"}
    assert any("one host (host)" in notice and "no verdict" in notice for notice in document["notices"])
    assert document["verdict"] is None


def test_a_cpu_s_prefill_of_real_layers_is_listed_and_decides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, result = tmp_path / "result.json", example_result()
    argv = ["--model", "70b", "--measured", str(path)]
    path.write_text(json.dumps({name: value for name, value in result.items() if name != "prefill"}))
    without = planned(capsys, *argv)
    path.write_text(json.dumps(result))
    document = planned(capsys, *argv)
    told = set(document["notices"]) - set(without["notices"])
    (notice,) = told
    assert notice.startswith(
        "the prefill of real layers in the measured result (float32 on 2 CPU threads, random weights, without an "
        "engine) decides nothing here: a CPU's time says nothing of a GPU's; time your engine's"
    )
    layers = [row for row in document["ratio"] if row["basis"] == "layers"]
    assert [(row["tokens"], row["prefill_ms"]) for row in layers] == [(512, 240_000)]
    assert layers[0]["prefill_source"] == "measured by --measure-prefill: measured here, no GPU's time; MFU 73 %"
    assert [row for row in document["ratio"] if row not in layers] == without["ratio"]
    assert document["plan"] == without["plan"]
    given = planned(capsys, *argv, "--prefill-tokens-per-s", "10000")
    assert not told & set(given["notices"])  # which says what they are asked for
    assert [row["basis"] for row in given["ratio"][:4]] == ["seed", "full", "layers", "given"]
    (other,) = (notice for notice in planned(capsys, "--measured", str(path))["notices"] if "real layers" in notice)
    assert "no whole prompt of this model" in other


def test_measured_in_other_blocks_does_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = example_result()
    tokens = result["results"][0]["tokens"]
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    argv = ["--model", "70b", "--tokens", str(tokens), "--block-size", "300", "--measured", str(path)]
    document = planned(capsys, *argv)
    assert all(row["measured"] == [] for row in document["ratio"])
    assert any("not measured" in notice for notice in document["notices"])


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--model", "lama-3.1-70b"], "did you mean llama-3.1-70b?"),
        (["--dtype", "bf61"], "did you mean bf16?"),
        (["--tokens", "0"], "--tokens"),
        (["--tokens", "-1"], "--tokens"),
        (["--tokens", "many"], "--tokens"),
        (["--block-size", "0"], "--block-size"),
        (["--gpus", "1.5"], "--gpus"),
        (["--eff-tflops", "0"], "--eff-tflops"),
        (["--eff-tflops", "5e-324"], "--eff-tflops"),
        (["--params", "nan"], "--params"),
        (["--link", "inf"], "--link"),
        (["--kv-bytes-per-token", "1", "--dtype", "bf16,fp8"], "--kv-bytes-per-token"),
        (["--measured", "/nonexistent.json"], "/nonexistent.json"),
        (["--modle", "8b"], "--modle"),
        (["--dtype", "fp8_ds_mla"], "fp8_ds_mla"),
        (["--with-mtp"], "multi-token-prediction"),
        (["--prefix-hit-prefill", "1.1"], "--prefix-hit-prefill"),
        (["--prefix-hit-decode", "-1"], "--prefix-hit-decode"),
        (["8b"], "8b"),
        (["--tokens"], "--tokens"),
    ],
)
def test_wrong_usage_is_one_or_two_lines(argv: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvxfer plan: error: ")
    assert names in err
    assert len(err.splitlines()) <= 2
    assert "Traceback" not in err


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_imports_nothing_heavy(argv: list[str]) -> None:
    code = f"import sys; from kvxfer import plan; plan.main({argv!r}); print([m for m in {HEAVY} if m in sys.modules])"
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "[]"
