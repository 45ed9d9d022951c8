"""The contracts that are published: the JSON Schema and the exit statuses."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from example_result import example_result
from jsonschema import Draft202012Validator

from kvxfer import errors
from kvxfer.errors import ExitStatus, KvxferError
from kvxfer.model.dtypes import DTYPES, PACKED
from kvxfer.result.file import SCHEMA_VERSION, schema

DOCS = Path(__file__).parents[2] / "docs"

Place = tuple[str | int, ...]


def valid(result: Any) -> bool:
    return bool(Draft202012Validator(schema()).is_valid(result))


def objects(rule: dict[str, Any], value: Any, place: Place = ()) -> Iterator[tuple[Place, list[str]]]:
    """Every object in `value` that the schema describes, and its required fields."""
    if isinstance(value, dict):
        required = list(rule.get("required", []))
        if value.get("status") == "ok":
            required += rule["then"]["required"]
        yield place, required
        for name, inner in rule.get("properties", {}).items():
            if name in value:
                yield from objects(inner, value[name], (*place, name))
    elif isinstance(value, list) and "items" in rule:
        for index, item in enumerate(value):
            yield from objects(rule["items"], item, (*place, index))


def required_fields() -> list[Place]:
    return [(*place, name) for place, names in objects(schema(), example_result()) for name in names]


def test_schema_is_valid() -> None:
    Draft202012Validator.check_schema(schema())
    assert schema()["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    assert schema()["properties"]["schema_version"]["const"] == SCHEMA_VERSION


def test_the_example_is_valid() -> None:
    Draft202012Validator(schema()).validate(example_result())


def test_the_example_has_every_field_of_the_schema() -> None:
    """So that the tests below reach everything; only kinds of rows that differ by status may lack some."""
    ok_row = example_result()["results"][0]
    assert set(example_result()) == set(schema()["properties"])
    assert set(ok_row) == set(schema()["properties"]["results"]["items"]["properties"])


@pytest.mark.parametrize("place", required_fields(), ids=lambda place: ".".join(map(str, place)))
def test_a_missing_field_is_invalid(place: Place) -> None:
    result: Any = example_result()
    holder = result
    for step in place[:-1]:
        holder = holder[step]
    del holder[place[-1]]
    assert not valid(result)


def test_unknown_fields_are_valid_everywhere() -> None:
    result = example_result()
    for place, _ in objects(schema(), example_result()):
        holder: Any = result
        for step in place:
            holder = holder[step]
        if place[-1:] != ("bytes_by_tokens",):  # a map from numbers of tokens, without fields
            holder["a_later_field"] = {"x": 1}
    assert valid(result)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("p50_ns", 1.5),
        ("p50_ns", None),
        ("samples_ns", []),
        ("samples_ns", [-1]),
        ("status", "maybe"),
        ("error", "an error in a row that is ok"),
        ("dtype", "bfloat16"),
        ("tokens", 0),
        ("bandwidth_gbyte_s", "2.9"),
        ("ci95_ns", [1]),
    ],
)
def test_a_wrong_value_is_invalid(field: str, value: Any) -> None:
    result = example_result()
    result["results"][0][field] = value
    assert not valid(result)


def test_every_dtype_of_a_cache_is_valid() -> None:
    names = [dtype.name for dtype in (*DTYPES.values(), *PACKED.values())]
    assert schema()["properties"]["results"]["items"]["properties"]["dtype"]["enum"] == names


def test_a_failed_row_says_why() -> None:
    result = example_result()
    result["results"][2]["error"] = None
    assert not valid(result)


def test_the_example_is_consistent_with_itself() -> None:
    for row in example_result()["results"][:2]:
        setup = {name: phase["samples"] for name, phase in row["setup"].items()}
        cold = setup.pop("cold_ns")
        assert [sum(phases) for phases in zip(*setup.values(), strict=True)] == cold


def test_a_copy_of_the_example_is_independent() -> None:
    first = example_result()
    untouched = copy.deepcopy(first)
    first["results"][0]["setup"]["cold_ns"]["samples"].clear()
    assert example_result() == untouched


def test_every_error_has_an_exit_status_of_its_own() -> None:
    classes = [KvxferError, *KvxferError.__subclasses__()]
    assert len({cls.status for cls in classes}) == len(classes)
    assert set(errors.BY_STATUS.values()) == set(classes)
    for cls in classes:
        assert type(errors.from_status(cls.status, "what happened")) is cls
    assert type(errors.from_status(77, "what happened")) is KvxferError


def test_every_exit_status_is_documented_once() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (DOCS / "exit-status.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == [(status.value, status.name) for status in ExitStatus]
    assert len(ExitStatus.__members__) == len(set(ExitStatus))  # no name is an alias of another number


def names_in_schema(rule: dict[str, Any]) -> Iterator[str]:
    for name, inner in rule.get("properties", {}).items():
        yield name
        yield from names_in_schema(inner)
        yield from names_in_schema(inner.get("items", {}))


def test_every_field_is_documented() -> None:
    documented = set(re.findall(r"`(\w+)(?:\[\])?`", (DOCS / "result-file.md").read_text(encoding="utf-8")))
    assert set(names_in_schema(schema())) - documented == set()
