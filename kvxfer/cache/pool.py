"""PagedPool: native memory that holds a paged cache, seen as torch tensors only when someone asks."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from kvxfer import _native
from kvxfer.cache.layout import Ranks, Region
from kvxfer.cache.spec import CacheSpec, region_addresses

if TYPE_CHECKING:
    import torch


class PagedPool:
    """`blocks` blocks in every region of a side, the regions one after another in one piece of memory.

    Raises UnavailableError when the memory cannot be had.
    """

    def __init__(self, spec: CacheSpec, blocks: int, ranks: Ranks | None = None) -> None:
        self.spec = spec
        self.blocks = blocks
        self.layout = spec.regions(ranks or Ranks())
        self.region_bytes = [blocks * region.block_bytes for region in self.layout]
        self.memory = _native.Mapping(sum(self.region_bytes))
        self.regions = region_addresses(self.memory.address, self.region_bytes)

    def tensor(self, region: int) -> torch.Tensor:
        """The region as a tensor that shares the pool's memory; imports torch. Keep the pool as long as the tensor.

        Of the cache's dtype and [blocks, tokens, heads, cell] under NHD, [blocks, heads, tokens, cell] under HND;
        where a cell holds more than elements (scales, an indexer's key, a state) or blocks hold several layers, of
        bytes and [blocks, bytes].
        """
        import torch

        size = self.region_bytes[region]
        buffer = (ctypes.c_uint8 * size).from_address(self.regions[region])
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
        shape = self._element_shape(self.layout[region])
        if shape is None:
            return flat.view(self.blocks, -1)
        dtype: torch.dtype = getattr(torch, self.spec.dtype.torch_name)
        return flat.view(dtype).view(self.blocks, *shape)

    def _element_shape(self, region: Region) -> tuple[int, int, int] | None:
        """Of a block in elements; None when it holds something else too."""
        if len(region.entries) > 1 or region.entries[0].part.name not in ("kv", "k", "v", "latent"):
            return None
        if self.spec.dtype.scale_bytes or self.spec.dtype.latent_bytes is not None:
            return None
        entry = region.entries[0]
        cell = entry.part.cell // self.spec.dtype.bytes
        tokens, heads = entry.part.tokens, entry.heads
        return (tokens, heads, cell) if self.spec.order == "nhd" else (heads, tokens, cell)
