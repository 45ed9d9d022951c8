"""`kvxfer model`: what the KV cache of a model weighs, layer by layer, and in how many pieces it moves.

Answers at once: nothing heavy may be imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated, Any

import typer

from kvxfer import __version__, cli
from kvxfer.cache.hybrid_blocks import hybrid_notices
from kvxfer.cache.layout import Ranks
from kvxfer.cache.spec import CacheSpec
from kvxfer.model.dtypes import BF16, DTYPES, FP8_E4M3, PACKED, DType, resolve_dtype
from kvxfer.model.layers import LayerKind
from kvxfer.model.presets import load_model
from kvxfer.model.record import model_record
from kvxfer.model.shape import ModelShape
from kvxfer.options import parse_int, parse_int_list, split_list
from kvxfer.result.file import SCHEMA_VERSION, write_result

LARGEST_TOKENS = 100_000_000
LARGEST_BLOCK = 1 << 20

REGIONS = (1, 2)
"""K and V of a layer together (vLLM >= 0.26), or apart (vLLM <= 0.25)."""


@dataclass(frozen=True)
class Request:
    """What the user asked for, checked."""

    shape: ModelShape
    dtypes: list[DType]
    tokens: list[int]
    block_size: int


def command(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="preset (8b, 70b, deepseek-v3, …) or the path of a config.json")
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE,…", help=f"of the cache: {', '.join([*DTYPES, *PACKED])}; several: A,B [those it can have]"
        ),
    ] = None,
    tokens: Annotated[str, typer.Option(metavar="N,…", help="prompt lengths")] = "512,2048,8192",
    block_size: Annotated[str, typer.Option(metavar="N", help="tokens per block; whole blocks move")] = "16",
    with_mtp: Annotated[
        bool, typer.Option("--with-mtp", help="count the layers of multi-token prediction too")
    ] = False,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="write the figures there (-: to stdout, alone)")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print no tables")] = False,
) -> None:
    """Show what a model's KV cache weighs by length and dtype, and what the plain formula would say."""
    shape = load_model(model).with_mtp() if with_mtp else load_model(model)
    request = Request(
        shape=shape,
        dtypes=_usual_dtypes(shape) if dtype is None else _dtypes(dtype),
        tokens=parse_int_list(tokens, "--tokens", high=LARGEST_TOKENS),
        block_size=parse_int(block_size, "--block-size", high=LARGEST_BLOCK),
    )
    document = model_document(request, context.obj)
    if json is not None:
        write_result(json, document)
    if not quiet and json != "-":
        _print(document)


def model_document(request: Request, words: Sequence[str]) -> dict[str, Any]:
    """What is printed, as JSON. `models` is the result file's, with what the plain formula says beside.

    `words` are the command line.
    """
    shape = request.shape
    return {
        "schema_version": SCHEMA_VERSION,
        "kvxfer_version": __version__,
        "created_utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": list(words),
        "model": {
            "name": shape.name,
            "family": shape.family,
            "layers": shape.layers,
            "params_total": shape.params_total,
            "params_active": shape.params_active,
            "params_embedding": shape.params_embedding,
        },
        "block_size": request.block_size,
        "layer_groups": [_group(request, count, kind) for count, kind in shape.groups()],
        "models": [_model(request, dtype) for dtype in request.dtypes],
        "descriptors": [
            {
                "tokens": count,
                "fragmentation": 1,
                "regions_per_layer": {
                    str(each): shape.descriptors(count, request.block_size, each) for each in REGIONS
                },
            }
            for count in request.tokens
        ],
        "notices": [*shape.notices, *shape.dtype_notices(request.dtypes), *_blocks(request)],
    }


def _blocks(request: Request) -> list[str]:
    return hybrid_notices((CacheSpec(request.shape, dtype, request.block_size) for dtype in request.dtypes), Ranks())


def _usual_dtypes(shape: ModelShape) -> list[DType]:
    return [dtype for dtype in (BF16, FP8_E4M3, *PACKED.values()) if shape.supports(dtype)]


def _dtypes(text: str) -> list[DType]:
    return list(dict.fromkeys(resolve_dtype(word) for word in split_list(text, "--dtype")))


def _group(request: Request, count: int, kind: LayerKind) -> dict[str, Any]:
    """Layers that are alike: bytes of one of them, per token while it grows and when full."""
    return {
        "layers": count,
        "kind": kind.label,
        "most_blocks": kind.most_blocks(request.block_size),
        "state_bytes": kind.state_bytes,
        "bytes_per_token": {dtype.name: kind.token_bytes(dtype) for dtype in request.dtypes},
        "fixed_bytes": {dtype.name: kind.fixed_bytes(request.block_size, dtype) for dtype in request.dtypes},
    }


def _model(request: Request, dtype: DType) -> dict[str, Any]:
    record = model_record(request.shape, dtype, request.tokens, request.block_size)
    naive = request.shape.naive_bytes_per_token(dtype)
    return record | {
        "naive_bytes_per_token": naive,
        "naive_over_true": None if naive is None else _naive_over_true(record, naive),
    }


def _naive_over_true(record: dict[str, Any], naive: int) -> dict[str, float | None]:
    """By prompt length, the plain formula's bytes divided by the true ones; 1 is right."""
    sizes = record["bytes_by_tokens"]
    return {count: int(count) * naive / size if size else None for count, size in sizes.items()}


def _print(document: dict[str, Any]) -> None:
    from kvxfer.result.model_table import render_model  # here, so that --help does not wait for them
    from kvxfer.result.printing import make_console

    render_model(document, make_console())


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run(command, argv, "kvxfer model")


if __name__ == "__main__":
    sys.exit(main())
