"""PagedPool: native memory that holds a paged cache, seen as torch tensors only when someone asks."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from kvxfer import _native
from kvxfer.cache.spec import CacheSpec, region_addresses

if TYPE_CHECKING:
    import torch


class PagedPool:
    """`blocks` blocks in every region of the spec, the regions one after another in one piece of memory.

    Raises UnavailableError when the memory cannot be had.
    """

    def __init__(self, spec: CacheSpec, blocks: int) -> None:
        self.spec = spec
        self.blocks = blocks
        self.memory = _native.Mapping(blocks * sum(spec.block_bytes))
        self.regions = region_addresses(self.memory.address, spec.block_bytes, blocks)

    def tensor(self, region: int) -> torch.Tensor:
        """The region as a tensor [blocks, tokens, heads, cell] of the cache's dtype, sharing the pool's memory.

        The memory lives as long as the pool: keep the pool. Imports torch.
        """
        import torch

        size = self.blocks * self.spec.block_bytes[region]
        buffer = (ctypes.c_uint8 * size).from_address(self.regions[region])
        dtype: torch.dtype = getattr(torch, self.spec.dtype.torch_name)
        return torch.frombuffer(buffer, dtype=dtype).view(self.blocks, *self.spec.block_shape(region))
