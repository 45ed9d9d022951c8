"""Two sides with libraries of their own: what a row says of decode's, and what it warns of."""

from __future__ import annotations

from kvxfer.control import messages as m
from kvxfer.measure.libraries import at_decode, told, warning_of


def opened(path: str, version: str) -> m.Opened:
    return m.Opened(path, version, "", needs_arm=False, moves_data=True, max_inflight=1, library_ns=0)


def described(**details: str) -> m.Described:
    return m.Described(["tcp/lo"], details)


def test_two_sides_alike_have_nothing_to_tell() -> None:
    one = opened("/lib/libucp.so.0", "1.22.0"), described(errors="peer", UCX_TLS="tcp")
    assert at_decode((one[0], one[0]), (one[1], one[1])) == {}
    assert warning_of({}) == ""


def test_a_library_elsewhere_is_told_and_no_reason_to_warn() -> None:
    found = at_decode((opened("/a/libucp.so.0", "1.22.0"), opened("/b/libucp.so.0", "1.22.0")), (described(),) * 2)
    assert found == {"decode path": "/b/libucp.so.0"}
    assert warning_of(found) == ""


def test_memory_of_another_kind_is_told_and_no_reason_to_warn() -> None:
    library = opened("", "1.22.0")
    found = at_decode((library, library), (described(memory="cuda"), described(memory="host")))
    assert found == {"decode memory": "host"}
    assert warning_of(found) == ""


def test_what_only_a_sender_has_to_tell_is_no_difference() -> None:
    library = opened("", "6.18")
    assert at_decode((library, library), (described(zerocopy="7 calls"), described())) == {}


def test_the_side_that_moved_the_pieces_tells_over_what() -> None:
    lanes, putting = (
        m.Described(["tcp/lo"], {"pull": "get"}),
        m.Described(["cma/memory"], {"protocol": "put zero-copy"}),
    )
    getting = m.Described(["posix/memory", "posix/memory"], {"protocol": "get software emulation"})
    assert told(putting, lanes, {}) == m.Described(["cma/memory"], {"protocol": "put zero-copy"})
    assert told(lanes, getting, {}) == m.Described(
        ["posix/memory"], {"pull": "get", "protocol": "get software emulation"}
    )
    assert told(lanes, lanes, {"decode UCX_TLS": "tcp"}) == m.Described(
        ["tcp/lo"], {"pull": "get", "decode UCX_TLS": "tcp"}
    )


def test_another_version_and_other_variables_are_warned_of() -> None:
    found = at_decode(
        (opened("/a", "1.22.0"), opened("/a", "1.13.1")),
        (described(UCX_TLS="tcp", errors="peer"), described(UCX_NET_DEVICES="eth1", errors="peer")),
    )
    assert found == {"decode UCX_NET_DEVICES": "eth1", "decode UCX_TLS": "(not set)", "decode version": "1.13.1"}
    assert warning_of(found) == (
        "the libraries of the two sides differ: at decode UCX_NET_DEVICES is eth1, at decode UCX_TLS is (not set), "
        "at decode version is 1.13.1"
    )
