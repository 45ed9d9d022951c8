"""The libraries of both sides, where they are not the same: a row tells of prefill's, and of what differs at decode."""

from __future__ import annotations

from kvxfer.control import messages as m

ABSENT = "(not set)"
OF_ONE_SIDE = frozenset({"zerocopy", "protocol"})
"""Details that only the side has to tell that sends the bytes, or puts or gets them."""


NOT_IN_COMMON = frozenset({"decode path", "decode memory"})
"""Differences that two sides may well have: where a library lies, and what kinds of memory it moves between."""


def told(found: m.Described, there: m.Described, differences: dict[str, str]) -> m.Described:
    """What carried a row's bytes, each lane once, and how, of what both sides describe.

    A library that tells how it moved the pieces ("protocol") does so at the side that moved them, which is decode where
    it gets them. Its lanes are what carried them; the other side knows only what they might have gone over.
    """
    mover = there if "protocol" in there.details.keys() - found.details.keys() else found
    moved = {name: mover.details[name] for name in ("protocol",) if name in mover.details}
    return m.Described(list(dict.fromkeys(mover.lanes)), found.details | differences | moved)


def at_decode(opened: tuple[m.Opened, m.Opened], described: tuple[m.Described, m.Described]) -> dict[str, str]:
    """What differs at the decode side, by its name after "decode "; each pair is prefill's and decode's."""
    ours, theirs = (
        {"path": o.library_path, "version": o.library_version} | d.details
        for o, d in zip(opened, described, strict=True)
    )
    return {
        f"decode {name}": theirs.get(name, ABSENT)
        for name in sorted((ours.keys() | theirs.keys()) - OF_ONE_SIDE)
        if ours.get(name) != theirs.get(name)
    }


def warning_of(differences: dict[str, str]) -> str:
    """Of what two sides should have in common, and "" when they do."""
    telling = [f"{name} is {value}" for name, value in differences.items() if name not in NOT_IN_COMMON]
    return f"the libraries of the two sides differ: at {', at '.join(telling)}" if telling else ""
