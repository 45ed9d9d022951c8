"""What is printed of a prefill that was measured here, and of the ratio to it."""

from __future__ import annotations

import io

from example_result import example_result
from rich.console import Console

from kvxfer.measure.layers import LayerTimes
from kvxfer.measure.prefill import Computed, prefill_here
from kvxfer.model.presets import load_model
from kvxfer.model.widths import shares
from kvxfer.result.tables import render

MS = 1_000_000


def test_it_stands_with_its_spread_its_mfu_and_what_it_is() -> None:
    shape = load_model("deepseek-v3")
    samples = [[4 * MS, 5 * MS, 7 * MS], [9 * MS, 10 * MS, 12 * MS]]
    times = LayerTimes(samples, 2e12, "float32 on 2 CPU threads", False)
    computed = [Computed(shape, shares(shape, 16)[0], times, tokens) for tokens in (256, 512)]
    result = example_result()
    result["prefill"] = [one.as_prefill() for one in computed]
    (row, *_) = result["ratio"]
    result["ratio"].append(row | {"basis": "layers", "prefill_ms": 595.0, "prefill_source": _named(computed)})
    printed = io.StringIO()
    render(result, Console(file=printed, width=160))
    text = " ".join(printed.getvalue().split())
    assert "Prefill of deepseek-v3 MEASURED here" in text
    mfu = [f"{100 * one.flop / 0.595 / 2e12:.0f}" for one in computed]
    assert f"256 595 534 717 {mfu[0]} 5.00 10.0 512 595 534 717 {mfu[1]} 5.00 10.0" in text
    assert "3 of kind 1" in text
    assert "Kind 2: MLA latent of 512 + 64; 256 experts of 2,048, 8 per token beside an MLP of 2,048." in text
    told = (
        "1/16 of each as on each of 16 devices that exchange nothing; a CPU's time is good for the shape of pipelining"
    )
    assert text.count(told) == 2  # below its table, and below the ratio's
    assert "layers: measured here: float32 on 2 CPU threads, real layers of random weights, one of each kind" in text
    assert "assumed prefill" not in text.split("ASSUMED line rates")[1]
    found = text.partition("Transfers")[0]
    assert "of its assumed prefill (seed)" in found  # what a CPU takes is no headline


def _named(computed: list[Computed]) -> str:
    return prefill_here(computed).named()


def test_others_on_the_cpus_are_told() -> None:
    shape = load_model("8b")
    times = LayerTimes([[4 * MS, 5 * MS, 7 * MS]], 2e12, "float32 on 2 CPU threads", False)
    result = example_result()
    result["prefill"] = [
        Computed(shape, shares(shape)[0], times, tokens, other_cpu_share=share).as_prefill()
        for tokens, share in ((128, 0.01), (256, 0.5))
    ]
    assert [one["noisy"] for one in result["prefill"]] == [False, True]
    printed = io.StringIO()
    render(result, Console(file=printed, width=160))
    told = "noisy: others used this share of the CPUs meanwhile, at 256 (50%) tokens"
    assert told in " ".join(printed.getvalue().split())
