"""The widths of a device's share of a layer: as the model's parameters have them, and divided without loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from shared_files import CONFIGS

from kvxfer.errors import UsageError
from kvxfer.model.config import read_config, shape_from_config
from kvxfer.model.layers import AttentionAndState, FullAttention, NoCache, State
from kvxfer.model.mlp import Mlp
from kvxfer.model.presets import load_model, preset_names
from kvxfer.model.recurrence import GATED_DELTA, MAMBA2, Recurrence
from kvxfer.model.shape import ModelShape
from kvxfer.model.widths import Attention, Share, Widths, shares

NEMOTRON = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "attention_head_dim": 128,
    "hybrid_override_pattern": "M-M*-MEE",
    "intermediate_size": 4096,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 32,
    "mamba_head_dim": 64,
    "n_groups": 4,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "moe_shared_expert_intermediate_size": 768,
    "moe_latent_size": 256,
    "vocab_size": 32_000,
}
GRANITE = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "vocab_size": 32_000,
}
STARCODER = {
    "model_type": "starcoder2",
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 4096,
    "use_bias": False,
    "vocab_size": 32_000,
}
DESCRIBED = {"nemotron": NEMOTRON, "granite": GRANITE, "starcoder": STARCODER}


def config_file(name: str) -> Path:
    if not (CONFIGS / name).exists():
        pytest.skip("the configs are not beside this checkout")
    return CONFIGS / name


def described(**config: object) -> ModelShape:
    return shape_from_config(config, "described", "config.json")


def require_all_parameters(shape: ModelShape) -> Share:
    """That the layers built have the weights of the model but its embedding; norms and biases are the rest."""
    whole = shares(shape)[0]
    assert len(whole.order) == shape.layers
    assert shape.params_total is not None
    assert shape.params_embedding is not None
    every = sum(whole.kinds[kind].params for kind in whole.order)
    assert every == pytest.approx(shape.params_total - shape.params_embedding, rel=1e-3)
    return whole


@pytest.mark.parametrize("model", preset_names())
def test_all_layers_have_the_parameters_of_the_model(model: str) -> None:
    require_all_parameters(load_model(model))


@pytest.mark.parametrize("name", DESCRIBED)
def test_so_have_those_of_a_config(name: str) -> None:
    require_all_parameters(described(**DESCRIBED[name]))


def test_so_have_those_of_nemotron_h_56b() -> None:
    whole = require_all_parameters(read_config(config_file("nvidia--Nemotron-H-56B-Base-8K.json")))
    assert [whole.order.count(kind) for kind in range(3)] == [54, 54, 10]
    assert whole.labels == (
        "Mamba-2, 256 heads of 64, 8 groups of 256",
        "MLP of 32,768, relu2 without a gate",
        "full attention, 8 KV heads of 128",
    )


def test_so_have_all_published_configs() -> None:
    if not CONFIGS.exists():
        pytest.skip("the published configs are not beside this checkout")
    for path in CONFIGS.glob("*.json"):
        require_all_parameters(read_config(path))


def test_nemotron_h_has_one_thing_a_layer() -> None:
    whole = shares(described(**NEMOTRON))[0]
    mamba, mlp, attention, experts = whole.kinds
    assert whole.order == (0, 1, 0, 2, 1, 0, 3, 3)
    assert mamba == Widths(1024, recurrence=Recurrence(MAMBA2, 4, 128, 32, 64, 4))
    assert mlp == Widths(1024, mlp=Mlp(4096, gated=False, activation="relu2"))
    assert attention == Widths(1024, Attention(16, 2, 128, 128))
    mixture = Mlp(768, 32, 4, 512, latent=256, gated=False, activation="relu2")
    assert experts == Widths(1024, mlp=mixture, own_experts=32)
    assert whole.labels[3] == (
        "32 experts of 512, 4 per token on a latent of 256 beside an MLP of 768, relu2 without a gate"
    )


def test_the_config_names_the_activation() -> None:
    assert shares(described(**STARCODER))[0].kinds[0].mlp == Mlp(4096, gated=False, activation="gelu_pytorch_tanh")
    other = described(**STARCODER, hidden_act="gelu")
    assert shares(other)[0].kinds[0].mlp.activation == "gelu"
    assert shares(load_model("gemma-3-27b"))[0].kinds[0].mlp.activation == "gelu_pytorch_tanh"
    assert shares(load_model("8b"))[0].kinds[0].mlp.activation == "silu"


def test_gated_delta_nets_alternate_with_attention_of_an_output_gate() -> None:
    whole, half, *_ = shares(load_model("qwen3-next-80b-a3b"))
    delta, full = whole.kinds
    assert whole.order == (0, 0, 0, 1) * 12
    assert delta.recurrence == Recurrence(GATED_DELTA, 16, 128, 32, 128, 4)
    assert full.attention == Attention(16, 2, 256, 256, output_gate=True)
    assert half.kinds[0].recurrence == Recurrence(GATED_DELTA, 8, 128, 16, 128, 4)
    assert whole.labels[0].startswith("gated delta net, 32 heads of 128, 16 key heads of 128; 512 experts of 512")


def test_every_device_has_the_indexer_whole() -> None:
    for share in shares(load_model("deepseek-v3.2"))[:3]:
        attention = share.kinds[0].attention
        assert attention is not None
        assert attention.heads == 128 // share.devices
        assert (attention.index_heads, attention.index_head_dim, attention.index_topk) == (64, 128, 2048)


def test_devices_share_groups_of_mamba_2_but_no_key_heads_of_a_delta_net() -> None:
    """8 heads of one group on each of 4; 32 heads of 16 key heads over 32 devices would leave half a key head each."""
    granite = shares(described(**GRANITE), 4)[0].kinds[0].recurrence
    assert granite is not None
    assert (granite.heads, granite.key_heads) == (8, 1)
    qwen = replace(load_model("qwen3-next-80b-a3b"), mlps=(Mlp(32),) * 48)
    assert [share.devices for share in shares(qwen)] == [1, 2, 4, 8, 16]


def test_deepseek_has_dense_layers_first_and_then_experts() -> None:
    whole = shares(load_model("deepseek-v3"))[0]
    dense, mixture = whole.kinds
    assert whole.order == (0,) * 3 + (1,) * 58
    assert dense == Widths(7168, Attention(128, 128, 192, 128, rank=512, rope=64, query_rank=1536), mlp=Mlp(18432))
    assert mixture == replace(dense, mlp=Mlp(2048, 256, 8, 2048), own_experts=256)
    assert whole.labels[1] == "MLA latent of 512 + 64; 256 experts of 2,048, 8 per token beside an MLP of 2,048"


@pytest.mark.parametrize("model", ["70b", "mixtral-8x7b", "deepseek-v3"])
def test_shares_divide_what_is_not_on_every_device(model: str) -> None:
    whole, *divided = shares(load_model(model))
    assert [share.devices for share in divided] == [2**power for power in range(1, len(divided) + 1)]
    for share in divided:
        for all_of_it, part in zip(whole.kinds, share.kinds, strict=True):
            some, every = part.attention, all_of_it.attention
            assert some is not None
            assert every is not None
            heads, kv_heads = every.heads // share.devices, max(1, every.kv_heads // share.devices)
            assert some == replace(every, heads=heads, kv_heads=kv_heads)
            assert part.own_experts == all_of_it.mlp.experts // share.devices
            # So many tokens reach each expert, however many of them are here.
            assert part.mlp == replace(all_of_it.mlp, columns=all_of_it.mlp.columns // share.devices)


def test_the_fewest_devices_are_those_asked_for() -> None:
    assert [share.devices for share in shares(load_model("8b"), 4)] == [4, 8, 16, 32]


@pytest.mark.parametrize(
    ("model", "fewest", "says"),
    [
        ("8b", 3, "its heads and experts do not divide over 3 devices"),
        ("mixtral-8x7b", 16, "its heads and experts do not divide over 16 devices"),
    ],
)
def test_what_is_not_computed_is_refused(model: str, fewest: int, says: str) -> None:
    with pytest.raises(UsageError, match=f"the layers of .* cannot be computed here: {says}"):
        shares(load_model(model), fewest)


def test_kinds_that_are_not_known_are_refused() -> None:
    (state,) = {kind for kind in load_model("qwen3-next-80b-a3b").layer_kinds if isinstance(kind, State)}
    beside = AttentionAndState(FullAttention(2, 8, 8), state)  # as Zamba2 has it, with MLPs that layers share
    for kind, mlps in ((replace(state, recurrence=None), (Mlp(64),)), (beside, ())):
        shape = ModelShape("odd", "odd", 1, 64, 4, 2, 8, 8, layer_kinds=(kind,), mlps=mlps)
        with pytest.raises(UsageError, match=r"the layers of odd cannot be computed here: it has layers with .*state"):
            shares(shape)
    shape = ModelShape("odd", "odd", 1, 64, 4, 2, 8, 8, layer_kinds=(NoCache(),), mlps=(Mlp(64, activation="xielu"),))
    with pytest.raises(UsageError, match="cannot be computed here: the activation of its MLPs is 'xielu'"):
        shares(shape)


def test_drafting_layers_and_unknown_mlps_are_refused() -> None:
    with pytest.raises(UsageError, match="its MLPs are of no kind that is known here"):
        shares(load_model("deepseek-v3").with_mtp())
    with pytest.raises(UsageError, match="its MLPs are of no kind that is known here"):
        shares(replace(load_model("8b"), mlps=()))
