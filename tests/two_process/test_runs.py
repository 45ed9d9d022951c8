"""Whole runs between two processes here: what a result says is what was asked for, and what can be worked out."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

import jsonschema
import numpy as np
import pytest
from scipy import stats

from kvxfer.backend.probe import choose_backends

from .processes import ELEMENT_BYTES, HEAD_DIM, KV_HEADS, LAYERS, Place, free_port

PHASES = ("library", "context", "allocate", "register", "connect", "exchange", "prepare", "first", "other")


def check_schema(result: dict[str, Any]) -> None:
    schema = json.loads(resources.files("kvxfer.result").joinpath("schema.json").read_text())
    jsonschema.validate(result, schema, format_checker=jsonschema.FormatChecker())


def check_row(row: dict[str, Any]) -> None:
    """What holds for every measured row, worked out from what the row itself says was asked for."""
    assert (row["status"], row["error"]) == ("ok", None)
    blocks = math.ceil(row["tokens"] / row["block_size"])
    assert row["bytes"] == blocks * row["block_size"] * LAYERS * KV_HEADS * 2 * HEAD_DIM * ELEMENT_BYTES[row["dtype"]]
    runs = 1 + round(row["fragmentation"] * (blocks - 1))
    assert row["descriptors"] == runs * LAYERS * row["regions_per_layer"]
    assert len(row["post_ns"]) == len(row["samples_ns"]) == len(row["handover"]["samples_ns"])
    check_statistics(row)
    check_setup(row)


def check_statistics(row: dict[str, Any]) -> None:
    samples = np.array(row["samples_ns"])
    assert samples.min() > 0
    assert row["p50_ns"] == round(float(np.median(samples)))
    for name, p in (("p90_ns", 0.9), ("p99_ns", 0.99)):
        enough = len(samples) >= round(10 / (1 - p))
        assert row[name] == (round(float(np.percentile(samples, 100 * p))) if enough else None)
        enough_handover = len(row["handover"]["samples_ns"]) >= round(10 / (1 - p))
        assert (row["handover"][name] is not None) == enough_handover
    assert (row["min_ns"], row["max_ns"]) == (samples.min(), samples.max())
    assert row["handover"]["p50_ns"] == round(float(np.median(row["handover"]["samples_ns"])))
    if row["ci95_ns"] is None:
        assert len(samples) < 6
        assert not row["converged"]
    else:
        low, high = row["ci95_ns"]
        outside = np.count_nonzero(samples < low), np.count_nonzero(samples > high)
        assert all(2 * stats.binom.cdf(count - 1, len(samples), 0.5) <= 0.05 for count in outside)
        widest = max(high - row["p50_ns"], row["p50_ns"] - low)
        assert row["converged"] == (widest <= 0.02 * row["p50_ns"])


def check_setup(row: dict[str, Any]) -> None:
    setup = row["setup"]
    repeats = len(setup["cold_ns"]["samples"])
    for repeat in range(repeats):
        phases = [setup[f"{phase}_ns"]["samples"][repeat] for phase in PHASES]
        assert min(phases) >= 0
        assert sum(phases) == setup["cold_ns"]["samples"][repeat]
    cold = row["cold_pair_ns"]
    kept = [setup[f"{phase}_ns"]["samples"] for phase in ("connect", "exchange", "prepare", "first")]
    assert cold["samples"] == [sum(each) for each in zip(*kept, strict=True)]
    for phase in [*setup.values(), cold]:
        assert len(phase["samples"]) == repeats
        assert phase["max"] == max(phase["samples"])
        assert phase["p50"] == int(np.median(phase["samples"]))


def check_ratio(result: dict[str, Any]) -> None:
    """Every basis for every prompt length, and beside them every row that moved something, one request at a time."""
    moved = [row for row in result["results"] if row["status"] == "ok" and row["backend"] != "null"]
    rows = {row["id"]: row for row in moved if row["inflight"] == 1}
    assert {row["basis"] for row in result["ratio"]} == {"seed", "full"} | (
        {"layers"} if "prefill" in result else set()
    )
    seen = set()
    for ratio in result["ratio"]:
        for measured in ratio["measured"]:
            assert None not in measured.values()
            row = rows[measured["of"]]
            seen.add(measured["of"])
            assert (ratio["tokens"], ratio["dtype"], ratio["bytes"]) == (row["tokens"], row["dtype"], row["bytes"])
            assert measured["transfer_ms"] == row["p50_ns"] / 1e6
            assert measured["cold_ms"] == row["setup"]["cold_ns"]["p50"] / 1e6
            assert measured["cold_pair_ms"] == pytest.approx(row["cold_pair_ns"]["p50"] / 1e6, abs=1e-6)
            assert measured["percent"] == pytest.approx(100 * measured["transfer_ms"] / ratio["prefill_ms"])
            assert measured["scope"] == row["scope"]
        for link in ratio["links"]:
            assert link["transfer_ms"] == pytest.approx(ratio["bytes"] * 8 / link["line_gbit"] / 1e6)
    assert seen == rows.keys()


SCOPES = {"tcp": "loopback", "ucx": "loopback", "null": "loopback", "shm": "host", "cma": "host"}
"""What a backend's bytes go through here."""

TRANSPORTS = {"tcp": "tcp/lo", "ucx": "tcp/lo", "shm": "shm/memfd", "cma": "cma/process_vm"}


def check(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The whole result of a run that succeeded; returns its rows."""
    check_schema(result)
    scopes = list(dict.fromkeys(SCOPES[row["backend"]] for row in result["results"]))
    scope = scopes[0] if len(scopes) == 1 else "loopback"
    assert (result["exit_status"], result["scope"], result["verdict"]) == (0, scope, None)
    for row in result["results"]:
        check_row(row)
        assert row["scope"] == SCOPES[row["backend"]]
    check_ratio(result)
    assert any(f"both sides ran on this host ({', '.join(scopes)})" in notice for notice in result["notices"])
    rows: list[dict[str, Any]] = result["results"]
    assert len({row["id"] for row in rows}) == len(rows)
    return rows


@pytest.mark.parametrize(
    ("backend", "dtype", "regions"),
    [
        ("tcp", "bf16", 1),
        ("tcp", "fp16", 2),
        ("tcp", "fp8_e4m3", 1),
        ("tcp", "fp8_e5m2", 2),
        ("shm", "bf16", 2),
        ("cma", "fp8_e4m3", 1),
        ("ucx", "bf16", 1),
        pytest.param("tcp", "bf16", 2, marks=pytest.mark.slow),
        pytest.param("tcp", "fp16", 1, marks=pytest.mark.slow),
        pytest.param("tcp", "fp8_e4m3", 2, marks=pytest.mark.slow),
        pytest.param("tcp", "fp8_e5m2", 1, marks=pytest.mark.slow),
        pytest.param("shm", "fp8_e5m2", 1, marks=pytest.mark.slow),
        pytest.param("cma", "fp16", 2, marks=pytest.mark.slow),
    ],
)
def test_both_ways_of_every_dtype(place: Place, backend: str, dtype: str, regions: int) -> None:
    result = place.measure("--backend", backend, "--op", "both", "--dtype", dtype, "--regions", str(regions))
    rows = check(result)
    assert [(row["op"], row["dtype"], row["regions_per_layer"]) for row in rows] == [
        ("push", dtype, regions),
        ("pull", dtype, regions),
    ]
    for row in rows:
        assert row["transport"] == TRANSPORTS[backend]
        assert row["verified"] == "full"
        assert row["verified_bytes"] == 2 * row["bytes"]  # the first request of the last pair, and the last
        assert row["bandwidth_gbyte_s"] == row["bytes"] / row["p50_ns"]
        pairs = zip(row["handover"]["samples_ns"], row["samples_ns"], strict=True)
        assert all(handover >= transfer for handover, transfer in pairs)
        if backend == "tcp":  # a copy of so little may be over before the post is back
            assert np.median(row["post_ns"]) < row["p50_ns"]
        initiator = "prefill" if row["op"] == "push" else "decode"
        assert row["cpu_s_per_gib"][initiator] > 0  # where one side copies, the other has next to nothing to do
    references = {(one["of"], one["kind"]): one for one in result["references"]}
    assert references.keys() == {(row["id"], kind) for row in rows for kind in ("bulk", "memcpy")}
    for row in rows:
        bulk, copied = references[row["id"], "bulk"], references[row["id"], "memcpy"]
        assert (bulk["bytes"], bulk["descriptors"]) == (row["bytes"], 1)
        assert (copied["bytes"], copied["descriptors"]) == (row["bytes"], row["descriptors"])
    place.left_alone()


def test_phases_of_every_fresh_pair_sum_to_its_cold_time(place: Place) -> None:
    (row,) = check(place.measure("--setup-repeats", "3", "--max-seconds", "0.05"))
    assert len(row["setup"]["cold_ns"]["samples"]) == 3
    assert row["verified_bytes"] == 2 * row["bytes"]


@pytest.mark.parametrize("fragmentation", ["0.5", *(pytest.param(one, marks=pytest.mark.slow) for one in ("0", "1"))])
def test_fragmentation_sets_the_number_of_descriptors(place: Place, fragmentation: str) -> None:
    """129 tokens in blocks of 7: the last block is partly used and moves whole."""
    result = place.measure("--fragmentation", fragmentation, "--tokens", "129,7,1", "--block-size", "7")
    rows = check(result)
    assert [row["tokens"] for row in rows] == [129, 7, 1]
    assert rows[0]["bytes"] == 133 * LAYERS * KV_HEADS * 2 * HEAD_DIM * 2
    assert rows[0]["descriptors"] == {"0": 3, "0.5": 3 * 10, "1": 3 * 19}[fragmentation]
    assert [row["descriptors"] for row in rows[1:]] == [3, 3]


@pytest.mark.parametrize(
    ("backend", "op"),
    [("tcp", "push"), ("tcp", "pull"), ("shm", "push"), ("shm", "pull"), ("cma", "pull"), ("ucx", "push")],
)
def test_several_requests_at_once(place: Place, backend: str, op: str) -> None:
    (row,) = check(place.measure("--inflight", "4", "--op", op, "--backend", backend))
    assert row["inflight"] == 4
    assert row["plans"] >= 4
    assert row["verified_bytes"] == 2 * row["bytes"]


def test_more_bytes_than_a_chunk_over_more_connections(place: Place) -> None:
    options = ["connections=3", "chunk_kib=64", "pieces_per_call=5"]
    (row,) = check(place.measure("--tokens", "2048", *(word for one in options for word in ("--backend-option", one))))
    assert row["options"] == {"connections": 3, "chunk_kib": 64, "pieces_per_call": 5}
    assert row["transport"] == "tcp/lo"


def test_backends_side_by_side(place: Place) -> None:
    tcp, null = check(place.measure("--backend", "tcp,null"))
    assert (tcp["verified"], tcp["verified_bytes"]) == ("full", 2 * tcp["bytes"])
    assert (null["verified"], null["verified_bytes"]) == ("off", 0)
    assert null["bandwidth_gbyte_s"] is None
    assert null["cpu_s_per_gib"] == {"prefill": None, "decode": None}


def test_all_backends_side_by_side(place: Place) -> None:
    result = place.measure("--backend", "all")
    rows = check(result)
    assert [row["backend"] for row in rows] == choose_backends("all")
    assert [row["transport"] for row in rows] == [TRANSPORTS[row["backend"]] for row in rows]
    assert {one["of"] for one in result["references"]} == {row["id"] for row in rows}


def test_scopes_stand_beside_the_rows_that_differ_in_them(place: Place) -> None:
    done = place.bench("--backend", "tcp,shm")
    assert done.status == 0, done
    (shm,) = [line for line in done.out.splitlines() if line.startswith("shm") and "shm/memfd" in line]
    assert "host" in shm.split()
    assert "Transfers (loopback, host)" in done.out
    assert "host: both sides on this host through memory" in done.out


@pytest.mark.slow
def test_rows_come_in_the_order_of_the_options(place: Place) -> None:
    result = place.measure("--dtype", "bf16,fp8", "--op", "both", "--tokens", "33,16", "--max-seconds", "0.05")
    rows = check(result)
    asked = [(row["dtype"], row["op"], row["tokens"]) for row in rows]
    dtypes = ("bf16", "fp8_e4m3")
    assert asked == [(dtype, op, tokens) for dtype in dtypes for op in ("push", "pull") for tokens in (33, 16)]
    assert [model["dtype"] for model in result["models"]] == list(dtypes)


@pytest.mark.parametrize(("verify", "share"), [("sample", None), ("off", 0)])
def test_less_verification(place: Place, verify: str, share: float | None) -> None:
    (row,) = check(place.measure("--verify", verify, "--tokens", "2048"))
    assert row["verified"] == verify
    if verify == "off":
        assert row["verified_bytes"] == 0
    else:
        assert 0 < row["verified_bytes"] < 2 * row["bytes"]


@pytest.mark.slow
def test_the_seed_changes_nothing_of_the_sizes(place: Place) -> None:
    (row,) = check(place.measure("--seed", "12345678901"))
    assert row["verified_bytes"] == 2 * row["bytes"]


def test_a_required_transport_that_another_backend_has(place: Place) -> None:
    done = place.bench("--require-transport", "shm", "--quiet")
    done.failed(3, "tcp/lo carried the bytes", "--require-transport wants shm; give --backend shm with it")


def test_required_transport(place: Place) -> None:
    assert place.bench("--require-transport", "tcp", "--quiet").status == 0
    assert place.bench("--backend", "shm", "--require-transport", "shm", "--quiet").status == 0
    path = place.directory / "other.json"
    done = place.bench("--require-transport", "tcp/eth9", "--json", str(path))
    done.failed(3, "tcp/lo carried the bytes", "--require-transport wants tcp/eth9")
    assert "give --backend" not in done.err
    result = json.loads(path.read_text())
    check_schema(result)
    assert result["exit_status"] == 3
    (row,) = result["results"]
    assert row["status"] == "error"
    assert "tcp/eth9" in row["error"]


def test_quiet_prints_nothing(place: Place) -> None:
    done = place.bench("--quiet")
    assert (done.status, done.out, done.err) == (0, "", "")


def test_json_alone_on_standard_output(place: Place) -> None:
    done = place.bench("--json", "-")
    assert (done.status, done.err) == (0, "")
    check(json.loads(done.out))


def test_progress_goes_to_a_terminal_and_leaves_it_clean(place: Place) -> None:
    running = place.start_bench(terminal=True)
    done = running.wait()
    assert (done.status, done.err.strip()) == (0, "")
    for step in ("setup 1/1", "samples", "verifying", "references"):
        assert step in running.err
    assert "setup" not in place.start_bench("--quiet", terminal=True).wait().err


def test_through_serve(place: Place) -> None:
    server = place.serve()
    rows = check(place.measure("--peer", server.address, "--op", "both", "--setup-repeats", "2"))
    assert [row["transport"] for row in rows] == ["tcp/lo", "tcp/lo"]
    place.left_alone(server)
    place.serves(server)
    assert server.err.count("a run begins") == server.err.count("the run is over: the client is done") == 2


def test_an_advertised_address_is_none_of_a_backend_of_one_host(place: Place) -> None:
    server = place.serve("--data-port", str(free_port()), "--advertise", "192.0.2.1:9")
    check(place.measure("--peer", server.address, "--backend", "shm,cma"))
    place.left_alone(server)


def test_through_serve_with_keys(place: Place) -> None:
    public, secret = place.keys("client")
    server_public, server_secret = place.keys("server")
    server = place.serve("--key", str(server_secret), "--allow", str(public.parent))
    check(place.measure("--peer", server.address, "--key", str(secret), "--server-key", str(server_public)))


def test_backends_side_by_side_through_one_data_port(place: Place) -> None:
    """A firewall lets one port through; each backend's worker has its own listener."""
    server = place.serve("--data-port", str(free_port()))
    check(place.measure("--peer", server.address, "--backend", "tcp,null"))
