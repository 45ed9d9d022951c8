"""One run of the comparison: its settings, what it has measured so far, and how much it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from environment import Environment
from goals import Goal, Unanswered
from job import Job
from jobs import scattered
from offer import Offer, all_offers
from rounds import Comparison, compare

MIB = 1 << 20
KIB = 1 << 10
PER_ROUND = 3
REGIONS_OF_70B = 80
REGIONS = 16


@dataclass
class Run:
    rounds: int
    quick: bool
    environment: Environment
    say: Callable[[str], None]
    offers: list[Offer] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    goals: list[Goal | Unanswered] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.offers = all_offers(self.environment)

    def offered(self, name: str) -> Offer | None:
        return next((offer for offer in self.offers if offer.name == name), None)

    def megabytes(self, op: str, piece: int) -> Job:
        """256 MiB in scattered pieces; 16 MiB in a quick run."""
        size = (16 if self.quick else 256) * MIB
        return scattered(op, piece, REGIONS, size // piece // REGIONS, cold=not self.quick)

    def of_70b(self, op: str, tokens: int) -> Job:
        """A request of Llama-3.1-70B in bf16: a block of 16 tokens is 64 KiB in each of 80 regions."""
        return scattered(op, 64 * KIB, REGIONS_OF_70B, max(1, tokens // 16))

    def compare(
        self, title: str, job: Job, offers: Iterable[Offer], per_round: int = PER_ROUND, anew: bool = False
    ) -> Comparison:
        """Measured once in a run, however many goals need it. `anew`: as rounds.compare() has it."""
        known = next((one for one in self.comparisons if one.title == title), None)
        if known is None:
            wanted = [offer for offer in offers if job.op in offer.ops]
            self.say(f"{title}: {', '.join(offer.name for offer in wanted)}")
            known = compare(title, job, wanted, self.rounds, per_round, self.environment, anew)
            self.comparisons.append(known)
        return known
