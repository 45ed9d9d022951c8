"""Every file of the corpora, and some changes of each: what reads what others wrote survives it, and says why not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from kvxfer.errors import UsageError

from .mutate import mutated
from .run import corpus
from .targets import CORPUS, TARGETS

CHANGES = 15
"""Of each file."""

SLOW_S = 20.0
"""No input may keep a reader busy for so long, on a machine as loaded as can be."""


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_and_changes_of_it(name: str) -> None:
    inputs = corpus(CORPUS / name)
    assert len(inputs) >= 5
    rng = random.Random(name)
    for data in inputs:
        for one in (data, *(mutated(data, rng) for _ in range(CHANGES))):
            began = time.monotonic()
            try:
                TARGETS[name](one)
            except Exception as error:
                raise AssertionError(f"{name} with {one[:300]!r}") from error
            assert time.monotonic() - began < SLOW_S, one[:300]


def test_a_key_of_more_than_32_bits_in_five_characters() -> None:
    """Found by fuzzing: ZeroMQ's own decoder raised an error of another kind."""
    target: Callable[[bytes], None] = TARGETS["key"]
    target((CORPUS / "key" / "crash-z85-beyond-32-bits").read_bytes())


def test_a_target_that_fails_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a harness that catches too much cannot pass."""
    import fuzz.targets

    def broken(*_: object) -> None:
        raise KeyError("num_hidden_layers")

    monkeypatch.setattr(fuzz.targets, "read_config", broken)
    with pytest.raises(KeyError):
        TARGETS["config"](b"{}")
    monkeypatch.setattr(fuzz.targets, "read_config", lambda _: (_ for _ in ()).throw(UsageError("two\nlines")))
    with pytest.raises(AssertionError):
        TARGETS["config"](b"{}")
