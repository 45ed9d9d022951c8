"""--kv-bytes-per-token: a cache of as many bytes as the user says, laid out, planned and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer import bench, plan
from kvxfer.cache.given import given_kinds
from kvxfer.cache.layout import Ranks, rank_pairs
from kvxfer.cache.spec import CacheSpec
from kvxfer.cache.wire import on_the_wire
from kvxfer.errors import UsageError
from kvxfer.model.dtypes import BF16
from kvxfer.model.layers import GivenBytes, NoCache
from kvxfer.model.presets import load_model

REFUSED = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "sliding_memory": 3}
"""A config.json with a field that no family understands."""


@given(
    st.sampled_from(["8b", "deepseek-v3", "gemma-3-27b", "qwen3-next-80b-a3b"]),
    st.integers(1, 50),
    st.sampled_from([1, 2]),
    st.tuples(*[st.sampled_from([1, 2, 3, 5, 8])] * 2),
    st.integers(1, 3000),
)
@settings(max_examples=60, deadline=None)
def test_so_many_bytes_are_on_the_wire_whatever_the_model_and_the_ranks(
    model: str, times: int, regions: int, tp: tuple[int, int], tokens: int
) -> None:
    shape, sides = load_model(model), [Ranks(one) for one in tp]
    unit = sum(kind.grows for kind in shape.layer_kinds) * regions * tp[0] * tp[1]
    kinds = given_kinds(shape, times * unit, regions, *sides)
    spec = CacheSpec(shape, BF16, 16, regions, kinds=kinds)
    pairs = rank_pairs(*(spec.regions(side) for side in sides), "nhd")
    found = on_the_wire(pairs, spec.blocks(tokens))
    assert found.bytes == -(-tokens // 16) * 16 * times * unit
    assert found.busiest_rank_bytes == found.bytes // min(tp)


def test_layers_that_do_not_grow_keep_nothing() -> None:
    """Qwen3-Next: 12 of 48 layers have attention, and its own bytes per token come out as its own blocks."""
    shape = load_model("qwen3-next-80b-a3b")
    kinds = given_kinds(shape, 24_576, 1, Ranks(), Ranks())
    assert [isinstance(kind, NoCache) for kind in kinds] == [not kind.grows for kind in shape.layer_kinds]
    assert {kind.bytes_per_token for kind in kinds if isinstance(kind, GivenBytes)} == {2048}
    spec = CacheSpec(shape, BF16, kinds=kinds)
    assert (spec.request_bytes(100), len(spec.block_bytes)) == (112 * 24_576, 12)


@pytest.mark.parametrize(
    ("size", "regions", "tp", "says"),
    [
        (1000, 1, 1, "1,000 does not divide into 32 layers of llama-3.1-8b: 992 and 1,024 do"),
        (7, 1, 1, "does not divide into 32 layers of llama-3.1-8b: 32 does"),
        (96, 2, 1, "32 layers × 2 regions of llama-3.1-8b: 64 and 128 do"),
        (131_072 + 32, 1, 8, "ranks into 8: 131,072 and 131,328 do"),
    ],
)
def test_bytes_that_leave_a_rest_are_refused_with_those_that_do_not(
    size: int, regions: int, tp: int, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        given_kinds(load_model("8b"), size, regions, Ranks(tp), Ranks())


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert plan.main([*argv, "--json", "-"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_plan_says_what_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "gemma-3-27b", "--tokens", "100", "--kv-bytes-per-token", "81920", "--tp-decode", "4"]
    document = planned(capsys, *argv)
    (model,) = document["models"]
    assert (model["kv_bytes_per_token"], model["fixed_bytes_per_request"]) == (81_920, 0)
    assert model["bytes_by_tokens"] == {"100": 112 * 81_920}
    assert {row["bytes"] for row in document["ratio"]} == {112 * 81_920}
    assert document["assumptions"]["kv_bytes_per_token"] == 81_920
    assert any(notice.startswith("81,920 bytes of KV cache per token as given") for notice in document["notices"])
    assert plan.main(argv) == 0
    assert "81,920 B of KV cache per token (--kv-bytes-per-token)" in " ".join(capsys.readouterr().out.split())


def test_a_config_that_is_not_understood_is_as_many_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": REFUSED}))
    argv = ["--model", str(path), "--tokens", "16"]
    assert plan.main(argv) == 2
    assert "sliding_memory" in capsys.readouterr().err
    argv += ["--kv-bytes-per-token", "4096", "--params-active", "8e9"]
    document = planned(capsys, *argv, "--tp-prefill", "2")
    assert (document["models"][0]["layers"], document["models"][0]["family"]) == (4, "unknown")
    seed, full = document["ratio"]
    assert (seed["bytes"], full["pieces"], full["prefill_ms"]) == (16 * 4096, 4 * 2 * 16, seed["prefill_ms"])
    assert any("its config.json is not understood here" in notice for notice in document["notices"])


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": "four"}, {"num_hidden_layers": -1}, []])
def test_a_config_without_layers_is_still_refused(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert plan.main(["--model", str(path), "--kv-bytes-per-token", "4096"]) == 2
    assert capsys.readouterr().err.startswith("kvxfer plan: error: ")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--kv-bytes-per-token", "1000"], "992 and 1,024 do"),
        (["--kv-bytes-per-token", "0"], "--kv-bytes-per-token"),
        (["--kv-bytes-per-token", "1024", "--dtype", "bf16,fp8"], "--dtype names several"),
    ],
)
def test_bench_and_plan_refuse_before_they_start_anything(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert plan.main(argv) == 2
    assert says in capsys.readouterr().err
