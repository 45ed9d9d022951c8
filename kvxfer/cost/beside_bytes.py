"""What a line rate says nothing of: α of a transfer, γ of its pieces; what is assumed of them, and what they may add.

Fits of backends that cross a network tell it, those of the measured result or else kvxfer's own of tcp, and beside them
what is reported of an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvxfer.cost.assumptions import Assumptions
from kvxfer.cost.fitted import Fitted
from kvxfer.cost.priors import TCP_ALPHA_US, TCP_FIT, TCP_GAMMA_US, USUAL_POSTING_US
from kvxfer.wording import digits, three_digits

WITHIN_ONE_HOST = ("shm", "cma", "null")
"""Backends of memory: what a piece costs there says nothing of a network's."""

SETTLED_BY = "kvxfer bench --fit --peer between the two hosts measures both"
BESIDES = "a routing hop, allocation at decode, posting"


def line_rate_notices(
    assumptions: Assumptions, pieces: Mapping[int, float], prefill_ms: Mapping[int, float], fitted: Sequence[Fitted]
) -> list[str]:
    """Sentences about α and γ of the line rates; `pieces` are those that one rank posts, by tokens of a prompt.

    Told of the shortest and the longest prompt, of whose prefill it is a share: what is little of the one may be most
    of the other.
    """
    alpha_ms, gamma_us = assumptions.fixed_ms, assumptions.gamma_us
    assumed = (
        f"α = {alpha_ms:g} ms for a transfer (--fixed-ms) and γ = {gamma_us:g} µs for each of its pieces (--gamma-us)"
    )
    notices = [f"assumed of every line rate: {assumed}, before its bytes go; {SETTLED_BY}"]
    if not alpha_ms:
        notices.append(
            f"costs of a request beside its bytes ({BESIDES}) are in no line rate: they dominate short prompts; "
            "--fixed-ms"
        )
    if pieces and not (alpha_ms and gamma_us):
        notices += [
            _may_add(assumptions, tokens, pieces[tokens], prefill_ms[tokens], fitted)
            for tokens in sorted({min(pieces), max(pieces)})
            if pieces[tokens]
        ]
    return notices


def _may_add(assumptions: Assumptions, tokens: int, pieces: float, prefill_ms: float, fitted: Sequence[Fitted]) -> str:
    """Of what was not given."""
    prompt = f"{tokens:,} token{'s' * (tokens > 1)} in {pieces:,.0f} piece{'s' * (pieces > 1)}"
    told = f"{prompt}, whose prefill takes {three_digits(prefill_ms)} ms"
    if assumptions.gamma_us:
        shown = [_added(alpha_us, 0.0, whose, 0.0, prefill_ms) for alpha_us, _, whose in _fits(fitted)]
        return f"α may add to {told}: {'; '.join(shown)}"
    low_ms, high_ms = (us * pieces / 1e3 for us in USUAL_POSTING_US)
    shown = [
        _added(0.0 if assumptions.fixed_ms else alpha_us, gamma_us, whose, pieces, prefill_ms)
        for alpha_us, gamma_us, whose in _fits(fitted)
    ]
    shown.append(
        f"{three_digits(low_ms)} … {three_digits(high_ms)} ms ({_percent(low_ms, prefill_ms)} … "
        f"{_percent(high_ms, prefill_ms)}) for the pieces alone where each takes {USUAL_POSTING_US[0]:g} … "
        f"{USUAL_POSTING_US[1]:g} µs, as is reported of vLLM with NIXL"
    )
    return f"{'γ' if assumptions.fixed_ms else 'α and γ'} may add to {told}: {'; '.join(shown)}"


def _fits(fitted: Sequence[Fitted]) -> list[tuple[float, float, str]]:
    """α and γ in µs, and whose they are: of the result's fits over a network's stack, or else of kvxfer's own."""
    found = [
        (
            one.fitted.alpha_ns / 1e3,
            one.fitted.gamma_ns / 1e3,
            f"the measured fit of {one.backend} {one.op} ({one.scope})",
        )
        for one in fitted
        if one.backend not in WITHIN_ONE_HOST
    ]
    return found or [(TCP_ALPHA_US, TCP_GAMMA_US, TCP_FIT)]


def _added(alpha_us: float, gamma_us: float, whose: str, pieces: float, prefill_ms: float) -> str:
    added_ms = (alpha_us + gamma_us * pieces) / 1e3
    share = _percent(added_ms, prefill_ms)
    figures = [f"α {three_digits(alpha_us)} µs"] * bool(alpha_us) + [f"γ {digits(gamma_us, 2)} µs"] * bool(gamma_us)
    return f"{three_digits(added_ms)} ms ({share} of that) by {whose} ({', '.join(figures)})"


def _percent(ms: float, prefill_ms: float) -> str:
    return f"{digits(100 * ms / prefill_ms, 2)} %"
