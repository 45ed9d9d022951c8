"""The verdict: seven rules in a fixed order, the first that holds decides.

A reason to skip vetoes; then comes whether the ratio has to be looked at first, then what speaks for a split. A rule
whose inputs are missing is open and asks for them. A verdict that an open rule before it could still change is
provisional, and one that rests on an assumption says what would settle it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvxfer.cost.rests_on import SETTLED_BY
from kvxfer.cost.situation import Finding, Situation
from kvxfer.cost.verdict_rules import (
    fast_links,
    offline_batch,
    parallelism_differs,
    short_prompts,
    slow_links,
    small_cluster,
    strict_itl,
)

NO_GROUND = "no ground to split"
UNDETERMINED = "undetermined"


@dataclass(frozen=True)
class Rule:
    """A situation, and what it says about a split if it is there."""

    name: str
    situation: str
    verdict: str
    find: Callable[[Situation], Finding]


RULES = (
    Rule("offline batch", "only total throughput counts", "skip: no throughput gain", offline_batch),
    Rule("short prompts", "short prompts, low concurrency", "skip: chunked prefill is enough", short_prompts),
    Rule("small cluster", "both pools too small to batch", "skip: lost utilisation can exceed the gain", small_cluster),
    Rule("slow links", "100 Gb/s or slower, no FP8 cache that helps", "compute the ratio first", slow_links),
    Rule("strict ITL", "strict p99 ITL target, prompts long or bursty", "strong candidate", strict_itl),
    Rule("parallelism", "best parallelism of the sides differs", "strong candidate", parallelism_differs),
    Rule("fast links", "200 Gb/s or more per path, or measured to take little", "favourable on arithmetic", fast_links),
)


@dataclass(frozen=True)
class Decision:
    """What the rules say of one path and dtype; `by` is the rule that decided, None when none holds."""

    answer: str
    by: str | None
    provisional: bool
    findings: Sequence[Finding]

    @property
    def needs(self) -> list[str]:
        """Inputs that the open rules lack, of those that could change the answer."""
        return _unlike(need for finding in self._decisive if finding.holds is None for need in finding.needs)

    @property
    def settled_by(self) -> list[str]:
        """What would replace the assumptions that the answer rests on."""
        return _unlike(SETTLED_BY[assumption] for finding in self._decisive for assumption in finding.rests_on)

    @property
    def _decisive(self) -> Sequence[Finding]:
        """The rules up to the one that decided."""
        names = [rule.name for rule in RULES]
        return self.findings if self.by is None else self.findings[: names.index(self.by) + 1]

    def as_record(self) -> dict[str, Any]:
        return {
            "answer": self.answer,
            "by": self.by,
            "provisional": self.provisional,
            "needs": self.needs,
            "settled_by": self.settled_by,
            "rules": [
                {"rule": rule.name, "situation": rule.situation, "verdict": rule.verdict, **asdict(finding)}
                for rule, finding in zip(RULES, self.findings, strict=True)
            ],
        }


def decide(situation: Situation) -> Decision:
    """Every rule is looked at, whether or not one before it decides."""
    findings = [rule.find(situation) for rule in RULES]
    for index, (rule, finding) in enumerate(zip(RULES, findings, strict=True)):
        if finding.holds:
            return Decision(rule.verdict, rule.name, any(one.holds is None for one in findings[:index]), findings)
    if any(finding.holds is None for finding in findings):
        return Decision(UNDETERMINED, None, True, findings)
    return Decision(NO_GROUND, None, False, findings)


def _unlike(texts: Any) -> list[str]:
    return list(dict.fromkeys(texts))
