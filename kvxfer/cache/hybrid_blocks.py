"""The blocks that vLLM makes of a model with states: it wants a block of attention no smaller than a state.

So both can lie in one pool. Where the block size asked for is too small, it takes the least multiple of it that is
large enough (Platform._align_hybrid_block_size), 544 tokens of Qwen3-Next in place of 16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvxfer.cache.layout import Ranks
from kvxfer.cache.spec import CacheSpec


def hybrid_block_size(spec: CacheSpec, ranks: Ranks) -> int:
    """Tokens per block on such ranks; the spec's own where there are no states, or no attention beside them.

    Raises UsageError when the heads do not divide over the ranks.
    """
    states: Counter[int] = Counter()  # bytes on a rank, by layer
    tokens: Counter[int] = Counter()  # the same of one token
    for region in spec.regions(Ranks(ranks.tp, side=ranks.side)):
        for entry in region.entries:
            if region.rank == 0:
                size = entry.heads * entry.part.cell
                (states if entry.part.of_state else tokens)[entry.part.layer] += size
    if not states or not tokens:
        return spec.block_size
    block = spec.block_size * min(tokens.values())
    return spec.block_size * -(-max(states.values()) // block)


def hybrid_notices(specs: Iterable[CacheSpec], *sides: Ranks) -> list[str]:
    """What a reader of figures in smaller blocks should know, a sentence for each dtype."""
    notices = []
    for spec in specs:
        size = max(hybrid_block_size(spec, side) for side in sides)
        if size != spec.block_size:
            notices.append(
                f"vLLM keeps {spec.shape.name} in {spec.dtype.name} in blocks of {size:,} tokens, as large as a state, "
                f"where it is asked for {spec.block_size}: --block-size {size} counts and moves those"
            )
    return notices
