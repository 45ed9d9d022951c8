"""A backend's options (--also) beside its defaults, on a prompt of 2048 tokens. Says no more than the figures."""

from __future__ import annotations

from run import Run

ORDER = 12
NAME = "options"


def measure(run: Run) -> None:
    for backend in sorted({backend for backend, _ in run.environment.variants}):
        variants = [offer for offer in run.offers if offer.is_backend(backend)]
        run.compare(f"options of {backend}, 2048 tokens, push", run.of_70b("push", 64 if run.quick else 2048), variants)
