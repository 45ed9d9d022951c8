"""Pools as torch tensors: the true dtype and shape, sharing the memory, and the pattern in it."""

from __future__ import annotations

import ctypes
from typing import get_args

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.cache.layout import Order, Ranks
from kvxfer.cache.pool import PagedPool
from kvxfer.cache.spec import CacheSpec
from kvxfer.errors import UnavailableError
from kvxfer.model.dtypes import DTYPES
from kvxfer.model.shape import ModelShape

torch = pytest.importorskip("torch")

SHAPE = ModelShape("tiny", "full_attention", 3, 64, 4, 2, 8, 4)
BLOCKS = 6
ORDERS: tuple[Order, ...] = get_args(Order)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("regions", [1, 2])
def test_a_region_is_a_tensor_of_the_true_dtype_and_shape(dtype, regions: int) -> None:
    pool = PagedPool(CacheSpec(SHAPE, dtype, 16, regions), BLOCKS)
    cells = [12] if regions == 1 else [8, 4]
    for region in range(3 * regions):
        tensor = pool.tensor(region)
        assert tensor.dtype == getattr(torch, dtype.torch_name)
        assert tuple(tensor.shape) == (BLOCKS, 16, 2, cells[region % regions])
        assert tensor.is_contiguous()
        assert tensor.data_ptr() == pool.regions[region]


def test_a_tensor_shares_the_pools_memory() -> None:
    pool = PagedPool(CacheSpec(SHAPE, DTYPES["bf16"], 16, 1), BLOCKS)
    one, again = pool.tensor(1), pool.tensor(1)
    one[2, 3, 1, 5] = 1.5
    assert again[2, 3, 1, 5].item() == 1.5
    assert pool.tensor(0).abs().max().item() == 0


@pytest.mark.parametrize("ranks", [Ranks(), Ranks(tp=2), Ranks(tp=4, pp=3), Ranks(tp=2, together=True)], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_the_pattern_fills_every_block_of_every_region_differently(ranks: Ranks, order: Order) -> None:
    pool = PagedPool(CacheSpec(SHAPE, DTYPES["fp16"], 16, 2, order), BLOCKS, ranks)
    extents = list(zip(pool.regions, pool.region_bytes, strict=True))
    _native.fill(_native.Regions(extents), 1)
    raw = (ctypes.c_uint64 * (pool.memory.bytes // 8)).from_address(pool.memory.address)
    words = np.ctypeslib.as_array(raw)
    assert sum(size for _, size in extents) == len(words) * 8
    assert len(np.unique(words)) == len(words)
    seen = [pool.tensor(r).reshape(-1).view(torch.uint8).numpy() for r in range(len(extents))]
    assert np.array_equal(np.concatenate(seen).view(np.uint64), words)


@pytest.mark.parametrize(("ranks", "heads"), [(Ranks(), 2), (Ranks(tp=2), 1), (Ranks(tp=4, pp=3), 1)], ids=str)
def test_a_region_of_a_rank_has_its_heads(ranks: Ranks, heads: int) -> None:
    nhd, hnd = (PagedPool(CacheSpec(SHAPE, DTYPES["bf16"], 16, 2, o), BLOCKS, ranks) for o in ORDERS)
    assert len(nhd.regions) == 3 * 2 * ranks.tp
    for region in range(len(nhd.regions)):
        cell = [8, 4][region % 2]
        assert tuple(nhd.tensor(region).shape) == (BLOCKS, 16, heads, cell)
        assert tuple(hnd.tensor(region).shape) == (BLOCKS, heads, 16, cell)


def test_layers_that_lie_together_are_bytes() -> None:
    pool = PagedPool(CacheSpec(SHAPE, DTYPES["bf16"], 16, 2), BLOCKS, Ranks(tp=2, together=True))
    assert len(pool.regions) == 2
    for region in range(2):
        tensor = pool.tensor(region)
        assert tensor.dtype == torch.uint8
        assert tuple(tensor.shape) == (BLOCKS, 3 * 16 * (8 + 4) * 2)


def test_more_memory_than_an_address_space_is_refused() -> None:
    with pytest.raises(UnavailableError, match="memory"):
        PagedPool(CacheSpec(SHAPE, DTYPES["bf16"], 16, 1), 1 << 50)
