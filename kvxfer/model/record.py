"""A model and what its cache weighs, as a result file's `models` holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvxfer.model.dtypes import DType
from kvxfer.model.shape import ModelShape, whole_block_tokens


def model_record(
    shape: ModelShape, dtype: DType, tokens: Sequence[int], block_size: int, given: int | None = None
) -> dict[str, Any]:
    """One entry of `models`: the model in that dtype, with the bytes of prompts of these lengths in whole blocks.

    `given` bytes per token take the place of all that the model keeps.
    """
    return {
        "name": shape.name,
        "family": shape.family,
        "dtype": dtype.name,
        "params_total": shape.params_total,
        "params_active": shape.params_active,
        "layers": shape.layers,
        **(_weighed(shape, dtype, tokens, block_size) if given is None else _as_given(given, tokens, block_size)),
    }


def _weighed(shape: ModelShape, dtype: DType, tokens: Sequence[int], block_size: int) -> dict[str, Any]:
    return {
        "kv_bytes_per_token": shape.kv_bytes_per_token(dtype),
        "fixed_bytes_per_request": shape.fixed_bytes_per_request(block_size, dtype),
        "bytes_by_tokens": {str(count): shape.request_bytes(count, block_size, dtype) for count in tokens},
    }


def _as_given(per_token: int, tokens: Sequence[int], block_size: int) -> dict[str, Any]:
    return {
        "kv_bytes_per_token": per_token,
        "fixed_bytes_per_request": 0,
        "bytes_by_tokens": {str(count): whole_block_tokens(count, block_size) * per_token for count in tokens},
    }
