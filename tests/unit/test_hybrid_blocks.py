"""The blocks that vLLM makes of models with states, held against what it logged of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvxfer import cli
from kvxfer.cache.hybrid_blocks import hybrid_block_size, hybrid_notices
from kvxfer.cache.layout import Ranks
from kvxfer.cache.spec import CacheSpec
from kvxfer.errors import UsageError
from kvxfer.model.config import shape_from_config
from kvxfer.model.dtypes import BF16, FP8_E4M3
from kvxfer.model.presets import load_model

NEXT = load_model("qwen3-next-80b-a3b")


@pytest.mark.parametrize(
    ("tp", "expected"),
    [
        (1, 544),  # a state of 1,097,728 B, a token of 2,048: 536, and 34 blocks of 16
        (2, 544),
        (4, 272),  # a quarter of the state, and one of two KV heads on each rank
        (8, 144),
    ],
)
def test_qwen3_next(tp: int, expected: int) -> None:
    assert hybrid_block_size(CacheSpec(NEXT, BF16), Ranks(tp)) == expected


def test_nemotron_nano_9b_v2() -> None:
    """vLLM #24280: "672 tokens", with states in bf16."""
    config = {
        "model_type": "nemotron_h",
        "num_hidden_layers": 2,
        "hidden_size": 4480,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hybrid_override_pattern": "M*",
        "mamba_num_heads": 128,
        "mamba_head_dim": 80,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "mamba_ssm_cache_dtype": "bfloat16",
    }
    shape = shape_from_config(config, "nano", "config.json")
    assert hybrid_block_size(CacheSpec(shape, BF16), Ranks()) == 672


@pytest.mark.parametrize(("asked", "expected"), [(16, 544), (64, 576), (528, 1056), (544, 544), (1000, 1000)])
def test_blocks_that_are_asked_for_are_multiplied(asked: int, expected: int) -> None:
    assert hybrid_block_size(CacheSpec(NEXT, BF16, asked), Ranks()) == expected


def test_fp8_takes_twice_the_tokens() -> None:
    assert hybrid_block_size(CacheSpec(NEXT, FP8_E4M3), Ranks()) == 1072


@pytest.mark.parametrize("model", ["8b", "gpt-oss-20b", "deepseek-v3.2"])
def test_models_without_states_have_the_blocks_they_are_asked_for(model: str) -> None:
    spec = CacheSpec(load_model(model), BF16)
    assert hybrid_block_size(spec, Ranks()) == 16
    assert hybrid_notices([spec], Ranks(), Ranks(2)) == []


def test_a_notice_says_which_blocks_are_vllm_s() -> None:
    (notice,) = hybrid_notices([CacheSpec(NEXT, BF16)], Ranks(4), Ranks(2))
    assert "blocks of 544 tokens" in notice
    assert "--block-size 544" in notice
    assert hybrid_notices([CacheSpec(NEXT, BF16, 544)], Ranks(4), Ranks(2)) == []
    with pytest.raises(UsageError, match="--tp-decode 3 does not fit"):
        hybrid_notices([CacheSpec(NEXT, BF16)], Ranks(), Ranks(3, side="decode"))


@pytest.mark.parametrize("words", [["model", "qwen3-next-80b-a3b"], ["plan", "--model", "qwen3-next-80b-a3b"]])
def test_commands_say_it(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def notices(*more: str) -> list[str]:
        assert cli.main([*words, "--dtype", "bf16", *more, "--json", str(tmp_path / "it.json")]) == 0
        document: dict[str, Any] = json.loads((tmp_path / "it.json").read_text())
        return [notice for notice in document["notices"] if "--block-size" in notice]

    assert len(notices()) == 1
    assert "544 tokens" in capsys.readouterr().out
    assert notices("--block-size", "544") == []
    if words[0] == "plan":
        assert notices("--kv-bytes-per-token", "24576") == []
