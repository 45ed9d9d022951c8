"""What reads bytes that others wrote, each as a function of those bytes. It returns, or raises what is a bug.

The corpus of a target is tests/fuzz/corpus/NAME/; what was once found to break it is kept there too, as crash-*.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec

from kvxfer.control import keys, messages
from kvxfer.control.pipe import Pipe, PipeClosedError
from kvxfer.cost.load_file import read_load
from kvxfer.cost.measured import measured_rows
from kvxfer.cost.prefill import attention_flop
from kvxfer.cost.prefill_file import read_prefill_times
from kvxfer.cost.prefill_layers import prefill_layers
from kvxfer.errors import UsageError
from kvxfer.model.config import read_config
from kvxfer.model.dtypes import DTYPES
from kvxfer.result.file import SCHEMA_VERSION, read_result
from kvxfer.topology.links import LARGEST_GBIT, parse_links

CORPUS = Path(__file__).parent / "corpus"

DIRECTIONS: tuple[tuple[object, Callable[[bytes], messages.Message]], ...] = (
    (messages.ToWorker, messages.decode_to_worker),
    (messages.FromWorker, messages.decode_from_worker),
    (messages.ToServer, messages.decode_to_server),
    (messages.FromServer, messages.decode_from_server),
)

_directory = Path(tempfile.mkdtemp(prefix="kvxfer-fuzz-"))
atexit.register(shutil.rmtree, _directory, ignore_errors=True)


def _file(name: str, data: bytes) -> Path:
    path = _directory / name
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    return path


def message(data: bytes) -> None:
    """A message of any direction, or a DecodeError; what is taken survives the wire."""
    for union, decode in DIRECTIONS:
        try:
            taken = decode(data)
        except msgspec.DecodeError:
            continue
        assert isinstance(taken, get_args(union) or union), type(taken)  # type: ignore[arg-type]
        again = decode(messages.encode(taken))
        assert again == taken or again != again, "what was taken is another message after the wire"


def pipe(data: bytes) -> None:
    """The stream between a worker and its starter: whole messages, then the end."""
    ours, theirs = socket.socketpair()
    with theirs:
        end = Pipe(ours)
        theirs.setblocking(False)
        theirs.send(data[: 1 << 16])
        theirs.shutdown(socket.SHUT_WR)
        try:
            taken = sum(len(one) for one in itertools.chain.from_iterable(iter(lambda: end.receive(0), None)))
            raise AssertionError(f"no end after {taken} bytes")
        except PipeClosedError:
            pass
        finally:
            end.close()


def config(data: bytes) -> None:
    """A config.json: a model, whose cache can then be sized, or a UsageError."""
    try:
        shape = read_config(_file("config.json", data))
    except UsageError as error:
        _one_line(error)
        return
    assert 1 <= shape.layers <= 10_000
    for dtype in DTYPES.values():
        if shape.supports(dtype):
            assert shape.kv_bytes_per_token(dtype) >= 0
            assert shape.request_bytes(1 << 20, 16, dtype) >= 0
    assert shape.descriptors(8192, 16, 1) >= 0
    assert attention_flop(shape, 8192) >= 0
    try:
        shape.with_mtp()
    except UsageError as error:
        _one_line(error)


def result(data: bytes) -> None:
    """A result file as `plan --measured` reads it: rows, or a UsageError."""
    try:
        document = read_result(_file("result.json", data))
        assert document["schema_version"] == SCHEMA_VERSION
        measured_rows(document["results"], str(document["scope"]))
        prefill_layers(document.get("prefill", []), "llama-3.1-70b")
    except UsageError as error:
        _one_line(error)


def key(data: bytes) -> None:
    """A file of either kind of key: 40 characters that ZeroMQ takes, or a UsageError."""
    path = _file("host.key", data)
    for read in (keys.read_public, lambda path: keys.read_secret(path).public):
        try:
            assert len(read(path)) == keys.Z85_LENGTH
        except UsageError as error:
            _one_line(error)


def links(data: bytes) -> None:
    """What --link takes, and what the names in it lead to in links.json."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    try:
        assert all(0 < rate <= LARGEST_GBIT for rate in parse_links(text))
    except UsageError as error:
        _one_line(error)


def load(data: bytes) -> None:
    """What --lengths takes: requests whose figures can be written, or a UsageError."""
    try:
        taken = read_load(str(_file("load", data)))
    except UsageError as error:
        _one_line(error)
        return
    assert min(taken.prompts) >= 1
    json.dumps(taken.as_record(), allow_nan=False)
    if taken.requests_per_s is not None:
        clocks = [arrival for arrival, _ in taken.requests()]
        assert clocks == sorted(clocks)


def times(data: bytes) -> None:
    """What --prefill-csv takes: times that rise with the length, or a UsageError."""
    try:
        taken = read_prefill_times(str(_file("times", data)), extrapolate=True)
    except UsageError as error:
        _one_line(error)
        return
    lengths = [tokens for tokens, _ in taken.points]
    whole = [taken.between_ms(0, tokens) for tokens in (1, *lengths, lengths[-1] + 1)]
    assert whole[0] > 0
    assert all(more >= less * (1 - 1e-9) for less, more in itertools.pairwise(whole))


def _one_line(error: UsageError) -> None:
    assert "\n" not in str(error), str(error)
    assert len(str(error)) < 4000, "an error that repeats its input"


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (config, key, links, load, message, pipe, result, times)
}
