"""A cache of as many bytes per token as the user says, in place of what the model's layers keep."""

from __future__ import annotations

from math import lcm

from kvxfer.cache.layout import Ranks
from kvxfer.errors import UsageError
from kvxfer.model.layers import GivenBytes, LayerKind, NoCache
from kvxfer.model.shape import ModelShape


def given_kinds(
    shape: ModelShape, bytes_per_token: int, regions_per_layer: int, prefill: Ranks, decode: Ranks
) -> tuple[LayerKind, ...]:
    """What each layer keeps when all of them together keep `bytes_per_token` of every token, on the wire too.

    The layers that grow with the prompt have as much each (all layers, where none is known to grow), in regions of the
    same size, and ranks divide it without replicating anything. There are no windows and no states. Raises UsageError
    when that leaves a rest.
    """
    growing = [kind.grows for kind in shape.layer_kinds]
    if not any(growing):
        growing = [True] * shape.layers
    layers, shares = sum(growing), lcm(prefill.tp, decode.tp)
    unit = layers * regions_per_layer * shares
    if bytes_per_token % unit:
        below = bytes_per_token // unit * unit
        near = f"{below:,} and {below + unit:,} do" if below else f"{unit:,} does"
        raise UsageError(
            f"--kv-bytes-per-token {bytes_per_token:,} does not divide into {layers} layers{_times(regions_per_layer)} "
            f"of {shape.name}{_over(shares)}: {near}"
        )
    each = GivenBytes(bytes_per_token // layers, shares)
    return tuple(each if grows else NoCache() for grows in growing)


def given_notice(bytes_per_token: int) -> str:
    return (
        f"{bytes_per_token:,} bytes of KV cache per token as given (--kv-bytes-per-token), spread evenly over the "
        "layers: windows, states and heads of the model do not count"
    )


def _times(regions_per_layer: int) -> str:
    return "" if regions_per_layer == 1 else f" × {regions_per_layer} regions"


def _over(shares: int) -> str:
    return "" if shares == 1 else f", each cut evenly over tensor-parallel ranks into {shares}"
