"""Every backend moves every kind of cache: two real processes, bytes and descriptors as the plan says, all verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.backend.probe import probe_all
from kvxfer.cache.layout import Order, Ranks
from kvxfer.cache.plan import transfer_plan
from kvxfer.cache.spec import CacheSpec
from kvxfer.cache.tables import BlockTables, scatter
from kvxfer.control.channel import Client
from kvxfer.errors import UsageError
from kvxfer.measure.local import DATA_ADDRESS, local_server
from kvxfer.measure.pair import Pair
from kvxfer.measure.request import Effort, Op, Row
from kvxfer.measure.session import Session, open_session
from kvxfer.model.config import shape_from_config
from kvxfer.model.dtypes import DTYPES, PACKED, resolve_dtype
from kvxfer.model.shape import ModelShape

BASE: dict[str, Any] = {
    "architectures": ["SomeForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "torch_dtype": "bfloat16",
}
MLA = {"kv_lora_rank": 512, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 64, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "full": {},
    "mla": MLA,
    "mla_indexer": MLA | {"index_head_dim": 128, "index_n_heads": 4, "index_topk": 64},
    "window": {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32},
    "state": {
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 4,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
    },
}
LAYOUTS: list[tuple[Order, bool]] = [("nhd", False), ("hnd", False), ("hnd", True)]
UNEQUAL_TP = [(1, 2), (2, 1), (4, 2)]
FRAGMENTATIONS = (0.0, 0.5, 1.0)
TOKENS = 70
SEED = 3

BACKENDS = [found.name for found in probe_all() if found.available]


@dataclass(frozen=True)
class Cache:
    """A kind of cache, cut over unequal ranks."""

    family: str
    dtype: str
    order: Order
    together: bool
    regions: int
    tp: tuple[int, int]

    def __str__(self) -> str:
        layout = f"{self.order}-together" if self.together else self.order
        return f"{self.family}-{self.dtype}-{layout}-{self.regions}-tp{self.tp[0]}to{self.tp[1]}"

    def spec(self) -> CacheSpec:
        return CacheSpec(shape(self.family), resolve_dtype(self.dtype), 16, self.regions, self.order)

    def row(self, backend: str, op: Op) -> Row:
        prefill, decode = (Ranks(tp, 1, self.together) for tp in self.tp)
        return Row(self.spec(), backend, op, TOKENS, seed=SEED, prefill=prefill, decode=decode)


def shape(family: str) -> ModelShape:
    return shape_from_config(BASE | FAMILIES[family], family, family)


def possible(cache: Cache) -> bool:
    """Whether the model's cache can have that dtype, and a second region where the layout asks for one."""
    try:
        spec = cache.spec()
    except UsageError:
        return False
    return cache.regions == 1 or len(spec.parts) > len(replace(spec, regions_per_layer=1).parts)


def every_cache() -> Iterator[Cache]:
    numbers = product(FAMILIES, (*DTYPES, *PACKED), LAYOUTS, (1, 2))
    for number, (family, dtype, (order, together), regions) in enumerate(numbers):
        tp = UNEQUAL_TP[number % len(UNEQUAL_TP)]
        cache = Cache(family, dtype, order, together, regions, tp)
        if possible(cache):
            yield cache


CACHES = list(every_cache())
QUICK = [
    Cache("full", "bf16", "nhd", False, 1, (1, 2)),
    Cache("mla_indexer", "fp8_ds_mla", "nhd", True, 1, (2, 1)),
    Cache("window", "fp8_per_token_head", "hnd", True, 2, (4, 2)),
    Cache("state", "fp8_e4m3", "hnd", False, 1, (2, 1)),
]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """One server and one client of it; workers come and go."""
    with ExitStack() as stack:
        client = Client(stack.enter_context(local_server()), None, None)
        yield stack.enter_context(open_session(client))


def rotation(row: Row) -> list[BlockTables]:
    """A request of each fragmentation, over the same blocks."""
    tables = []
    for group, blocks in enumerate(row.blocks):
        each = [scatter(blocks, 1, 1, fragmentation, row.seed + group) for fragmentation in FRAGMENTATIONS]
        prefill = np.concatenate([one.prefill for one in each])
        decode = np.concatenate([one.decode for one in each])
        tables.append(BlockTables(prefill, decode, blocks))
    return tables


def planned(row: Row, tables: list[BlockTables]) -> list[tuple[int, int]]:
    """Bytes and descriptors of each request, as kvxfer.cache cuts it for all rank pairs together."""
    found = []
    for request in range(len(FRAGMENTATIONS)):
        prefill = [group.prefill[request] for group in tables]
        decode = [group.decode[request] for group in tables]
        plans = [transfer_plan(pair.slices, prefill, decode) for pair in row.pairs]
        found.append((sum(plan.bytes for plan in plans), sum(plan.descriptors for plan in plans)))
    return found


def moved(session: Session, backend: str, cache: Cache) -> None:
    can = _native.open_context(backend, bytes(32), {}).capabilities
    ops: list[Op] = [op for op, has in (("push", can.push), ("pull", can.pull)) if has]
    row = cache.row(backend, ops[0])
    tables = rotation(row)
    expected = planned(row, tables)
    assert {size for size, _ in expected} == {row.bytes}
    assert expected[0][1] <= expected[1][1] <= expected[2][1]

    pair = Pair(session, 0, row, tables, Effort(verify="full"), DATA_ADDRESS)
    pair.set_up()
    assert pair.descriptors == expected[0][1]
    pair.prepare_rest()
    assert pair.descriptors == max(descriptors for _, descriptors in expected)
    requests = 1
    for op in ops:
        pair.row = replace(row, op=op)
        one_more: Callable[[], object] = pair.run_verified if can.moves_data else lambda: pair.run(1)
        for _ in FRAGMENTATIONS:
            one_more()
            requests += 1
    assert pair.verified_bytes == (requests * row.bytes if can.moves_data else 0)
    pair.end()


@pytest.mark.parametrize("cache", QUICK, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_of_each_family_is_moved_and_verified(session: Session, backend: str, cache: Cache) -> None:
    moved(session, backend, cache)


# Plans and pieces are cut alike for all backends: each moves its share of the caches.
EVERY = [(backend, cache) for n, backend in enumerate(BACKENDS) for cache in CACHES[n :: len(BACKENDS)]]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "cache"), EVERY, ids=str)
def test_every_cache_is_moved_and_verified(session: Session, backend: str, cache: Cache) -> None:
    moved(session, backend, cache)
