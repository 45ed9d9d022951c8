"""What layers keep: by hand, and what must hold for every kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import UsageError
from kvxfer.model.dtypes import BF16, FP8_PER_TOKEN_HEAD, DType, resolve_dtype
from kvxfer.model.layers import (
    AttentionAndState,
    ChunkedAttention,
    FullAttention,
    Latent,
    LayerKind,
    NoCache,
    SlidingWindow,
    State,
    StatePart,
)
from kvxfer.model.shape import ModelShape

few, some = st.integers(1, 8), st.integers(1, 300)

FULL = st.builds(FullAttention, few, some, some)
PART = st.builds(StatePart, st.just("part"), few, some, few)
STATE = st.builds(State, st.tuples(PART, PART), PART)
KINDS: st.SearchStrategy[LayerKind] = st.one_of(
    FULL,
    st.builds(ChunkedAttention, few, some, some, chunk=some),
    st.builds(SlidingWindow, few, some, some, window=st.integers(1, 3000)),
    STATE,
    st.builds(AttentionAndState, FULL, STATE),
    st.just(NoCache()),
)
LATENTS: st.SearchStrategy[LayerKind] = st.builds(
    Latent, some, some, some, some, st.sampled_from([0, 128, 256]), st.just(4), st.just(64)
)
MIXED = st.lists(KINDS, min_size=1, max_size=6) | st.lists(LATENTS, min_size=1, max_size=3)
BLOCK = st.sampled_from([1, 16, 64, 100])
LONG_ENOUGH = 3100
"""Blocks in which every window of KINDS is full, whatever the block size."""


def model(kinds: list[LayerKind]) -> ModelShape:
    return ModelShape("tiny", "mixed", len(kinds), 64, 8, 8, 8, 8, layer_kinds=tuple(kinds))


def test_a_window_by_hand() -> None:
    """Window 128 in blocks of 16: at most 9 blocks; a shorter prompt does not fill them."""
    kind = SlidingWindow(8, 64, 64, window=128)
    assert [model([kind]).request_bytes(tokens, 16, BF16) // (16 * 2048) for tokens in (1, 17, 128, 129, 9999)] == [
        *(1, 2, 8, 9, 9),
    ]
    assert model([kind]).kv_bytes_per_token(BF16) == 0
    assert model([kind]).fixed_bytes_per_request(16, BF16) == 9 * 16 * 2048


def test_a_short_prompt_does_not_fill_the_windows_of_gemma() -> None:
    """512 tokens in a window of 1024: all 62 layers hold them, and the slope and the constant would say otherwise."""
    window, full = SlidingWindow(16, 128, 128, window=1024), FullAttention(16, 128, 128)
    gemma = model([window] * 52 + [full] * 10)
    assert gemma.request_bytes(512, 16, BF16) == 62 * 512 * 8192
    assert gemma.request_bytes(512, 16, BF16) < gemma.fixed_bytes_per_request(16, BF16)


def test_a_state_is_of_its_own_dtypes() -> None:
    state = State((StatePart("convolution", 1, 36_864, 2),), StatePart("recurrent", 64, 16_384, 4))
    for dtype in ("bf16", "fp8", "fp8_per_token_head"):
        assert model([state]).request_bytes(1, 16, resolve_dtype(dtype)) == 36_864 * 2 + 1_048_576 * 4


def test_keys_and_values_of_different_size() -> None:
    kind = FullAttention(4, 192, 128)
    assert kind.token_bytes(BF16) == 4 * 320 * 2
    assert kind.token_bytes(FP8_PER_TOKEN_HEAD) == 4 * (320 + 8)


def test_ranks_divide_heads_and_replicate_latents() -> None:
    assert [FullAttention(8, 64, 64).rank_token_bytes(BF16, tp) for tp in (1, 2, 8, 16)] == [2048, 1024, 256, 256]
    assert Latent(512, 64, 192, 128).rank_token_bytes(BF16, 8) == 1152
    with pytest.raises(UsageError):
        FullAttention(8, 64, 64).rank_token_bytes(BF16, 3)


@given(kinds=MIXED, block=BLOCK, tokens=st.lists(st.integers(1, 10**5), min_size=2, max_size=2).map(sorted))
def test_more_tokens_are_never_fewer_bytes_nor_pieces(kinds: list[LayerKind], block: int, tokens: list[int]) -> None:
    shape = model(kinds)
    sizes = [shape.request_bytes(count, block, BF16) for count in tokens]
    pieces = [shape.descriptors(count, block, 1) for count in tokens]
    assert sizes[0] <= sizes[1]
    assert pieces[0] <= pieces[1]
    assert pieces[1] <= shape.descriptors(tokens[1], block, 2)


@given(kinds=MIXED, block=BLOCK, blocks=st.integers(LONG_ENOUGH, 10**6))
def test_slope_and_constant_are_the_bytes_of_a_long_prompt(kinds: list[LayerKind], block: int, blocks: int) -> None:
    shape = model(kinds)
    tokens = blocks * block
    slope, constant = shape.kv_bytes_per_token(BF16), shape.fixed_bytes_per_request(block, BF16)
    assert shape.request_bytes(tokens, block, BF16) == tokens * slope + constant


@given(kinds=MIXED, block=BLOCK, tokens=st.integers(1, 10**5))
def test_the_bytes_are_those_of_the_layers(kinds: list[LayerKind], block: int, tokens: int) -> None:
    shape = model(kinds)
    assert shape.request_bytes(tokens, block, BF16) == sum(
        model([kind]).request_bytes(tokens, block, BF16) for kind in kinds
    )
    assert sum(count for count, _ in shape.groups()) == len(kinds)


@given(kinds=MIXED, block=BLOCK, tokens=st.integers(1, 10**5), held=st.lists(st.integers(0, 10**5), min_size=2))
def test_what_is_held_does_not_move(kinds: list[LayerKind], block: int, tokens: int, held: list[int]) -> None:
    shape = model(kinds)
    blocks = -(-tokens // block)
    few, many = sorted(held)[0], sorted(held)[-1]
    sizes = [shape.request_bytes(tokens, block, BF16, count) for count in (0, few, many, blocks)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2"])
@given(kinds=MIXED)
def test_every_kind_has_a_cache_of_every_plain_dtype(kinds: list[LayerKind], dtype: str) -> None:
    wanted: DType = resolve_dtype(dtype)
    assert model(kinds).supports(wanted)
    assert all(kind.label for kind in kinds)


def test_only_models_whose_layers_are_all_full_are_plain() -> None:
    plain, other = FullAttention(8, 8, 8), FullAttention(4, 8, 8)
    assert model([plain, plain]).is_plain
    assert not model([plain, other]).is_plain
    assert not model([plain, NoCache()]).is_plain
    assert not model([plain, ChunkedAttention(8, 8, 8, chunk=8)]).is_plain
    assert not model([plain, SlidingWindow(8, 8, 8, window=8)]).is_plain


def test_layers_of_multi_token_prediction_are_counted_when_asked_for() -> None:
    latent = Latent(512, 64, 192, 128)
    shape = ModelShape("tiny", "mla", 2, 64, 8, 8, 8, 8, layer_kinds=(latent,) * 2, mtp_kinds=(latent,))
    assert shape.with_mtp().kv_bytes_per_token(BF16) == 3 * 1152
    assert shape.with_mtp().layers == 3
    with pytest.raises(UsageError, match="tiny has no multi-token-prediction layers"):
        shape.with_mtp().with_mtp()
