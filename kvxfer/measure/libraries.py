"""The libraries of both sides, where they are not the same: a row tells of prefill's, and of what differs at decode."""

from __future__ import annotations

from kvxfer.control import messages as m

ABSENT = "(not set)"
OF_THE_SENDER = frozenset({"zerocopy"})
"""Details that the prefill side alone has to tell."""


def at_decode(opened: tuple[m.Opened, m.Opened], described: tuple[m.Described, m.Described]) -> dict[str, str]:
    """What differs at the decode side, by its name after "decode "; each pair is prefill's and decode's."""
    ours, theirs = (
        {"path": o.library_path, "version": o.library_version} | d.details
        for o, d in zip(opened, described, strict=True)
    )
    return {
        f"decode {name}": theirs.get(name, ABSENT)
        for name in sorted((ours.keys() | theirs.keys()) - OF_THE_SENDER)
        if ours.get(name) != theirs.get(name)
    }


def warning_of(differences: dict[str, str]) -> str:
    """Of what two sides should have in common, and "" when they do. Where a library lies is not of that."""
    telling = [f"{name} is {value}" for name, value in differences.items() if name != "decode path"]
    return f"the libraries of the two sides differ: at {', at '.join(telling)}" if telling else ""
