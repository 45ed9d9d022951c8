"""What one layer of a model keeps of a request: the kinds of layers, and the bytes of each.

Sizes are integers of bytes. A layer keeps some bytes per token in blocks of `block_size` tokens (of all blocks, or of
the last ones only), or a state that does not grow with the prompt, or nothing. How each kind is counted follows vLLM's
cache specs: whole blocks, one page per state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxfer.errors import UsageError
from kvxfer.model.dtypes import DType
from kvxfer.model.recurrence import GATED_DELTA, Recurrence

PACKED_LATENT = (512, 64)
"""Rank and rotary elements of the one latent that the packed formats (fp8_ds_mla, nvfp4_ds_mla) are made for."""


class LayerKind:
    """A layer that keeps nothing, unless a subclass says otherwise."""

    @property
    def label(self) -> str:
        """The kind in words, with the numbers that its bytes follow from."""
        raise NotImplementedError

    @property
    def state_bytes(self) -> int:
        """Bytes of a request that do not depend on the prompt nor on the cache's dtype."""
        return 0

    def token_bytes(self, dtype: DType) -> int:
        """Bytes of one token. Raises UsageError when this kind has no cache of that dtype."""
        return 0

    def rank_token_bytes(self, dtype: DType, tp: int) -> int:
        """Bytes of one token on each of `tp` tensor-parallel ranks; by default all of them."""
        return self.token_bytes(dtype)

    def most_blocks(self, block_size: int) -> int | None:
        """The most blocks that a request fills here; None: all of its blocks."""
        return 0

    def regions(self, per_layer: int) -> int:
        """Pieces of memory that this layer's cache lies in, where K and V lie in `per_layer` (1 or 2)."""
        return 0

    @property
    def grows(self) -> bool:
        """Whether every further block of a prompt adds bytes."""
        return self.most_blocks(1) is None

    def blocks(self, blocks: int, block_size: int) -> int:
        """How many of a request's blocks lie here."""
        most = self.most_blocks(block_size)
        return blocks if most is None else min(blocks, most)

    def request_bytes(self, blocks: int, block_size: int, dtype: DType) -> int:
        """Bytes of the last `blocks` blocks of a request, with the state."""
        return self.blocks(blocks, block_size) * block_size * self.token_bytes(dtype) + self.state_bytes

    def fixed_bytes(self, block_size: int, dtype: DType) -> int:
        """Bytes of a request however long, when it is long enough to fill what is bounded; 0 for a layer that grows."""
        most = self.most_blocks(block_size)
        return self.state_bytes + (most or 0) * block_size * self.token_bytes(dtype)

    def pieces(self, blocks: int, block_size: int, regions_per_layer: int) -> int:
        """Descriptors of a request's blocks of which no two are adjacent."""
        return self.blocks(blocks, block_size) * self.regions(regions_per_layer)


@dataclass(frozen=True)
class FullAttention(LayerKind):
    """K and V of every token: kv_heads · (d_k + d_v) elements. query_heads None: those of the model."""

    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    query_heads: int | None = field(default=None, kw_only=True)

    @property
    def label(self) -> str:
        return f"full attention, {self._heads}"

    @property
    def _heads(self) -> str:
        k, v = self.head_dim_k, self.head_dim_v
        return f"{self.kv_heads} KV heads of {k}" if k == v else f"{self.kv_heads} KV heads of {k} (K) and {v} (V)"

    def token_bytes(self, dtype: DType) -> int:
        if dtype.latent_bytes is not None:
            raise UsageError(f"dtype {dtype.name} packs an MLA latent, and this model has layers with K and V per head")
        return self.kv_heads * ((self.head_dim_k + self.head_dim_v) * dtype.bytes + 2 * dtype.scale_bytes)

    def rank_token_bytes(self, dtype: DType, tp: int) -> int:
        """Those of kv_heads / tp heads; with more ranks than heads each rank has one, which others have too."""
        if self.kv_heads % tp and tp % self.kv_heads:
            raise UsageError(f"{tp} tensor-parallel ranks do not divide {self.kv_heads} KV heads, nor the reverse")
        return self.token_bytes(dtype) // self.kv_heads * max(1, self.kv_heads // tp)

    def most_blocks(self, block_size: int) -> int | None:
        return None

    def regions(self, per_layer: int) -> int:
        return per_layer


@dataclass(frozen=True)
class ChunkedAttention(FullAttention):
    """Attention within chunks of `chunk` tokens. vLLM keeps every token all the same: the cache is a full layer's."""

    chunk: int = field(kw_only=True)

    @property
    def label(self) -> str:
        return f"attention in chunks of {self.chunk}, {self._heads}"


@dataclass(frozen=True)
class SlidingWindow(FullAttention):
    """Attention to the last `window` tokens: at most ceil(window / block_size) + 1 blocks are kept.

    The one more is there because a window seldom begins where a block does.
    """

    window: int = field(kw_only=True)

    @property
    def label(self) -> str:
        return f"sliding window of {self.window}, {self._heads}"

    def most_blocks(self, block_size: int) -> int | None:
        return -(-self.window // block_size) + 1


@dataclass(frozen=True)
class Latent(LayerKind):
    """MLA: one latent of rank + rope elements for all heads, K and V in one; every tensor-parallel rank holds it whole.

    An indexer (index_head_dim > 0) keeps a key of its own beside it, in fp8 whatever the dtype of the latent:
    index_head_dim bytes and a scale of 4 bytes per 128 of them, so 132 bytes at 128. qk_head_dim and v_head_dim are
    those of the heads that prefill computes with; index_topk is how many tokens the indexer lets each query attend to.
    """

    rank: int
    rope: int
    qk_head_dim: int
    v_head_dim: int
    index_head_dim: int = 0
    index_heads: int = 0
    index_topk: int = 0

    @property
    def label(self) -> str:
        indexer = f", indexer key of {self.index_head_dim}" if self.index_head_dim else ""
        return f"MLA latent of {self.rank} + {self.rope}{indexer}"

    @property
    def packs(self) -> bool:
        """Whether the packed formats are made for this latent."""
        return self.index_head_dim > 0 and (self.rank, self.rope) == PACKED_LATENT

    def token_bytes(self, dtype: DType) -> int:
        return self._latent_bytes(dtype) + self.index_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes of one token's indexer key, with its scales."""
        return self.index_head_dim + 4 * self.index_head_dim // 128

    def _latent_bytes(self, dtype: DType) -> int:
        if dtype.scale_bytes:
            raise UsageError(
                f"dtype {dtype.name} scales K and V per head, and this model keeps one latent for all heads"
            )
        if dtype.latent_bytes is None:
            return (self.rank + self.rope) * dtype.bytes
        if not self.packs:
            raise UsageError(
                f"dtype {dtype.name} packs a latent of {PACKED_LATENT[0]} + {PACKED_LATENT[1]} elements beside an "
                f"indexer's key, and this model has an {self.label}"
            )
        return dtype.latent_bytes

    def most_blocks(self, block_size: int) -> int | None:
        return None

    def regions(self, per_layer: int) -> int:
        """One for the latent, one for the indexer's keys: there are no K and V to lie apart."""
        return 2 if self.index_head_dim else 1


@dataclass(frozen=True)
class StatePart:
    """What of a state is cut over tensor-parallel ranks by heads of its own: `elements` of `bytes` each per head.

    Ranks divide the heads. Where they are `shared` and fewer than the ranks, each rank holds one that others hold too.
    """

    name: str
    heads: int
    elements: int
    bytes: int
    shared: bool = False

    @property
    def head_bytes(self) -> int:
        return self.elements * self.bytes


@dataclass(frozen=True)
class State(LayerKind):
    """Linear attention or Mamba: the last inputs of a convolution and a recurrent state, both of fixed size.

    Elements are of the model's own types, whatever the dtype of the cache. vLLM keeps the parts one after another in a
    page, the channels of the convolution first ([channel, input], which its NIXL connector asks for), and that
    connector moves every part by a descriptor of its own, between equal numbers of ranks too: three for the convolution
    and one for the recurrent state (vllm/model_executor/layers/mamba/mamba_utils.py, and ssm_conv_transfer_utils.py
    beside the NIXL connector). `recurrence` is what a layer computes with it, None where that is not known.
    """

    convolution: tuple[StatePart, ...]
    recurrent: StatePart
    recurrence: Recurrence | None = None

    @property
    def parts(self) -> tuple[StatePart, ...]:
        return (*self.convolution, self.recurrent)

    @property
    def label(self) -> str:
        conv, recurrent = _elements(*self.convolution), _elements(self.recurrent)
        return f"state, convolution {conv}, recurrent {recurrent}"

    @property
    def state_bytes(self) -> int:
        return sum(part.heads * part.head_bytes for part in self.parts)

    def pieces(self, blocks: int, block_size: int, regions_per_layer: int) -> int:
        """One for each part."""
        return len(self.parts)


def _elements(*parts: StatePart) -> str:
    return f"{sum(part.heads * part.elements for part in parts):,} × {parts[0].bytes} B"


def gated_delta_state(
    *, k_heads: int, k_dim: int, v_heads: int, v_dim: int, kernel: int, conv_bytes: int, ssm_bytes: int
) -> State:
    """Of a gated delta net: kernel - 1 inputs of q, k and v, and a matrix [v_dim, k_dim] for each v head.

    Ranks divide the k heads and the v heads; vLLM shares neither.
    """
    inputs = kernel - 1
    return State(
        (
            StatePart("convolution q", k_heads, k_dim * inputs, conv_bytes),
            StatePart("convolution k", k_heads, k_dim * inputs, conv_bytes),
            StatePart("convolution v", v_heads, v_dim * inputs, conv_bytes),
        ),
        StatePart("recurrent", v_heads, v_dim * k_dim, ssm_bytes),
        Recurrence(GATED_DELTA, k_heads, k_dim, v_heads, v_dim, kernel),
    )


@dataclass(frozen=True)
class GivenBytes(LayerKind):
    """So many bytes of every token, as the user said, in `shares` equal parts that ranks divide among them."""

    bytes_per_token: int
    shares: int = 1

    @property
    def label(self) -> str:
        return f"{self.bytes_per_token:,} B per token, as given"

    def token_bytes(self, dtype: DType) -> int:
        return self.bytes_per_token

    def most_blocks(self, block_size: int) -> int | None:
        return None

    def regions(self, per_layer: int) -> int:
        return per_layer


@dataclass(frozen=True)
class AttentionAndState(LayerKind):
    """A layer that has both, side by side."""

    attention: FullAttention
    state: State

    @property
    def label(self) -> str:
        return f"{self.attention.label}; {self.state.label}"

    @property
    def state_bytes(self) -> int:
        return self.state.state_bytes

    def token_bytes(self, dtype: DType) -> int:
        return self.attention.token_bytes(dtype)

    def rank_token_bytes(self, dtype: DType, tp: int) -> int:
        return self.attention.rank_token_bytes(dtype, tp)

    def most_blocks(self, block_size: int) -> int | None:
        return self.attention.most_blocks(block_size)

    def regions(self, per_layer: int) -> int:
        return self.attention.regions(per_layer)

    def pieces(self, blocks: int, block_size: int, regions_per_layer: int) -> int:
        parts = (self.attention, self.state)
        return sum(part.pieces(blocks, block_size, regions_per_layer) for part in parts)


@dataclass(frozen=True)
class NoCache(LayerKind):
    """A layer that keeps nothing: an MLP alone, or attention that was pruned away."""

    @property
    def label(self) -> str:
        return "no cache"
