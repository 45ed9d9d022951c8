"""The widths of a device's share of a layer: as the model's parameters have them, and divided without loss."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvxfer.errors import UsageError
from kvxfer.model.presets import load_model
from kvxfer.model.widths import Widths, shares

DENSE = ["8b", "70b", "405b", "qwen3-0.6b", "qwen3-32b", "gemma-3-27b"]
MIXTURES = ["deepseek-v3", "kimi-k2", "mixtral-8x7b", "gpt-oss-20b", "llama-4-scout", "qwen3-30b-a3b"]


@pytest.mark.parametrize("model", DENSE + MIXTURES)
def test_all_layers_have_the_parameters_of_the_model(model: str) -> None:
    shape = load_model(model)
    whole = shares(shape)[0]
    assert len(whole.order) == shape.layers
    assert shape.params_total is not None
    assert shape.params_embedding is not None
    every = sum(whole.kinds[kind].params for kind in whole.order)
    assert every == pytest.approx(shape.params_total - shape.params_embedding, rel=1e-3)  # norms are the rest


def test_deepseek_has_dense_layers_first_and_then_experts() -> None:
    whole = shares(load_model("deepseek-v3"))[0]
    dense, mixture = whole.kinds
    assert whole.order == (0,) * 3 + (1,) * 58
    assert dense == Widths(7168, 128, 128, 192, 128, columns=18432, rank=512, rope=64, query_rank=1536)
    assert mixture == replace(dense, columns=2048, experts=256, own_experts=256, per_token=8, expert_columns=2048)
    assert whole.labels[1] == "MLA latent of 512 + 64; 256 experts of 2,048, 8 per token beside an MLP of 2,048"


@pytest.mark.parametrize("model", ["70b", "mixtral-8x7b", "deepseek-v3"])
def test_shares_divide_what_is_not_on_every_device(model: str) -> None:
    whole, *divided = shares(load_model(model))
    assert [share.devices for share in divided] == [2**power for power in range(1, len(divided) + 1)]
    for share in divided:
        for all_of_it, part in zip(whole.kinds, share.kinds, strict=True):
            assert (part.heads, part.columns) == (all_of_it.heads // share.devices, all_of_it.columns // share.devices)
            assert part.kv_heads == max(1, all_of_it.kv_heads // share.devices)
            assert part.own_experts == all_of_it.experts // share.devices
            assert (part.experts, part.per_token) == (all_of_it.experts, all_of_it.per_token)
            # So many tokens reach each expert, however many of them are here.
            assert (part.rank, part.query_rank, part.expert_columns) == (
                all_of_it.rank,
                all_of_it.query_rank,
                all_of_it.expert_columns,
            )


def test_the_fewest_devices_are_those_asked_for() -> None:
    assert [share.devices for share in shares(load_model("8b"), 4)] == [4, 8, 16, 32]


@pytest.mark.parametrize(
    ("model", "fewest", "says"),
    [
        ("qwen3-next-80b-a3b", 1, "it has layers with state"),
        ("deepseek-v3.2", 1, "it has layers with MLA latent of 512 [+] 64, indexer key of 128"),
        ("8b", 3, "its heads and experts do not divide over 3 devices"),
        ("mixtral-8x7b", 16, "its heads and experts do not divide over 16 devices"),
    ],
)
def test_what_is_not_computed_is_refused(model: str, fewest: int, says: str) -> None:
    with pytest.raises(UsageError, match=f"the layers of .* cannot be computed here: {says}"):
        shares(load_model(model), fewest)


def test_drafting_layers_and_unknown_mlps_are_refused() -> None:
    with pytest.raises(UsageError, match="its MLPs are of no kind that is known here"):
        shares(load_model("deepseek-v3").with_mtp())
    with pytest.raises(UsageError, match="its MLPs are of no kind that is known here"):
        shares(replace(load_model("8b"), mlps=()))
