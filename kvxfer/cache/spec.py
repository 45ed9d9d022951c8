"""CacheSpec: how a model's KV cache lies in memory."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.errors import UsageError
from kvxfer.model.dtypes import DTYPES, DType
from kvxfer.model.shape import ModelShape


@dataclass(frozen=True)
class CacheSpec:
    """A paged cache in NHD order: layer, block, token, head, cell.

    With one region per layer the cell holds K and V of a head together (vLLM >= 0.26); with two, each layer has a
    region for K and one for V (vLLM <= 0.25). Regions are numbered layer by layer, K before V.
    """

    shape: ModelShape
    dtype: DType
    block_size: int = 16
    regions_per_layer: int = 1

    def __post_init__(self) -> None:
        known_only = "kvxfer plan and kvxfer model know its bytes; bench does not move it yet"
        if not self.shape.is_plain:
            kind = self.shape.family.replace("_", " ")
            raise UsageError(f"the cache of {self.shape.name} is not plain full attention ({kind}): {known_only}")
        if self.dtype.name not in DTYPES:
            raise UsageError(f"dtype {self.dtype.name} has scales among its elements: {known_only}")
        if self.block_size < 1:
            raise UsageError(f"block size {self.block_size}: a block holds at least one token")
        if self.regions_per_layer not in (1, 2):
            raise UsageError(f"{self.regions_per_layer} regions per layer: 1 (K and V together) or 2 are possible")

    @property
    def cells(self) -> list[int]:
        """Elements per head and token in each region of a layer."""
        k, v = self.shape.head_dim_k, self.shape.head_dim_v
        return [k + v] if self.regions_per_layer == 1 else [k, v]

    @property
    def block_bytes(self) -> list[int]:
        """Bytes of a block in each region, over all layers."""
        per_layer = [self.block_size * self.shape.kv_heads * cell * self.dtype.bytes for cell in self.cells]
        return per_layer * self.shape.layers

    def block_shape(self, region: int) -> tuple[int, int, int]:
        """(tokens, heads, cell) of a block of that region, in elements."""
        return self.block_size, self.shape.kv_heads, self.cells[region % self.regions_per_layer]

    def blocks(self, tokens: int) -> int:
        """Blocks of a request of so many tokens; the last one may be partly used and moves whole."""
        if tokens < 1:
            raise UsageError(f"{tokens} tokens: a request has at least one")
        return -(-tokens // self.block_size)

    def request_bytes(self, tokens: int) -> int:
        """Bytes that a request of so many tokens moves."""
        return self.blocks(tokens) * sum(self.block_bytes)


def region_addresses(base: int, block_bytes: list[int], blocks: int) -> list[int]:
    """Address of each region of a pool that begins at `base`."""
    addresses = []
    for size in block_bytes:
        addresses.append(base)
        base += size * blocks
    return addresses
