"""Pipelined rows between two processes here: what they say is what was asked for, and adds up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer import _native

from .processes import LAYERS, Place
from .test_runs import check

TINY_DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 64,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": 32,
    "intermediate_size": 64,
    "kv_lora_rank": 16,
    "model_type": "deepseek_v32",
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size": 128,
}

LAYER_MS = 3
NS = 1_000_000


def check_pipeline(row: dict[str, Any], cuts: list[str]) -> dict[str, Any]:
    """What holds for the `pipeline` of every row with timed or spinning compute of LAYER_MS."""
    found: dict[str, Any] = row["pipeline"]
    assert [cut["cut"] for cut in found["cuts"]] == cuts
    compute = found["compute"]
    assert (compute["layers"], compute["layer_ns"]) == (LAYERS, LAYER_MS * NS)
    assert compute["alone_p50_ns"] >= LAYERS * LAYER_MS * NS
    assert found["rounds"] == len(compute["alone_samples_ns"]) >= 3
    alone_ns = {one["chunk_tokens"]: one["alone_p50_ns"] for one in compute["chunked"]}
    alone_ns[None] = compute["alone_p50_ns"]
    assert set(alone_ns) == {None, *(cut["chunk_tokens"] for cut in found["cuts"])}
    for cut in found["cuts"]:
        assert len(cut["total_samples_ns"]) == len(cut["compute_samples_ns"]) == len(cut["alone_samples_ns"])
        assert cut["total_p50_ns"] == round(float(np.median(cut["total_samples_ns"])))
        assert all(a >= b for a, b in zip(cut["total_samples_ns"], cut["compute_samples_ns"], strict=True))
        assert cut["exposed_ns"] == max(0, cut["total_p50_ns"] - alone_ns[cut["chunk_tokens"]])
        critical = cut["critical"]
        assert len(critical["ready_ns"]) == len(critical["usable_ns"]) == cut["sends"]
        if row["backend"] != "null":
            assert all(at > ready for ready, at in zip(critical["ready_ns"], critical["usable_ns"], strict=True))
    totals = {cut["cut"]: cut["total_p50_ns"] for cut in found["cuts"]}
    assert totals[found["best"]["cut"]] == min(totals.values()) <= found["serial"]["total_p50_ns"]
    assert found["serial"]["total_p50_ns"] == totals[str(LAYERS)]
    return found


@pytest.mark.parametrize("backend", [name for name, _ in _native.backends() if _native.present(name)])
def test_both_ways_of_every_backend(place: Place, backend: str) -> None:
    arguments = ["--pipeline", "1,2x40", "--compute", f"timed:{LAYER_MS}", "--backend", backend, "--op", "both"]
    rows = check(place.measure(*arguments))
    assert [row["op"] for row in rows] == ["push", "pull"]
    for row in rows:
        found = check_pipeline(row, ["1", "2x40", str(LAYERS)])
        each, chunked, serial = found["cuts"]
        assert (each["sends"], chunked["sends"], serial["sends"]) == (LAYERS, 4, 1)
        assert found["compute"]["alone_p50_ns"] == LAYERS * LAYER_MS * NS  # no sleep's error is in there
        assert each["critical"]["ready_ns"] == [layer * LAYER_MS * NS for layer in (1, 2, 3)]
        # Chunks of 40 and 30 tokens of 70; 2 layers of the first, its third, 2 of the second, its third.
        first, second = (LAYER_MS * NS * tokens // 70 for tokens in (40, 30))
        expected = [2 * first, 3 * first, 3 * first + 2 * second, 3 * first + 3 * second]
        assert chunked["critical"]["ready_ns"] == expected
        if backend == "null":
            assert row["verified_bytes"] == 0
        else:  # the first and the last request of the row, and of every cut the first, and the last of all
            assert row["verified_bytes"] == (2 + 3 + 1) * row["bytes"]
    place.left_alone()


def test_a_sweep_with_a_core_held(place: Place) -> None:
    (row,) = check(place.measure("--pipeline", "sweep", "--compute", f"spin:{LAYER_MS}"))
    found = check_pipeline(row, ["1", "2", str(LAYERS)])
    assert found["compute"]["kind"] == "spin"


def test_real_layers_and_a_prefill_of_them_beside(place: Place) -> None:
    pytest.importorskip("torch")
    result = place.measure("--pipeline", "1x32", "--compute", "layers", "--measure-prefill")
    (row,) = check(result)
    compute = row["pipeline"]["compute"]
    assert (compute["kind"], compute["layers"], compute["devices"]) == ("layers", LAYERS, 1)
    (kind,) = compute["kinds"]
    assert kind["layers"] == LAYERS
    assert compute["layer_ns"] == round(float(np.median(kind["samples_ns"])))
    total_ns = LAYERS * compute["layer_ns"]
    assert compute["mfu"] == pytest.approx(compute["flop"] / (total_ns / 1e9) / compute["peak_flop_s"])
    assert [cut["sends"] for cut in row["pipeline"]["cuts"]] == [3 * LAYERS, 1]
    (prefill,) = result["prefill"]
    assert (prefill["tokens"], prefill["computed_tokens"], prefill["flop"]) == (70, 70, compute["flop"])
    assert prefill["least_ns"] <= prefill["total_ns"] <= prefill["most_ns"]
    by_basis = {one["basis"]: one for one in result["ratio"]}
    assert list(by_basis) == ["seed", "full", "layers"]
    beside = by_basis["layers"]
    assert beside["prefill_ms"] == prefill["total_ns"] / 1e6
    assert beside["prefill_source"] == f"measured here: {prefill['source']}"
    assert beside["measured"][0]["of"] == row["id"]


def test_experts_and_latents_are_computed_too(place: Place, tmp_path: Path) -> None:
    """A tiny DeepSeek-V3.2: a dense layer, then mixtures, and an indexer in each; a rank's share of each."""
    pytest.importorskip("torch")
    model = tmp_path / "config.json"
    model.write_text(json.dumps(TINY_DEEPSEEK))
    ranks = ["--model", str(model), "--tp-prefill", "2", "--tp-decode", "2"]
    result = place.measure(*ranks, "--pipeline", "1", "--compute", "layers", "--measure-prefill")
    (row,) = result["results"]
    compute, (prefill,) = row["pipeline"]["compute"], result["prefill"]
    for found in (compute, prefill):
        assert [(kind["layers"], kind["what"]) for kind in found["kinds"]] == [
            (1, "MLA latent of 16 + 8, indexer key of 128; MLP of 64"),
            (2, "MLA latent of 16 + 8, indexer key of 128; 8 experts of 32, 2 per token beside an MLP of 32"),
        ]
        assert found["devices"] == 2
    assert "the indexer in plain torch operations" in prefill["source"]


def test_what_cannot_be_computed_is_refused_before_anything_moves(place: Place, tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(TINY_DEEPSEEK | {"hidden_act": "xielu"}))
    told = "cannot be computed here: the activation of its MLPs is 'xielu'"
    place.bench("--model", str(model), "--measure-prefill").failed(2, told)
    given = ["--kv-bytes-per-token", "4096", "--model", "deepseek-v3", "--with-mtp", "--measure-prefill"]
    place.bench(*given).failed(2, "cannot be computed here")
    pytest.importorskip("torch")
    place.bench("--measure-prefill", "--tokens", "70,600").failed(2, "600 tokens are too many to compute on a CPU")


def test_more_tokens_than_a_cpu_computes(place: Place) -> None:
    pytest.importorskip("torch")
    place.bench("--pipeline", "1", "--compute", "layers", "--tokens", "600").failed(2, "at most 512; lower --tokens")


def test_the_assumed_prefill_is_the_compute_unless_one_is_given(place: Place) -> None:
    result = place.measure("--pipeline", "1", "--tokens", "300,70")
    for row in check(result):
        (prefill,) = [
            one["prefill_ms"] for one in result["ratio"] if (one["tokens"], one["basis"]) == (row["tokens"], "full")
        ]
        compute = row["pipeline"]["compute"]
        assert compute["layer_ns"] == round(prefill * NS / LAYERS)
        assert compute["source"] == "assumed prefill (full)"
        (best,) = [cut for cut in row["pipeline"]["cuts"] if cut["cut"] == row["pipeline"]["best"]["cut"]]
        for ratio in result["ratio"]:
            for measured in ratio["measured"]:
                if measured["of"] == row["id"] and ratio["basis"] == "seed":  # another time than was computed
                    assert "exposed_ms" not in measured
                elif measured["of"] == row["id"]:
                    assert measured["exposed_ms"] == best["exposed_ns"] / 1e6
                    assert measured["exposed_percent"] == pytest.approx(
                        100 * measured["exposed_ms"] / ratio["prefill_ms"]
                    )


def test_another_compute_says_nothing_of_the_assumed_prefill(place: Place) -> None:
    result = place.measure("--pipeline", "1", "--compute", f"timed:{LAYER_MS}")
    assert check(result)[0]["pipeline"] is not None
    assert all("exposed_ms" not in measured for ratio in result["ratio"] for measured in ratio["measured"])


def test_several_ranks_and_layers_together(place: Place) -> None:
    ranks = ["--tp-prefill", "2", "--pp-decode", "3", "--pipeline", "1x32"]
    (row,) = place.measure(*ranks, "--compute", f"timed:{LAYER_MS}")["results"]
    each, _ = check_pipeline(row, ["1x32", str(LAYERS)])["cuts"]
    assert each["sends"] == 3 * LAYERS
    together = ["--layout", "hnd-together", "--pipeline", "1"]
    (row,) = place.measure(*together, "--compute", f"timed:{LAYER_MS}")["results"]
    each, _ = check_pipeline(row, ["1", str(LAYERS)])["cuts"]
    assert each["sends"] == 1  # a block holds all layers, so it is complete with the last


def test_without_verification(place: Place) -> None:
    result = place.measure("--pipeline", "1,2x100", "--compute", f"timed:{LAYER_MS}", "--verify", "off")
    (row,) = check(result)
    assert row["verified_bytes"] == 0
    told = "--pipeline 2x100: prompts of 70 tokens are no longer than a chunk, and leave as by --pipeline 2"
    assert told in result["notices"]


def test_the_table_names_the_best(place: Place) -> None:
    done = place.bench("--pipeline", "all", "--compute", f"timed:{LAYER_MS}")
    assert (done.status, done.err) == (0, "")
    assert "Pipelining, 70 tokens (loopback)" in done.out
    assert f"{LAYERS} (serial)" in done.out
    assert "Best of these: " in done.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pipeline", "4"], "give off, sweep, all, or layers per send from 1 to 3"),
        (["--pipeline", "1", "--compute", "gpu"], "--compute 'gpu' is not known"),
        (["--pipeline", "1", "--compute", "layers", "--model", "deepseek-v3", "--with-mtp"], "cannot be computed here"),
        (["--pipeline", "1", "--inflight", "2"], "--pipeline measures one request at a time"),
    ],
)
def test_bad_options(place: Place, arguments: list[str], says: str) -> None:
    place.bench(*arguments).failed(2, says)


def test_through_serve(place: Place) -> None:
    server = place.serve()
    arguments = ["--pipeline", "2", "--compute", f"timed:{LAYER_MS}", "--op", "both"]
    for row in check(place.measure("--peer", server.address, *arguments)):
        check_pipeline(row, ["2", str(LAYERS)])
    place.left_alone(server)
