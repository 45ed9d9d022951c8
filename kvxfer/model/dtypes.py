"""The element types a KV cache can have."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.errors import UsageError
from kvxfer.wording import did_you_mean, quoted


@dataclass(frozen=True)
class DType:
    """One element type: its name here, bytes of one element, and its name in torch."""

    name: str
    bytes: int
    torch_name: str


BF16 = DType("bf16", 2, "bfloat16")
FP16 = DType("fp16", 2, "float16")
FP8_E4M3 = DType("fp8_e4m3", 1, "float8_e4m3fn")
FP8_E5M2 = DType("fp8_e5m2", 1, "float8_e5m2")

DTYPES = {dtype.name: dtype for dtype in (BF16, FP16, FP8_E4M3, FP8_E5M2)}
ALIASES = {"fp8": FP8_E4M3}
LATER = ("fp8_per_token_head",)  # carries its scales inline, which no layout here holds yet


def resolve_dtype(text: str) -> DType:
    """The dtype of that name or alias, whatever the case. Raises UsageError for an unknown one."""
    key = text.strip().lower()
    known = {**DTYPES, **ALIASES}
    if key in known:
        return known[key]
    listed = ", ".join([*DTYPES, *(f"{alias} (= {dtype.name})" for alias, dtype in ALIASES.items())])
    if key in LATER:
        raise UsageError(f"--dtype {key} is not in this version; choose from {listed}")
    raise UsageError(f"unknown dtype {quoted(text)}{did_you_mean(key, known)}; choose from {listed}")
