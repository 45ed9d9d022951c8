"""What the ratio assumes and nobody measured here. Shown as assumptions wherever the ratio is shown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvxfer.cache.wire import Wire
from kvxfer.model.dtypes import DType
from kvxfer.model.shape import ModelShape, blocks_of

ROUNDING = 1e-6
"""Of a product of a share and a number of tokens: 0.29 · 1600 falls short of 464."""


@dataclass(frozen=True)
class Assumptions:
    """The prefill group, the links, and what overrides the model's own figures (None: the model's).

    eff_tflops is what one GPU sustains, in 10¹² FLOP/s. link_gbit are line rates in Gbit/s. params counts the
    parameters of the `seed` row, params_active those of the `full` row (embedding tables included, as model cards
    count). kv_bytes_per_token are bytes on the wire, all rank pairs together. prefix_hit_* are the shares (0 … 1) of a
    prompt that each side has in its prefix cache: prefill does not compute its share, and what decode holds of it in
    whole blocks does not move.

    tp_* and pp_* are the tensor-parallel ranks and pipeline stages of each side. Either all rank pairs share the one
    link, or (links_shared False) every rank has a link of its own, and the busiest rank decides. fixed_ms is what a
    transfer costs beside its bytes, however few they are; send_ms is the part of it that each send of a pipelined
    request costs again, and keeps the next one waiting for. gamma_us is what each of its pieces costs, in µs, one after
    another and before its bytes go; ranks post theirs at the same time.
    """

    gpus: int = 4
    eff_tflops: float = 400.0
    params: float | None = None
    params_active: float | None = None
    link_gbit: tuple[float, ...] = (100.0, 200.0, 400.0)
    kv_bytes_per_token: int | None = None
    prefix_hit_prefill: float = 0.0
    prefix_hit_decode: float = 0.0
    tp_prefill: int = 1
    tp_decode: int = 1
    pp_prefill: int = 1
    pp_decode: int = 1
    links_shared: bool = True
    fixed_ms: float = 0.0
    send_ms: float = 0.0
    gamma_us: float = 0.0

    @property
    def sends_cost_nothing(self) -> bool:
        """Whether a pipelined request's sends take nothing beside their bytes: the more, the better."""
        return not self.send_ms and not self.gamma_us

    @property
    def parallel(self) -> bool:
        """Whether a side has more than one rank."""
        return max(self.tp_prefill, self.tp_decode, self.pp_prefill, self.pp_decode) > 1

    def seed_params(self, shape: ModelShape) -> tuple[float, str] | None:
        """Parameters of the seed row and their source: --params, --params-active, or the model's active ones."""
        if self.params is not None:
            return self.params, "--params"
        return self.full_params(shape)

    def full_params(self, shape: ModelShape) -> tuple[float, str] | None:
        """Active parameters of the full row and their source: --params-active or the model's.

        --params alone does not count here: for a mixture of experts it would be many times too much work.
        """
        if self.params_active is not None:
            return self.params_active, "--params-active"
        if shape.params_active is None:
            return None
        whose = "the model's" if shape.params_active == shape.params_total else "the model's active ones"
        return float(shape.params_active), whose

    def moved_bytes(
        self, shape: ModelShape, tokens: int, block_size: int, dtype: DType, wire: Wire | None = None
    ) -> int:
        """Bytes of what decode lacks of a prompt, whole blocks: those of `wire`, where there are several ranks."""
        if wire is not None:
            return wire.bytes
        held_blocks = self.held_blocks(tokens, block_size)
        if self.kv_bytes_per_token is None:
            return shape.request_bytes(tokens, block_size, dtype, held_blocks)
        return (blocks_of(tokens, block_size) - held_blocks) * block_size * self.kv_bytes_per_token

    def held_blocks(self, tokens: int, block_size: int) -> int:
        """Whole blocks that decode's prefix cache holds of a prompt: a block that is not full is never in there."""
        return math.floor(self.prefix_hit_decode * tokens + ROUNDING) // block_size

    def cached_tokens(self, tokens: int) -> float:
        """Tokens that prefill does not compute. One is always computed: it makes the first token of the answer."""
        return min(self.prefix_hit_prefill * tokens, tokens - 1.0)

    @property
    def prefix_hits(self) -> bool:
        """Whether either side has anything of a prompt."""
        return self.prefix_hit_prefill > 0 or self.prefix_hit_decode > 0

    def as_record(self, shape: ModelShape) -> dict[str, Any]:
        """The result file's `assumptions`."""
        params, source = self.seed_params(shape) or (None, None)
        return {
            "gpus": self.gpus,
            "eff_tflops": self.eff_tflops,
            "params": params,
            "params_source": source,
            "link_gbit": list(self.link_gbit),
            **({} if self.kv_bytes_per_token is None else {"kv_bytes_per_token": self.kv_bytes_per_token}),
            "prefix_hit_prefill": self.prefix_hit_prefill,
            "prefix_hit_decode": self.prefix_hit_decode,
            "tp": {"prefill": self.tp_prefill, "decode": self.tp_decode},
            "pp": {"prefill": self.pp_prefill, "decode": self.pp_decode},
            "links_shared": self.links_shared,
            **({"fixed_ms": self.fixed_ms} if self.fixed_ms else {}),
            **({"send_ms": self.send_ms} if self.send_ms else {}),
            **({"gamma_us": self.gamma_us} if self.gamma_us else {}),
        }
