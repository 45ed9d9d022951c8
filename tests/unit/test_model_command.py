"""`kvxfer model` from the outside: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kvxfer import cli, model_command
from kvxfer.model.presets import preset_names
from kvxfer.result.file import schema


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert model_command.main([*argv, "--json", "-"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", "gpt-oss-120b", "--tokens", "8192"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for word in (
        *("gpt-oss-120b: sliding window, 36 layers", "116,829,156,672 parameters", "sliding window of 128"),
        "(1,158,266,880 of them embedding and head)",
        *("9 blocks", "no bound", "36,864", "5,308,416", "307 (1.97×)", "9,378", "18,756"),
    ):
        assert word in text


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_shown(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert model_command.main([name]) == 0
    out, err = capsys.readouterr()
    assert name in out
    assert "…" not in out
    assert err == ""


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "deepseek-v3.2", "--dtype", "bf16,fp8_ds_mla", "--tokens", "16,8192")
    Draft202012Validator(schema()["properties"]["models"]).validate(found["models"])
    assert [model["kv_bytes_per_token"] for model in found["models"]] == [78_324, 48_068]
    assert found["models"][0]["bytes_by_tokens"]["8192"] == 8192 * 78_324
    assert found["models"][0]["naive_over_true"]["16"] == pytest.approx(3_997_696 / 78_324)
    assert found["models"][1]["naive_bytes_per_token"] is None
    assert found["descriptors"][1]["regions_per_layer"] == {"1": 61 * 512 * 2, "2": 61 * 512 * 2}
    (group,) = found["layer_groups"]
    assert group["layers"] == 61
    assert group["bytes_per_token"] == {"bf16": 1284, "fp8_ds_mla": 788}
    assert found["command"][:2] == ["kvxfer", "model"]


def test_only_dtypes_that_the_model_can_have_are_shown_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    def dtypes(name: str) -> list[str]:
        return [model["dtype"] for model in document(capsys, name)["models"]]

    assert dtypes("8b") == ["bf16", "fp8_e4m3", "fp8_per_token_head"]
    assert dtypes("deepseek-v3") == ["bf16", "fp8_e4m3"]
    assert dtypes("glm-5") == ["bf16", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla"]


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    plain, more = (document(capsys, "deepseek-v3", *argv) for argv in ((), ("--with-mtp",)))
    assert [found["model"]["layers"] for found in (plain, more)] == [61, 62]
    wide = document(capsys, "gpt-oss-20b", "--block-size", "64", "--tokens", "100")
    assert wide["models"][0]["bytes_by_tokens"] == {"100": 24 * 128 * 2048}
    assert wide["layer_groups"][0]["most_blocks"] == 3


def test_a_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}))
    found = document(capsys, str(path))
    assert found["models"][0]["kv_bytes_per_token"] == 2 * 2 * 64 * 2
    assert found["model"]["params_total"] is None
    assert any("not known here" in notice for notice in found["notices"])
    assert model_command.main([str(path)]) == 0
    assert "parameters not known" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["lama-3.1-70b"], "did you mean llama-3.1-70b?"),
        ([], "MODEL"),
        (["8b", "--dtype", "fp8_ds_mla"], "fp8_ds_mla"),
        (["8b", "--dtype", "x"], "'x'"),
        (["8b", "--tokens", "0"], "--tokens"),
        (["8b", "--block-size", "0"], "--block-size"),
        (["8b", "--with-mtp"], "multi-token-prediction"),
    ],
)
def test_wrong_usage_is_one_or_two_lines(argv: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert model_command.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert names in err
    assert len(err.splitlines()) <= 2
