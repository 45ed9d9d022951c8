"""Fields of a config.json, read with errors that name the field and the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from kvxfer.errors import UsageError
from kvxfer.wording import quoted, quoted_path

LARGEST = {
    "num_hidden_layers": 10_000,
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_modules", "mtp_transformer_layers"), 100),
    "mtp_num_hidden_layers": 100,
}
LARGEST_DEFAULT = 1 << 24

ELEMENT_BYTES = {
    **dict.fromkeys(("float32", "fp32"), 4),
    **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 1),
}

MODEL_BYTES = 2
"""Of an element of a model whose config names no dtype: bf16 or fp16."""


class MissingFieldError(UsageError):
    """A field that is needed is absent or null."""


def is_inert(value: object) -> bool:
    """Whether a field of that value says nothing."""
    return value is None or value is False or value in (0, "", [], {})


class Fields:
    """One object of a config.json. `source` is the file's name, `prefix` leads to the object in it (`text_config.`)."""

    def __init__(self, config: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.config = config
        self.source = source
        self.prefix = prefix

    def has(self, field: str) -> bool:
        """Whether the field says something."""
        return not is_inert(self.config.get(field))

    @property
    def model_type(self) -> str:
        value = self.config.get("model_type")
        return value if isinstance(value, str) else ""

    def positive(self, field: str, default: int | None = None) -> int:
        """A whole number of at least 1; absent or null: the default, and without one MissingFieldError."""
        if self.config.get(field) is None:
            if default is not None:
                return default
            raise self.missing(field)
        value = self.config[field]
        largest = LARGEST.get(field, LARGEST_DEFAULT)
        if type(value) is not int or not 1 <= value <= largest:
            self.fail(field, f"is not a whole number from 1 to {largest:,}")
        return int(value)

    def optional(self, field: str) -> int | None:
        """A whole number of at least 1; None when absent or null."""
        return None if self.config.get(field) is None else self.positive(field)

    def whole(self, field: str) -> int:
        """A whole number that may be 0. Absent or null: MissingFieldError."""
        value = self.config.get(field)
        return 0 if type(value) is int and value == 0 else self.positive(field)

    def count(self, field: str) -> int:
        """A whole number that may be 0, which is also what an absent or null field means."""
        return self.positive(field) if self.has(field) else 0

    def flag(self, field: str, default: bool) -> bool:
        """Whether the field is true; absent or null: the default."""
        value = self.config.get(field)
        if value is None:
            return default
        if value not in (False, True):
            self.fail(field, "is neither true nor false")
        return bool(value)

    def per_layer(self, field: str, layers: int) -> Sequence[Any]:
        """A list (or a string of letters) with one entry for each layer."""
        value = self.config.get(field)
        if not isinstance(value, (list, str)):
            self.fail(field, "is not a list of layers")
        if len(value) != layers:
            self.fail(field, f"has {len(value)} entries for num_hidden_layers = {layers}")
        return value

    def element_bytes(self, field: str, default: int) -> int:
        """Bytes of an element of the type that the field names; absent or null: the default."""
        value = self.config.get(field)
        if value is None:
            return default
        size = ELEMENT_BYTES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
        if size is None:
            self.fail(field, f"is none of {', '.join(ELEMENT_BYTES)}")
        return size

    def model_bytes(self) -> int:
        """Bytes of an element of the model's own dtype."""
        name = "torch_dtype" if self.config.get("torch_dtype") is not None else "dtype"
        return self.element_bytes(name, MODEL_BYTES)

    def missing(self, field: str) -> MissingFieldError:
        """The error that a field is needed."""
        return MissingFieldError(
            f"{quoted_path(self.source)} has no {self.prefix}{field}, which its sizes follow from; add the field, or "
            "give the config.json of a decoder-only language model"
        )

    def fail(self, field: str, why: str) -> NoReturn:
        raise self.error(field, why)

    def error(self, field: str, why: str) -> UsageError:
        where = f"{self.prefix}{field} is {quoted(self.config.get(field))} in {quoted_path(self.source)}"
        return UsageError(f"{where}: it {why}")
