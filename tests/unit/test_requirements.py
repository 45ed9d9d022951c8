"""What a machine lacks is skipped with its reason, and fails where KVXFER_REQUIRE names it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
import requirements


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A requirement `thing` that this machine does not meet."""
    monkeypatch.setitem(requirements.PROBES, "thing", lambda: "nobody brought one")


@pytest.fixture
def fresh_probe() -> Iterator[None]:
    """The probe's answer is remembered for the whole run: not the ones found here."""
    requirements.missing_netns.cache_clear()
    yield
    requirements.missing_netns.cache_clear()


def test_what_is_there_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(requirements.PROBES, "thing", lambda: "")
    monkeypatch.setenv(requirements.REQUIRE, "thing")
    requirements.need("thing")


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("required", [None, "", "other", "things,another-thing"])
def test_what_is_missing_skips_with_its_reason(monkeypatch: pytest.MonkeyPatch, required: str | None) -> None:
    monkeypatch.delenv(requirements.REQUIRE, raising=False)
    if required is not None:
        monkeypatch.setenv(requirements.REQUIRE, required)
    with pytest.raises(pytest.skip.Exception, match="thing is missing here: nobody brought one"):
        requirements.need("thing")


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("required", ["thing", "other,thing", " other , thing "])
def test_what_is_missing_fails_when_required(monkeypatch: pytest.MonkeyPatch, required: str) -> None:
    monkeypatch.setenv(requirements.REQUIRE, required)
    with pytest.raises(pytest.fail.Exception, match="names thing, and it is missing here: nobody brought one"):
        requirements.need("thing")


def test_a_requirement_nobody_knows_is_a_mistake_in_the_test() -> None:
    with pytest.raises(KeyError):
        requirements.need("nothing that is known")


@pytest.mark.usefixtures("fresh_probe")
def test_namespaces_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert requirements.missing_netns() == "only root makes network namespaces"


@pytest.mark.usefixtures("fresh_probe")
@pytest.mark.parametrize("tool", ["ip", "tc"])
def test_namespaces_need_the_tools(monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == tool else f"/sbin/{name}")
    assert f"no `{tool}`" in requirements.missing_netns()


@pytest.mark.usefixtures("fresh_probe")
def test_namespaces_need_a_kernel_that_allows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(requirements, "_failure", lambda command: "not permitted" if "add" in command else "")
    assert requirements.missing_netns() == "not permitted"
