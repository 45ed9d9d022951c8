"""Line rates by number and by name."""

from __future__ import annotations

import json

import pytest

from kvxfer.errors import UsageError
from kvxfer.topology.links import PLACES, link_rates, parse_links


def test_numbers_and_names_in_order_without_repetitions() -> None:
    assert parse_links("100, 200,NDR,100gbe,12.5,4e2") == [100.0, 200.0, 400.0, 12.5]


@pytest.mark.parametrize("text", ["-1", "0", "-0", "inf", "nan", "-inf", "1e9", "1e-300", "", ",", "100,", "100,,200"])
def test_refused_with_the_option_named(text: str) -> None:
    with pytest.raises(UsageError, match="--link"):
        parse_links(text)


def test_unknown_name_suggests_the_nearest_and_lists_all() -> None:
    with pytest.raises(UsageError, match=r"did you mean 100gbe\?") as caught:
        parse_links("100gbt")
    assert all(name in str(caught.value) for name in link_rates())


def test_every_rate_of_the_catalogue_has_a_source() -> None:
    path = next(place for place in PLACES if place.exists())
    catalogue = json.loads(path.read_text(encoding="utf-8"))
    assert "Nominal" in catalogue["about"]
    for name, entry in catalogue["links"].items():
        assert name == name.lower()
        assert entry["line_gbit"] > 0
        assert entry["source"]
