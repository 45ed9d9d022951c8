"""What observed transfers say, on the terminal: an answer, its parts, what would help, what was assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from kvxfer.result.printing import Column, figure, print_notices, print_pairs, print_table, print_trimmed
from kvxfer.wording import plain

Row = Mapping[str, Any]

TERMS = {"posting": "posting descriptors", "fixed": "fixed cost", "wire": "bytes on the wire"}
ANSWERS = {
    "posting": "descriptor posting binds",
    "fixed": "fixed cost binds",
    "wire": "bandwidth binds",
    "wrong transport": (
        "the wire binds, far below any link: something else carries the bytes (wrong transport?), or this was a first "
        "request with its set-up"
    ),
    None: "undetermined: what binds does not follow from these figures",
}
NOTE = (
    "least – most that the figures and what is assumed allow. Posting and wire are taken to be one after the other "
    "unless that is more than the whole; where they overlap, wire is what it adds."
)


def render_observed(document: Row, console: Console) -> None:
    """Print what --observed found (the object that --json writes)."""
    observed = document["observed"]
    for number, one in enumerate(observed["explained"]):
        if number:
            console.print()
        _print_one(one, console)
    console.print()
    print_pairs([("assumed", _prior(prior)) for prior in observed["priors"]], console)
    if observed["tolerance_percent"] > 1:
        what = "they fit together" if len(observed["explained"]) > 1 else "its figures fit what is assumed"
        print_pairs([("beware", f"{what} within {observed['tolerance_percent']:g} % only")], console)
    print_notices(document["notices"], console)


def _print_one(one: Row, console: Console) -> None:
    observation, terms = one["observation"], one["terms"]
    print_trimmed(Text(_observed(observation), style="bold"), console)
    pairs = [("answer", _answer(one)), *_derived(one)]
    print_pairs(pairs, console)
    names = [TERMS[name] for name in terms]
    columns = [Column("ms", [_span(term["ms"]) for term in terms.values()])]
    if observation["ms"] is not None:
        columns.append(Column("% of it", [_span(term["percent"], "%") for term in terms.values()]))
    print_table("Where the time goes", [Column("part", names, words=True, share=3)], columns, console, [NOTE])
    if one["helps"]:
        helps = one["helps"]
        print_table(
            "What would help, at most",
            [Column("", [each["what"] for each in helps], words=True, share=1)],
            [
                Column("ms", [figure(each["at_most_ms"]) for each in helps]),
                Column("%", [f"{each['at_most_percent']:.0f}" for each in helps]),
            ],
            console,
        )
    if one["measure"]:
        console.print()
        print_pairs([("measure", what) for what in one["measure"]], console)


def _observed(observation: Row) -> str:
    parts = [f"{observation[name]:,.0f} {name}" for name in ("bytes", "descriptors") if observation[name] is not None]
    for name, told in (("ms", "in {} ms"), ("post_ms", "{} ms of posting"), ("wire_ms", "{} ms of data")):
        if observation[name] is not None:
            parts.append(told.format(figure(observation[name])))
    source = "" if observation["source"] == "given" else f" ({plain(observation['source'])})"
    return f"Observed: {', '.join(parts)}{source}"


def _answer(one: Row) -> str:
    if one["observation"]["ms"] is None:
        return "undetermined: without the time of the whole transfer nothing is known of what binds"
    told = ANSWERS[one["binds"]]
    wire = one["terms"]["wire"]["percent"][1]
    if one["binds"] in ("posting", "fixed"):
        told += f"; a faster link wins at most {wire:.0f} %"
    return told


def _derived(one: Row) -> list[tuple[str, str]]:
    """What follows from the figures alone."""
    size, count, ms = (one["observation"][name] for name in ("bytes", "descriptors", "ms"))
    post, usual = one["post_us_per_descriptor"], one["usual_post_us_per_descriptor"]
    told = []
    if size is not None and count is not None:
        told.append(f"{size / count:,.0f} bytes a descriptor")
    if post is not None:
        told.append(f"{post:.1f} µs to post a descriptor (vLLM with NIXL: {usual[0]:g} to {usual[1]:g} in reports)")
    if size is not None and ms is not None:
        told.append(f"{figure(size / ms / 1e6)} GB/s in all")
    return [("that is", ", ".join(told))] if told else []


def _span(ends: Sequence[float], unit: str = "") -> str:
    low, high = (f"{end:.0f}" if unit else figure(end) for end in ends)
    return low if low == high else f"{low} – {high}"


def _prior(prior: Row) -> str:
    low, high = (figure(prior[end]) if prior[end] else "0" for end in ("low", "high"))
    return f"{prior['name']}: {low} – {high} {prior['unit']}, {prior['source']}"
