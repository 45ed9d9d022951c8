"""The prefill that was measured here, on the terminal: its time, its spread, and how well it used the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from kvxfer.result.printing import Column, milliseconds, print_table
from kvxfer.result.statistics import median
from kvxfer.wording import plain

Record = dict[str, Any]

NOTES = (
    "prefill: one layer of each kind, timed warm, as often as the model has it; fastest, slowest: of its samples.",
    "MFU: the model's arithmetic as `full` counts it, over that time, of the peak of a square product measured here.",
)


def render_prefill(prompts: Sequence[Record], console: Console) -> None:
    """Print a result's `prefill`."""
    kinds = prompts[0]["kinds"]
    print_table(
        f"Prefill of {plain(prompts[0]['model'])} MEASURED here",
        [Column("tokens", [f"{one['computed_tokens']:,}" for one in prompts])],
        [
            Column("prefill\nms", [milliseconds(one["total_ns"]) for one in prompts]),
            Column("fastest\nms", [milliseconds(one["least_ns"]) for one in prompts]),
            Column("slowest\nms", [milliseconds(one["most_ns"]) for one in prompts]),
            Column("MFU\n%", [f"{100 * one['mfu']:.0f}" for one in prompts]),
            *(
                Column(
                    f"ms a layer:\n{kind['layers']} of kind {number + 1}",
                    [milliseconds(median(one["kinds"][number]["samples_ns"])) for one in prompts],
                )
                for number, kind in enumerate(kinds)
            ),
        ],
        console,
        [
            f"{plain(prompts[0]['source'])}.",
            *(f"Kind {number + 1}: {plain(kind['what'])}." for number, kind in enumerate(kinds)),
            *NOTES,
            *_noisy(prompts),
        ],
    )


def _noisy(prompts: Sequence[Record]) -> list[str]:
    disturbed = [f"{one['computed_tokens']:,} ({one['other_cpu_share']:.0%})" for one in prompts if one.get("noisy")]
    if not disturbed:
        return []
    told = f"at {', '.join(disturbed)} tokens; measure again on a quiet machine"
    return [f"noisy: others used this share of the CPUs meanwhile, {told}."]
