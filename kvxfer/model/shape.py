"""The shape of a model: what the size of its KV cache and the work of its prefill follow from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from kvxfer.errors import UsageError
from kvxfer.model.dtypes import DType
from kvxfer.model.layers import FullAttention, Latent, LayerKind
from kvxfer.model.mlp import Mlp

MTP_LEFT_OUT = "its layers of multi-token prediction are left out; --with-mtp counts them"
"""How the notice ends that a model has while with_mtp() has not been called."""


@dataclass(frozen=True)
class ModelShape:
    """A model as its config.json describes it, and what each of its layers keeps.

    layer_kinds are the layers in order; when not given, every layer keeps K and V of every token (GQA, MHA or MQA).
    heads are query heads, kv_heads those of K and V, head_dim_* elements per head, as the config names them: the cache
    is made of these only when the model is plain. naive_head_dim is what the plain formula would be given (None:
    head_dim_k). mtp_kinds are multi-token-prediction layers, which are not among the layers; with_mtp() adds them, and
    then mtp_layers says how many of the layers they are, the last ones.

    Parameters are counts, None when not known; params_active are those that work on one token: fewer than params_total
    in a mixture of experts, more where layers share weights, which count each time they work. params_embedding counts
    the input embedding table plus the output head (once if tied): the tables that do no work per prompt token in
    prefill, since the first is a lookup and the second runs for the last token only. Both other counts include them.
    mlps are those of the layers in order, none where they are not all known; query_rank is the latent that MLA's
    queries are made of (0: there is none); with output_gate, attention's queries make a gate of its output beside them.
    notices are sentences a reader of any figure of this model should see.
    """

    name: str
    family: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    params_total: int | None = None
    params_active: int | None = None
    params_embedding: int | None = None
    notices: tuple[str, ...] = ()
    layer_kinds: tuple[LayerKind, ...] = ()
    naive_head_dim: int | None = None
    mtp_kinds: tuple[LayerKind, ...] = ()
    mtp_layers: int = 0
    mlps: tuple[Mlp, ...] = ()
    query_rank: int = 0
    output_gate: bool = False

    def __post_init__(self) -> None:
        if not self.layer_kinds:
            plain = FullAttention(self.kv_heads, self.head_dim_k, self.head_dim_v)
            object.__setattr__(self, "layer_kinds", (plain,) * self.layers)

    @property
    def is_plain(self) -> bool:
        """Whether every layer keeps K and V of every token, kv_heads heads of head_dim_k and head_dim_v elements."""
        plain = FullAttention(self.kv_heads, self.head_dim_k, self.head_dim_v)
        return len(self.layer_kinds) == self.layers and all(kind == plain for kind in self.layer_kinds)

    def groups(self) -> list[tuple[int, LayerKind]]:
        """How many layers there are of each kind, in the order of their first."""
        return self._groups

    def prefill_groups(self) -> list[tuple[int, LayerKind]]:
        """The same of the layers that a prefill computes: those of multi-token prediction are not among them."""
        return self._prefill_groups

    # Counted once: a plan asks for thousands of prompt lengths.
    @cached_property
    def _groups(self) -> list[tuple[int, LayerKind]]:
        return _grouped(self.layer_kinds)

    @cached_property
    def _prefill_groups(self) -> list[tuple[int, LayerKind]]:
        return _grouped(self.layer_kinds[: len(self.layer_kinds) - self.mtp_layers])

    def kv_bytes_per_token(self, dtype: DType) -> int:
        """Bytes that one more token adds to a long prompt: those of the layers that grow with it.

        Of a plain model L · kv_heads · (d_k + d_v) · bytes of an element. Raises UsageError when the model has no cache
        of that dtype.
        """
        by_group = [(count, kind.grows, kind.token_bytes(dtype)) for count, kind in self.groups()]
        return sum(count * size for count, grows, size in by_group if grows)

    def rank_bytes_per_token(self, dtype: DType, tp: int) -> int:
        """kv_bytes_per_token on each of `tp` tensor-parallel ranks: heads divided or replicated, latents replicated.

        Raises UsageError when the heads cannot be divided so.
        """
        return sum(count * kind.rank_token_bytes(dtype, tp) for count, kind in self.groups() if kind.grows)

    def fixed_bytes_per_request(self, block_size: int, dtype: DType) -> int:
        """Bytes that do not grow with the prompt: full windows and states. A short prompt does not fill its windows."""
        return sum(count * kind.fixed_bytes(block_size, dtype) for count, kind in self.groups())

    def request_bytes(self, tokens: int, block_size: int, dtype: DType, held_blocks: int = 0) -> int:
        """Bytes that move for a prompt of `tokens`: whole blocks of `block_size` tokens, the last one padded.

        The first `held_blocks` are there already and do not move. Then a window's blocks move only as far as they are
        not among them, and states move as long as any block does.
        """
        missing = blocks_of(tokens, block_size) - held_blocks
        if missing <= 0:
            return 0
        return sum(count * kind.request_bytes(missing, block_size, dtype) for count, kind in self.groups())

    def descriptors(self, tokens: int, block_size: int, regions_per_layer: int) -> int:
        """Pieces that move for a prompt when no two of its blocks are adjacent (fragmentation 1)."""
        blocks = blocks_of(tokens, block_size)
        return sum(count * kind.pieces(blocks, block_size, regions_per_layer) for count, kind in self.groups())

    def naive_bytes_per_token(self, dtype: DType) -> int | None:
        """What the plain formula 2 · layers · kv_heads · head_dim · bytes says of this config, right or wrong.

        None for a dtype whose elements have no size of their own.
        """
        if dtype.latent_bytes is not None:
            return None
        return 2 * self.layers * self.kv_heads * (self.naive_head_dim or self.head_dim_k) * dtype.bytes

    def supports(self, dtype: DType) -> bool:
        """Whether the model has a cache of that dtype."""
        try:
            self.kv_bytes_per_token(dtype)
        except UsageError:
            return False
        return True

    def dtype_notices(self, dtypes: Iterable[DType]) -> list[str]:
        """What a reader of bytes in these dtypes should know."""
        packed = any(isinstance(kind, Latent) and kind.packs for kind in self.layer_kinds)
        plain = [dtype.name for dtype in dtypes if dtype.bytes == 1 and dtype.latent_bytes is None]
        return [
            f"vLLM keeps an {name} cache of {self.name} as fp8_ds_mla, which has other bytes"
            for name in plain
            if packed
        ]

    def with_mtp(self) -> ModelShape:
        """The model with its multi-token-prediction layers. Raises UsageError when none are known."""
        if not self.mtp_kinds:
            raise UsageError(
                f"{self.name} has no multi-token-prediction layers whose cache is known here; leave --with-mtp out"
            )
        kinds = self.layer_kinds + self.mtp_kinds
        count = len(self.mtp_kinds)
        notices = tuple(notice for notice in self.notices if not notice.endswith(MTP_LEFT_OUT))
        return replace(
            self, layers=self.layers + count, layer_kinds=kinds, mtp_kinds=(), mtp_layers=count, notices=notices
        )


def _grouped(kinds: Iterable[LayerKind]) -> list[tuple[int, LayerKind]]:
    return [(count, kind) for kind, count in Counter(kinds).items()]


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks that a prompt fills, the last one perhaps in part."""
    return -(-tokens // block_size)


def whole_block_tokens(tokens: int, block_size: int) -> int:
    """Tokens rounded up to whole blocks."""
    return blocks_of(tokens, block_size) * block_size
