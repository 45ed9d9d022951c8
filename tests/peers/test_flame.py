"""bench/peers/flame.py: what it makes of perf's samples; and the case `options`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

PEERS = Path(__file__).parents[2] / "bench" / "peers"
SCRIPT = """\
101
\tffffffff81000001 copy
\tffffffff81000002 sendmsg
\t    55d000000003 [unknown]

102
\tffffffff81000001 copy
\tffffffff81000004 recvmsg

102
\tffffffff81000001 copy
\tffffffff81000004 recvmsg

"""
STACKS = Counter({("prefill", "[unknown]", "sendmsg", "copy"): 1, ("decode", "recvmsg", "copy"): 2})


@pytest.fixture(scope="module", autouse=True)
def peers() -> Iterator[None]:
    """The modules of bench/peers can be imported."""
    sys.path.insert(0, str(PEERS))
    yield
    sys.path.remove(str(PEERS))


def test_samples_are_folded_by_side_from_the_outermost_function() -> None:
    from flame import folded

    assert folded(SCRIPT, {101: "prefill", 102: "decode"}) == STACKS
    assert folded("", {}) == Counter()


def test_the_innermost_functions_are_counted_over_all_stacks() -> None:
    from flame import top

    assert top(STACKS + Counter({("decode", "idle"): 1}), 1) == "  75.0%  copy"


def test_a_frame_lies_upon_its_caller_and_is_as_wide_as_its_share() -> None:
    from flame import WIDTH, svg

    boxes = {}
    for group in ElementTree.fromstring(svg(STACKS + Counter({("prefill", "a<b>"): 1}))):
        title, box = group[0].text or "", group[1]
        boxes[title] = float(box.get("width", 0)), int(box.get("y", 0))
    assert boxes["all: 4 samples"][0] == WIDTH
    assert boxes["decode: 2 samples"][0] == boxes["copy: 2 samples"][0] == WIDTH / 2
    assert boxes["a<b>: 1 samples"][0] == WIDTH / 4
    levels = [boxes[f"{name}: 2 samples"][1] for name in ("decode", "recvmsg", "copy")]
    assert levels == sorted(levels, reverse=True)


def test_options_stand_beside_the_defaults_of_their_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import run
    from cases import options
    from contenders import kvxfer_backends
    from environment import Environment

    monkeypatch.setattr(run, "all_offers", kvxfer_backends.offers)
    one = run.Run(1, True, Environment(tmp_path, [("tcp", {"zerocopy": 1}), ("tcp", {"pin": 0})]), lambda _: None)
    options.measure(one)
    (comparison,) = one.comparisons
    assert [row.offer.name for row in comparison.rows] == ["kvxfer-tcp", "kvxfer-tcp:zerocopy=1", "kvxfer-tcp:pin=0"]
