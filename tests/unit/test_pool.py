"""Pools as torch tensors: the true dtype and shape, sharing the memory, and the pattern in it."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.cache.pool import PagedPool
from kvxfer.cache.spec import CacheSpec
from kvxfer.errors import UnavailableError
from kvxfer.model.dtypes import DTYPES
from kvxfer.model.shape import ModelShape

torch = pytest.importorskip("torch")

SHAPE = ModelShape("tiny", "full_attention", 3, 64, 4, 2, 8, 4)
BLOCKS = 6


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


def test_the_pattern_fills_every_block_of_every_region_differently() -> None:
    spec = CacheSpec(SHAPE, DTYPES["fp16"], 16, 2)
    pool = PagedPool(spec, BLOCKS)
    _native.fill(_native.PoolView(list(zip(pool.regions, spec.block_bytes, strict=True)), BLOCKS), 1)
    words = np.concatenate([pool.tensor(r).view(torch.int16).reshape(-1).numpy().view(np.uint64) for r in range(6)])
    assert len(np.unique(words)) == len(words)


def test_more_memory_than_an_address_space_is_refused() -> None:
    with pytest.raises(UnavailableError, match="memory"):
        PagedPool(CacheSpec(SHAPE, DTYPES["bf16"], 16, 1), 1 << 50)
