"""Wrong options and what is not to be had here: one clear error, the right status, nothing left behind."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .processes import Place, free_port

GIB = 1 << 30


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "70bb"], ["70bb", "did you mean 70b"]),
        (["--model", "nowhere/config.json"], ["nowhere/config.json"]),
        (["--tokens", "0"], ["--tokens", "'0'"]),
        (["--tokens", "-1"], ["--tokens", "'-1'"]),
        (["--tokens", "abc"], ["--tokens", "'abc'"]),
        (["--tokens", "512,,8"], ["--tokens"]),
        (["--block-size", "0"], ["--block-size"]),
        (["--block-size", "1.5"], ["--block-size"]),
        (["--fragmentation", "1.5"], ["--fragmentation"]),
        (["--fragmentation", "-0.1"], ["--fragmentation"]),
        (["--fragmentation", "nan"], ["--fragmentation"]),
        (["--dtype", "bf61"], ["dtype", "bf61", "did you mean bf16"]),
        (["--backend", "tpc"], ["--backend", "did you mean tcp"]),
        (["--backend-option", "connections"], ["--backend-option"]),
        (["--op", "pusch"], ["--op", "did you mean push"]),
        (["--regions", "3"], ["--regions"]),
        (["--inflight", "0"], ["--inflight"]),
        (["--max-seconds", "0"], ["--max-seconds"]),
        (["--setup-repeats", "0"], ["--setup-repeats"]),
        (["--peer", "host"], ["--peer", "host:port"]),
        (["--peer", "127.0.0.1:0"], ["--peer", "port"]),
        (["--peer", "10.1.2.3:7420"], ["--peer", "keys"]),
        (["--key", "x"], ["--key", "--peer"]),
        (["--json", "nowhere/result.json"], ["nowhere"]),
        (["--json", "."], ["directory"]),
        (["--no-such-option"], ["--no-such-option"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("-") else "",
)
def test_wrong_usage(place: Place, arguments: list[str], says: list[str]) -> None:
    done = place.bench(*arguments)
    done.failed(2, *says)
    assert done.out == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ("{}", "has no num_hidden_layers"),
        ('{"num_hidden_layers": -1}', "num_hidden_layers"),
        (
            '{"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64, "share_kv_window": 8}',
            "share_kv_window",
        ),
        ("\x00\xff", "UTF-8"),
    ],
)
def test_malformed_config(place: Place, text: str, says: str) -> None:
    path = place.directory / "config.json"
    path.write_bytes(text.encode("latin-1"))
    place.bench("--model", str(path)).failed(2, "config.json", says)


def test_an_option_that_the_backend_does_not_know(place: Place) -> None:
    place.bench("--backend-option", "colour=3").failed(2, "colour")


def test_more_memory_than_there_is(place: Place) -> None:
    """Said before anything is allocated, and before a worker is started."""
    done = place.bench("--model", "405b", "--tokens", "1000000", "--setup-repeats", "5")
    done.failed(3, "not enough memory", "1000000 tokens", "405b", "fits")
    assert done.seconds < 5


@pytest.mark.parametrize("inflight", ["3", pytest.param("1", marks=pytest.mark.slow)])
def test_what_is_said_to_fit_fits(place: Place, inflight: str) -> None:
    """Pools are made smaller where memory is short, and the row is then hot."""
    server = place.serve("--max-gib", "0.001")
    arguments = ["--peer", server.address, "--inflight", inflight]
    done = place.bench(*arguments, "--tokens", "8192")
    done.failed(3, "--max-gib", "0.001 GiB", "--tokens ", " fits")
    fits = done.err.split("--tokens ")[1].split()[0]
    (row,) = place.measure(*arguments, "--tokens", fits)["results"]
    assert row["hot"]
    place.bench(*arguments, "--tokens", str(int(fits) + 16)).failed(3, "--max-gib")
    place.serves(server)


def test_the_server_itself_refuses_a_larger_pool(place: Place) -> None:
    """Whatever a client makes of the limit it was told."""
    import zmq

    from kvxfer import __version__
    from kvxfer.control import messages as m

    server = place.serve("--max-gib", "0.001")
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.rcvtimeo = 10_000
        client.connect(f"tcp://{server.address}")

        def ask(message: m.Message) -> m.FromServer:
            client.send(m.encode(message))
            while isinstance(answer := m.decode_from_server(client.recv()), m.Heartbeat):
                pass
            return answer

        assert isinstance(ask(m.Hello(m.PROTOCOL, __version__)), m.Welcome)
        assert isinstance(ask(m.Launch(-1)), m.Failed)
        assert isinstance(ask(m.Launch(m.MAX_PAIRS)), m.Failed)
        assert isinstance(ask(m.Launch()), m.Launched)
        refused = ask(m.Command(1, m.Allocate([GIB], [GIB], [])))
        assert isinstance(refused, m.Failed)
        assert refused.status == 3
        assert "--max-gib" in refused.message
        assert isinstance(ask(m.Dismiss()), m.Dismissed)
        client.send(m.encode(m.Bye()))
    place.serves(server)


@pytest.mark.parametrize("mib", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_too_little_address_space(place: Place, mib: int) -> None:
    """Too little for both pools together, and too little only beside what a worker has loaded by then."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))

    done = place.bench("--tokens", "200000", preexec_fn=limit)
    done.failed(3, "memory")


# --- ports


def test_a_control_port_in_use(place: Place) -> None:
    server = place.serve()
    second = place.start("kvxfer.serve", "--port", str(server.port)).wait(5)
    second.failed(3, f"127.0.0.1:{server.port}", "in use", "--port")
    place.serves(server)


def test_a_data_port_in_use(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = place.serve("--data-port", str(port))
        place.bench("--peer", server.address).failed(3, f"port {port}", "in use")
    place.left_alone(server)
    place.serves(server)


@pytest.mark.slow
def test_a_peer_that_is_not_there_or_says_nothing(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nobody = place.start_bench("--peer", f"127.0.0.1:{free_port()}")
        mute = place.start_bench("--peer", f"127.0.0.1:{silent.getsockname()[1]}")
        nobody.wait(8).failed(5, "cannot reach", "kvxfer serve")
        mute.wait(8).failed(5, "is not a kvxfer serve we can talk to")


# --- keys (which of them are let in: tests/access/test_keys.py)


@pytest.mark.slow
def test_bad_key_files(place: Place) -> None:
    public, secret = place.keys("host")
    peer = ("--peer", "127.0.0.1:7420")
    good = ("--key", str(secret), "--server-key", str(public))

    os.chmod(secret, 0o644)
    place.bench(*peer, *good).failed(2, "read by others")
    os.chmod(secret, 0o600)
    place.bench(*peer, "--key", str(public), "--server-key", str(public)).failed(2, "a secret key is wanted here")
    place.bench(*peer, "--key", str(secret), "--server-key", str(secret)).failed(2, "a public key is wanted here")
    for text in ("", "too short", "x" * 40 + "\n" + "y" * 40, "~" * 40, "#" * 40, "%w)0%" * 8, "\u20ac" * 40):
        broken = place.directory / "broken.key"
        broken.write_text(text)
        place.bench(*peer, "--key", str(secret), "--server-key", str(broken)).failed(2, str(broken))
    place.bench(*peer, "--key", str(secret), "--server-key", "nowhere.key").failed(2, "nowhere.key")
    os.chmod(secret, 0o640)
    place.bench(*peer, *good).failed(2, "read by others", "chmod 600")


def test_serve_beyond_this_host_wants_keys(place: Place) -> None:
    public, secret = place.keys("host")
    empty = place.directory / "empty"
    empty.mkdir()
    for arguments, says in (
        (["--bind", "0.0.0.0"], "keys"),
        (["--bind", "0.0.0.0", "--key", str(secret)], "--allow"),
        (["--key", str(secret)], "--key and --allow go together"),
        (["--key", str(secret), "--allow", str(empty)], "no public keys"),
        (["--key", str(secret), "--allow", str(public)], "no directory"),
        (["--port", "0"], "--port"),
        (["--max-gib", "0"], "--max-gib"),
        (["--advertise", "here"], "--advertise"),
    ):
        place.start("kvxfer.serve", *arguments).wait(5).failed(2, says)


def test_keys_are_never_overwritten(place: Place) -> None:
    _, secret = place.keys("host")
    before = secret.read_text()
    done = place.start("kvxfer.keys", "host", "--dir", str(secret.parent)).wait(5)
    assert (done.status, secret.read_text()) == (2, before)
    assert done.err.startswith("kvxfer keys: error: ")


# --- writing


def test_a_full_device(place: Place) -> None:
    done = place.bench("--json", "/dev/full")
    done.failed(3, "/dev/full", "No space left")
    assert "Transfers" in done.out


@contextmanager
def tiny_disk(place: Place) -> Iterator[Path]:
    """A file system of one page."""
    disk = place.directory / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to mount a file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_no_half_file(place: Place) -> None:
    with tiny_disk(place) as disk:
        done = place.bench("--json", str(disk / "result.json"))
        done.failed(3, "result.json", "No space left", "free some space")
        assert list(disk.iterdir()) == []
        old = disk / "old.json"
        old.write_text("old")
        place.bench("--json", str(old)).failed(3, "No space left")
        assert (old.read_text(), list(disk.iterdir())) == ("old", [old])


def test_a_full_disk_under_standard_output(place: Place) -> None:
    with open("/dev/full", "w") as full:
        place.bench(stdout=full).failed(3, "No space left")
        place.bench("--json", "-", stdout=full).failed(3, "No space left")


def test_a_reader_that_is_gone(place: Place) -> None:
    """Nobody reads the tables any more; the result file is written all the same."""
    path = place.directory / "result.json"
    reader, writer = os.pipe()
    os.close(reader)
    done = place.bench("--json", str(path), stdout=writer)
    os.close(writer)
    assert (done.status, done.err) == (1, "")
    assert json.loads(path.read_text())["exit_status"] == 0


@pytest.mark.slow
def test_closed_standard_streams(place: Place) -> None:
    """As under a supervisor that gives none."""
    path = place.directory / "result.json"
    done = place.bench("--json", str(path), "--quiet", preexec_fn=lambda: (os.close(0), os.close(1)))
    assert done.status == 0, done
    assert json.loads(path.read_text())["results"][0]["status"] == "ok"
