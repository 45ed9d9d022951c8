"""The messages of the control channel: each survives the wire, and nothing else gets through."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.control import messages
from kvxfer.control.messages import Message

DECODERS: dict[Any, Callable[[bytes], Any]] = {
    messages.ToWorker: messages.decode_to_worker,
    messages.FromWorker: messages.decode_from_worker,
    messages.ToServer: messages.decode_to_server,
    messages.FromServer: messages.decode_from_server,
}

SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=64),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
}


def members(union: Any) -> tuple[type, ...]:
    return get_args(union) or (union,)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type."""
    if kind in SIMPLE:
        return SIMPLE[kind]
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is list:
        return st.lists(values(get_args(kind)[0]), max_size=4)
    if get_origin(kind) is tuple:
        return st.tuples(*map(values, get_args(kind)))
    if get_origin(kind) is dict:
        return st.dictionaries(*map(values, get_args(kind)), max_size=4)
    if get_origin(kind) in (types.UnionType, typing.Union):
        return st.one_of(*map(values, get_args(kind)))
    return st.builds(kind, **{name: values(inner) for name, inner in get_type_hints(kind).items()})


def routes() -> Iterator[tuple[Any, type]]:
    for direction in DECODERS:
        for cls in members(direction):
            yield direction, cls


def subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def test_every_message_can_be_sent_somewhere() -> None:
    sent = {cls for _, cls in routes()} | {*members(messages.WorkerCommand), *members(messages.WorkerAnswer)}
    assert sent == set(subclasses(Message))


@pytest.mark.parametrize(("direction", "cls"), list(routes()), ids=lambda value: getattr(value, "__name__", ""))
@given(data=st.data())
def test_a_message_survives_the_wire(direction: Any, cls: type, data: st.DataObject) -> None:
    message = data.draw(values(cls))
    received = DECODERS[direction](messages.encode(message))
    assert type(received) is cls
    assert received == message


@pytest.mark.parametrize("cls", members(messages.WorkerCommand), ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_every_command_reaches_the_worker_and_serve(cls: type, data: st.DataObject) -> None:
    command = messages.Command(seq=1, body=data.draw(values(cls)))
    assert messages.decode_to_worker(messages.encode(command)) == command
    assert messages.decode_to_server(messages.encode(command)) == command


@pytest.mark.parametrize("cls", members(messages.WorkerAnswer), ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_every_answer_reaches_serve_and_the_client(cls: type, data: st.DataObject) -> None:
    answer = messages.Answer(seq=1, body=data.draw(values(cls)))
    assert messages.decode_from_worker(messages.encode(answer)) == answer
    assert messages.decode_from_server(messages.encode(answer)) == answer


def decoded(direction: Any, data: bytes) -> Any:
    """The message in `data`, or None when it is refused as it should be; any other exception is a defect."""
    try:
        return DECODERS[direction](data)
    except msgspec.DecodeError:
        return None


@pytest.mark.parametrize("direction", DECODERS, ids=["to worker", "from worker", "to server", "from server"])
@given(data=st.binary(max_size=200))
def test_garbage_is_refused(direction: Any, data: bytes) -> None:
    assert decoded(direction, data) is None or isinstance(decoded(direction, data), members(direction))


@given(data=st.data())
def test_a_damaged_message_is_refused_or_still_a_message(data: st.DataObject) -> None:
    """Bytes changed, cut or added in a true message get deeper into the decoder than garbage does."""
    direction = data.draw(st.sampled_from(list(DECODERS)))
    whole = messages.encode(data.draw(values(data.draw(st.sampled_from(members(direction))))))
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 4)))
    damaged = whole[:start] + data.draw(st.binary(max_size=4)) + whole[end:]
    received = decoded(direction, damaged)
    assert received is None or isinstance(received, members(direction))


@pytest.mark.parametrize("direction", DECODERS, ids=["to worker", "from worker", "to server", "from server"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdf\xff\xff\xff\xff",
        msgspec.msgpack.encode({"type": "Nobody"}),
        msgspec.msgpack.encode({"seq": 1}),
        msgspec.msgpack.encode({"type": "Failed", "seq": "one", "status": 1, "message": ""}),
        msgspec.msgpack.encode({"type": "Command", "seq": 1, "body": {"type": "Opened"}}),
        msgspec.msgpack.encode({"type": "Hello", "protocol": 1, "version": 2}),
    ],
)
def test_what_is_no_message_is_refused(direction: Any, data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        DECODERS[direction](data)


@pytest.mark.parametrize("direction", DECODERS, ids=["to worker", "from worker", "to server", "from server"])
def test_a_deeply_nested_message_is_refused(direction: Any) -> None:
    """A field nobody knows is skipped, however deep its value nests."""
    nested = b"\x82" + msgspec.msgpack.encode("x") + b"\x91" * 100_000 + b"\xc0"
    nested += msgspec.msgpack.encode("type") + msgspec.msgpack.encode(members(direction)[-1].__name__)
    with pytest.raises(msgspec.DecodeError):
        DECODERS[direction](nested)


@pytest.mark.parametrize("direction", [messages.ToServer, messages.FromServer], ids=["to server", "from server"])
def test_a_message_of_the_other_direction_is_refused(direction: Any) -> None:
    info = messages.HostInfo("h", "k", "c", 1, 1, 0, "b", "n", "3")
    foreign = {
        messages.ToServer: messages.Welcome(messages.PROTOCOL, "1", info, 0, [], ""),
        messages.FromServer: messages.Hello(messages.PROTOCOL, "1"),
    }
    with pytest.raises(msgspec.ValidationError):
        DECODERS[direction](messages.encode(foreign[direction]))


def test_a_field_of_a_later_version_is_ignored() -> None:
    hello = {"type": "Hello", "protocol": 1, "version": "9", "mood": ["good"]}
    assert messages.decode_to_server(msgspec.msgpack.encode(hello)) == messages.Hello(protocol=1, version="9")
