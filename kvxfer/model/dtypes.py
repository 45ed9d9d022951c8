"""The element types a KV cache can have."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.errors import UsageError
from kvxfer.wording import did_you_mean, quoted


@dataclass(frozen=True)
class DType:
    """One element type: its name here, bytes of one element, and its name in torch.

    scale_bytes lie inline for K and again for V, per head and token. latent_bytes are all that one token of one layer's
    latent takes, in the packed formats that are made for one shape of latent; None: the elements' bytes.
    """

    name: str
    bytes: int
    torch_name: str
    scale_bytes: int = 0
    latent_bytes: int | None = None


BF16 = DType("bf16", 2, "bfloat16")
FP16 = DType("fp16", 2, "float16")
FP8_E4M3 = DType("fp8_e4m3", 1, "float8_e4m3fn")
FP8_E5M2 = DType("fp8_e5m2", 1, "float8_e5m2")
FP8_PER_TOKEN_HEAD = DType("fp8_per_token_head", 1, "float8_e4m3fn", scale_bytes=4)
FP8_DS_MLA = DType("fp8_ds_mla", 1, "uint8", latent_bytes=656)
"""512 elements of 1 byte, four scales of 4, and 64 rotary elements of 2."""
NVFP4_DS_MLA = DType("nvfp4_ds_mla", 1, "uint8", latent_bytes=352)

DTYPES = {dtype.name: dtype for dtype in (BF16, FP16, FP8_E4M3, FP8_E5M2)}
"""Those of plain elements."""

PACKED = {dtype.name: dtype for dtype in (FP8_PER_TOKEN_HEAD, FP8_DS_MLA, NVFP4_DS_MLA)}
"""Those with scales among the elements."""

ALIASES = {"fp8": FP8_E4M3}


def resolve_dtype(text: str) -> DType:
    """The dtype of that name or alias, whatever the case. Raises UsageError for an unknown one."""
    key = text.strip().lower()
    known = {**DTYPES, **PACKED, **ALIASES}
    if key in known:
        return known[key]
    listed = ", ".join([*DTYPES, *PACKED, *(f"{alias} (= {dtype.name})" for alias, dtype in ALIASES.items())])
    raise UsageError(f"unknown dtype {quoted(text)}{did_you_mean(key, known)}; choose from {listed}")
