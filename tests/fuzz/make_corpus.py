"""Write the corpora of the Python targets anew, from examples of the other tests.

    PYTHONPATH=tests:tests/unit python -m fuzz.make_corpus

Needed when a format changes; files called crash-* are left alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import msgspec
from example_result import example_result
from test_config import PLAIN
from test_families import BASE, EXAMPLES

from fuzz.commands import COMMANDS
from fuzz.mutate import mutated
from fuzz.targets import CORPUS
from kvxfer.control import keys
from kvxfer.control import messages as m
from kvxfer.control.pipe import LENGTH
from kvxfer.topology.links import link_rates

NAMELESS = m.HostInfo("host", "6.1", "cpu", 2, 1 << 34, 1 << 25, "boot", "net:[1]", "3.11", 0.5, "0.1.0")

ANSWERS: tuple[m.WorkerAnswer, ...] = (
    m.Opened("/lib/x.so", "1.2", "127.0.0.1:7421", False, True, 256, 1000),
    m.Done(),
    m.Keys(b"KVXK" + bytes(16)),
    m.Prepared([4, 4], 65536),
    m.Verified(65536, 0, ""),
    m.Ran(bytes(16), bytes(16), bytes(16), 1, 0, 1, 1, 1, 1, 0),
    m.LayersBuilt(0, [[1000, 1001], [900, 950]], 1e11, "float32 on 2 CPU threads", False),
    m.Pipelined(bytes(16), bytes(16), bytes(48), bytes(48), [1, 2, 3], [4096, 4096, 4096], 0, 1),
    m.Copied(65536, 4, bytes(8)),
    m.Described(["tcp/lo", "tcp/lo"]),
)
OTHERS: tuple[m.Message, ...] = (
    m.Hello(m.PROTOCOL, "0.1.0"),
    m.Welcome(m.PROTOCOL, "0.1.0", NAMELESS, 1 << 33, ["tcp", "null"], "127.0.0.1", 1 << 30),
    m.Launch(),
    m.Launched(),
    m.Dismiss(1),
    m.Dismissed(),
    m.Failed(0, 5, "the decode worker was killed by SIGKILL"),
    m.Heartbeat(),
    m.Bye(),
)


def message() -> Iterator[bytes]:
    yield from (m.encode(m.Command(seq, body)) for seq, body in enumerate(COMMANDS, 1))
    yield from (m.encode(m.Answer(seq, body)) for seq, body in enumerate(ANSWERS, 1))
    yield from map(m.encode, OTHERS)
    yield b"\xdd\xff\xff\xff\xff"
    yield msgspec.msgpack.encode({"type": "Nobody"})


def pipe() -> Iterator[bytes]:
    beat = m.encode(m.Heartbeat())
    framed = LENGTH.pack(len(beat)) + beat
    yield from (b"", framed, framed * 3, framed[:-1], framed[:2], LENGTH.pack(0), LENGTH.pack(0xFFFFFFFF) + beat)


def config() -> Iterator[bytes]:
    configs: list[dict[str, Any]] = [PLAIN, *(BASE | example for example in EXAMPLES.values())]
    configs += [{"text_config": one, "vision_config": {"depth": 2}} for one in configs[:3]]
    configs += [one | {"num_nextn_predict_layers": 1} for one in configs[1:4]]
    yield from (json.dumps(one).encode() for one in configs)
    yield from (b"", b"{", b"[]", b"\xff", b"[" * 5000, b'{"num_hidden_layers": 1' + b"0" * 5000 + b"}", b'{"a": NaN}')
    rng = random.Random(1)
    yield from (mutated(json.dumps(one).encode(), rng) for one in configs)


def result() -> Iterator[bytes]:
    whole = example_result()
    yield json.dumps(whole).encode()
    for field in ("schema_version", "results", "scope", "ratio"):
        yield json.dumps({name: value for name, value in whole.items() if name != field}).encode()
    rng = random.Random(2)
    yield from (mutated(json.dumps(whole).encode(), rng, 1 << 16) for _ in range(12))


def key() -> Iterator[bytes]:
    for kind, zmq_example in (
        ("public", b"rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"),
        ("secret", b"JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6"),
    ):
        text = keys.HEADER.format(kind=kind).encode() + zmq_example + b"\n"
        yield from (text, text * 2, text[:-5], text.split(b"\n", 1)[1], text.replace(b"kvxfer", b"other"))
    yield from (b"", b"~" * 40, b"0" * 39, "€".encode() * 40, b"#\n" * 40)


def links() -> Iterator[bytes]:
    yield ",".join(link_rates()).encode()
    yield from (b"100,200,400", b"ndr", b"1e5", b"nan", b"-1,inf", b",", b"0x10", "４００".encode(), b"1" * 4000)


def load() -> Iterator[bytes]:
    mooncake = [{"timestamp": 7 * n, "input_length": 6755 - n, "output_length": n, "hash_ids": [n]} for n in range(4)]
    yield "\n".join(map(json.dumps, mooncake)).encode()
    azure = (
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50Z,396,109\n"
    )
    yield from (azure, azure[:-8], azure.replace(b"-16", b"-99"), azure.replace(b"374", b"x"))
    yield from (b"", b"512\n\n2048\n8192", b"0", b"1" * 5000, b"{", b"[1]", b"\xff", b'{"input_length": 1e400}')
    yield b'{"input_length": 1, "timestamp": 0}\n{"input_length": 1, "timestamp": 5e-324}'


def times() -> Iterator[bytes]:
    yield from (b"1000,10\n2000,25.5\n", b"tokens,prefill_s\n1,1e-3\n", b"n,ms\n", b"n,minutes\n1,1", b"2,1\n1,2")
    yield from (b"", b"1,nan", b"1,1e11\n1,1e-320", b"1," + b"9" * 5000, b"1,2,3", b"\xff")


def main() -> None:
    for make in (config, key, links, load, message, pipe, result, times):
        folder = CORPUS / make.__name__
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("[0-9]*"):
            path.unlink()
        for number, data in enumerate(dict.fromkeys(make())):
            (folder / f"{number:02}").write_bytes(data)


if __name__ == "__main__":
    main()
