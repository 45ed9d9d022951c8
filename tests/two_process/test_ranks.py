"""Tensor- and pipeline-parallel ranks, other layouts, and every family's cache, moved for real and verified."""

from __future__ import annotations

import pytest

from kvxfer.model.dtypes import resolve_dtype
from kvxfer.model.presets import load_model

from .processes import HEAD_DIM, KV_HEADS, LAYERS, Place
from .test_runs import check_schema, check_setup, check_statistics

BLOCKS = 5  # of 70 tokens
REQUEST = BLOCKS * 16 * LAYERS * KV_HEADS * 2 * HEAD_DIM * 2


@pytest.mark.parametrize(
    ("prefill", "decode", "layout", "copies", "pieces"),
    [
        (1, 2, "nhd", 1, 2 * 16),  # one token's head in each piece
        (2, 1, "hnd", 1, 2),  # a head of all tokens of a block
        (2, 2, "nhd", 1, 2),  # whole blocks of one head each
        (4, 2, "nhd", 1, 2),  # duplicated heads at prefill are skipped
        (1, 4, "hnd", 2, 4),  # and replicated ones at decode sent twice
        (2, 2, "nhd-together", 1, 2 / LAYERS),  # all layers in one block
        (1, 2, "hnd-together", 1, 2 / LAYERS),  # a head of all layers
    ],
)
@pytest.mark.parametrize("op", ["push", pytest.param("pull", marks=pytest.mark.slow)])
def test_tensor_parallel_ranks(
    place: Place, op: str, prefill: int, decode: int, layout: str, copies: int, pieces: float
) -> None:
    result = place.measure("--op", op, "--tp-prefill", str(prefill), "--tp-decode", str(decode), "--layout", layout)
    check_schema(result)
    (row,) = result["results"]
    assert (row["status"], row["layout"], row["tp"]) == ("ok", layout, {"prefill": prefill, "decode": decode})
    assert row["bytes"] == copies * REQUEST
    assert row["descriptors"] == BLOCKS * LAYERS * pieces
    assert row["verified_bytes"] == 2 * row["bytes"]
    check_statistics(row)
    check_setup(row)
    place.left_alone()


@pytest.mark.parametrize("backend", ["shm", pytest.param("cma", marks=pytest.mark.slow)])
def test_ranks_over_memory(place: Place, backend: str) -> None:
    """Several peers in one process: they show the same pool, and all copy at once."""
    words = ("--tp-prefill", "2", "--tp-decode", "4", "--layout", "hnd", "--op", "both", "--inflight", "3")
    for row in place.measure("--backend", backend, *words)["results"]:
        assert row["bytes"] == 2 * REQUEST
        assert row["verified_bytes"] == 2 * row["bytes"]


@pytest.mark.parametrize(("prefill", "decode"), [("1", "3"), pytest.param("3", "1", marks=pytest.mark.slow)])
def test_pipeline_stages(place: Place, prefill: str, decode: str) -> None:
    (row,) = place.measure("--pp-prefill", prefill, "--pp-decode", decode, "--inflight", "2")["results"]
    assert (row["bytes"], row["descriptors"]) == (REQUEST, BLOCKS * LAYERS)
    assert row["verified_bytes"] == 2 * row["bytes"]


@pytest.mark.parametrize(
    ("model", "dtype", "tokens", "ranks"),
    [
        ("deepseek-v3.2", "fp8_ds_mla", 64, 2),  # latents and indexer keys, whole for every decode rank
        ("gpt-oss-20b", "bf16", 600, 1),  # two block tables: windows hold fewer blocks
        ("8b", "fp8_per_token_head", 64, 1),  # scales inline
        pytest.param("qwen3-next-80b-a3b", "bf16", 64, 1, marks=pytest.mark.slow),  # states
        pytest.param("gemma-3-27b", "fp8", 2000, 1, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", "bf16", 64, 4, marks=pytest.mark.slow),
    ],
)
def test_every_family_moves_its_bytes(place: Place, model: str, dtype: str, tokens: int, ranks: int) -> None:
    words = ["--model", model, "--dtype", dtype, "--tokens", str(tokens), "--tp-decode", str(ranks), "--op", "both"]
    result = place.measure(*words)
    check_schema(result)
    expected = load_model(model).request_bytes(tokens, 16, resolve_dtype(dtype))
    for row in result["results"]:
        assert row["bytes"] == ranks * expected
        assert row["verified_bytes"] == 2 * row["bytes"]
        assert row["verified"] == "full"


def test_layers_of_multi_token_prediction_move_too(place: Place) -> None:
    (row,) = place.measure("--model", "deepseek-v3", "--tokens", "32", "--with-mtp")["results"]
    assert row["bytes"] == load_model("deepseek-v3").with_mtp().request_bytes(32, 16, resolve_dtype("bf16"))
    assert row["descriptors"] == 2 * 62


def test_ranks_that_do_not_divide_the_heads_are_refused(place: Place) -> None:
    place.bench("--tp-decode", "3").failed(2, "--tp-decode 3 does not fit the 2 KV heads")


def test_bytes_per_token_that_the_user_gives_move_for_real(place: Place) -> None:
    """Of a model whose config.json is not understood: 3 layers × 2 regions × 2 decode ranks of 100 B per token."""
    model = place.write_model("odd", sliding_memory=3)
    place.bench("--model", model).failed(2, "sliding_memory")
    words = ["--model", model, "--kv-bytes-per-token", "1200", "--regions", "2", "--tp-decode", "2", "--layout", "hnd"]
    result = place.measure(*words)
    check_schema(result)
    (row,) = result["results"]
    assert (row["bytes"], row["descriptors"]) == (BLOCKS * 16 * 1200, BLOCKS * 3 * 2 * 2)
    assert row["verified_bytes"] == 2 * row["bytes"]
    assert result["assumptions"]["kv_bytes_per_token"] == 1200
    assert result["models"][0]["bytes_by_tokens"] == {"70": row["bytes"]}
    assert any("1,200 bytes of KV cache per token as given" in notice for notice in result["notices"])
    place.left_alone()


MAMBA = {
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention", "mamba"],
    "num_key_value_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
UNEQUAL = {"model_type": "deci", "num_key_value_heads": None, "num_key_value_heads_per_layer": [1, 2, 0]}


@pytest.mark.parametrize("layout", ["hnd", "nhd-together"])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 4), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_states_are_cut_by_their_own_heads(place: Place, layout: str, prefill: int, decode: int) -> None:
    """Two groups over four ranks: B and C of each (96 elements of 2 B) go to two of them."""
    model = place.write_model("mamba", **MAMBA)
    words = ["--model", model, "--layout", layout, "--tp-prefill", str(prefill), "--tp-decode", str(decode)]
    (row,) = place.measure(*words, "--seed", "3")["results"]
    once = load_model(model).request_bytes(70, 16, resolve_dtype("bf16"))
    assert row["bytes"] == once + (2 * 2 * 2 * 96 * 2 if decode == 4 else 0)
    assert row["verified_bytes"] == 2 * row["bytes"]


def test_layers_of_unequal_heads_that_lie_together_are_cut_alike_for_all_ranks(place: Place) -> None:
    """One head and two over 2 and 4 ranks: what rank 0 gets as whole blocks, others get a part of."""
    model = place.write_model("unequal", **UNEQUAL)
    words = ["--model", model, "--layout", "nhd-together", "--tp-prefill", "2", "--tp-decode", "4"]
    (row,) = place.measure(*words)["results"]
    assert row["bytes"] == BLOCKS * 16 * 4 * 2 * 2 * HEAD_DIM * 2
    assert row["verified_bytes"] == 2 * row["bytes"]
