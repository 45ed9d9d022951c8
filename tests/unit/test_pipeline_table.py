"""The table of a pipelined row, of figures worked out by hand."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from kvxfer.result.pipeline_table import render_pipelines

MS = 1_000_000
ALONE_IN_CHUNKS = {"chunk_tokens": 256, "alone_p50_ns": 85 * MS}


def cut(layers: int, total_ms: int, **more: Any) -> dict[str, Any]:
    return {
        "cut": str(layers),
        "layers_per_send": layers,
        "chunk_tokens": None,
        "sends": 8 // layers,
        "total_p50_ns": total_ms * MS,
        "total_ci95_ns": [total_ms * MS - MS, total_ms * MS + 2 * MS],
        "exposed_ns": (total_ms - 80) * MS,
        "predicted_exposed_ns": 11 * MS,
        "hidden_share": 0.75,
        "alone_p50_ns": 41 * MS,
        "slowdown": 0.034,
        "critical": {"computed_chunk": 0, "computed_layer": 7, "sends_after": 0},
        "break_even_tokens": 48,
        **more,
    }


def printed(cuts: list[dict[str, Any]], best: str, ties: list[str], predicted: int | None = 3, **compute: Any) -> str:
    serial = next(one for one in cuts if one["cut"] == "8")
    row = {
        "pipeline": {
            "compute": {
                "kind": "timed",
                "source": "--compute",
                "layers": 8,
                "layer_ns": 10 * MS,
                "alone_p50_ns": 80 * MS,
                **compute,
            },
            "serial": {"total_p50_ns": serial["total_p50_ns"]},
            "rounds": 7,
            "cuts": cuts,
            "best": {"cut": best, "ties": ties, "predicted_layers": predicted},
        }
    }
    console = Console(width=120, file=io.StringIO())
    render_pipelines([{"pipeline": None}, row], "loopback", lambda _: "512 tokens", console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_row_for_each_cut_and_what_was_best() -> None:
    text = printed([cut(1, 90), cut(2, 100, break_even_tokens=None, hidden_share=-0.04), cut(8, 120)], "1", [])
    assert text.count("Pipelining, 512 tokens (loopback)") == 1
    first, second, serial = (line for line in text.splitlines() if "±" in line and "%" in line and "ms" not in line)
    assert " ".join(first.split()) == "1 8 90.0 ± 2.2 % 10.0 11.0 75 41.0 3.4 layer 8 + 0 48"
    assert second.split()[-1] == "never"
    assert " -4 " in second
    assert serial.startswith("8 (serial)")
    assert serial.split()[-1] == "–"
    said = " ".join(text.split())
    assert "Compute alone 80.0 ms: 8 layers of 10.0 ms with the CPU free" in said
    assert "Best of these: 1, total 90.0 ms, 25.0 % less than serial's; no other is as good." in said
    assert "Of every number of layers the model says 3." in said


def test_ties_chunks_and_serial_as_the_best_are_said() -> None:
    chunked = cut(
        4, 121, cut="4x256", chunk_tokens=256, critical={"computed_chunk": 1, "computed_layer": 3, "sends_after": 2}
    )
    text = printed([chunked, cut(8, 120)], "8", ["4x256"], kind="layers", mfu=0.5, chunked=[ALONE_IN_CHUNKS])
    said = " ".join(text.split())
    assert "chunk 2, layer 4 + 2" in said
    assert "Best of these: 8, total 120 ms, serial itself; not to be told from it: 4x256." in said
    assert "Compute alone 80.0 ms, 85.0 ms in chunks of 256 tokens: 8 layers" in said
    assert "in torch" in said
    assert "MFU 50 % of the peak measured here." in said


def test_chunks_of_one_token_are_said_so() -> None:
    text = printed([cut(1, 90), cut(8, 120)], "1", [], chunked=[ALONE_IN_CHUNKS | {"chunk_tokens": 1}])
    assert "85.0 ms in chunks of 1 token: 8 layers" in " ".join(text.split())


def test_serial_alone_is_the_best_of_no_others_and_tells_nothing_of_them() -> None:
    said = " ".join(printed([cut(8, 120)], "8", [], predicted=None).split())
    assert "Best of these: 8, total 120 ms, serial itself; no other was measured." in said
    assert "do not tell what a send costs, and so not which number of layers would be best" in said
    assert "the model says" not in said
