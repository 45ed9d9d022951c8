"""Counting parameters: against transformers, against what was published, and by hand."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.errors import UsageError
from kvxfer.model.config import shape_from_config
from kvxfer.model.dtypes import BF16
from kvxfer.model.families import FAMILIES
from kvxfer.model.parameters.model_types import ARCHITECTURES
from kvxfer.model.shape import ModelShape


def sized(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
    }


BASE = sized(4, 64, 8, 2, 96, 100)


def read(**changes: Any) -> ModelShape:
    return shape_from_config(BASE | changes, "tiny", "config.json")


def counts(model: ModelShape) -> tuple[int | None, int | None]:
    return model.params_total, model.params_active


# --- every type, small -----------------------------------------------------------------------------------------------

LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {"shared_expert_intermediate_size": 40}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = ROUTED | {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "num_key_value_heads": 8,
}
INDEXED = MLA | {"index_head_dim": 128, "index_n_heads": 4, "index_topk": 16}
WINDOWS = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
MIMO = WINDOWS | ROUTED | {"head_dim": 24, "v_head_dim": 16, "swa_num_key_value_heads": 4}
LLAMA4 = LOCAL | {"intermediate_size_mlp": 200, "attention_chunk_size": 32, "head_dim": 8}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": "auto",
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
GRANITE = LOCAL | MAMBA | {"shared_intermediate_size": 40, "layer_types": ["linear_attention", "full_attention"] * 2}
NEMOTRON = {
    "hybrid_override_pattern": "M*-E",
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
}
ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
    "num_key_value_heads": 8,
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
BIASES = {"attention_bias": True, "mlp_bias": True}  # which some types obey and some do not

BY_TRANSFORMERS: list[tuple[str, dict[str, Any], int, int]] = [  # model_type, beside BASE, all, active
    ("llama", {}, 128_064, 128_064),
    ("llama", BIASES, 129_728, 129_728),
    ("mistral", BIASES, 128_064, 128_064),
    ("mixtral", LOCAL, 350_272, 202_816),
    ("phi3", BIASES, 128_064, 128_064),
    ("starcoder2", {}, 98_944, 98_944),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}, 104_064, 104_064),
    ("qwen2", BIASES, 128_448, 128_448),
    ("qwen2_moe", QWEN | SHARED, 185_024, 135_872),
    ("qwen2_moe", QWEN | SHARED | {"qkv_bias": False}, 184_640, 135_488),
    ("qwen3", BIASES, 749_888, 749_888),
    ("qwen3_moe", QWEN | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, 134_528, 122_240),
    ("qwen3_5_text", DELTA, 1_021_408, 1_021_408),
    ("qwen3_next", DELTA | QWEN | SHARED | BIASES, 1_088_352, 1_039_200),
    ("qwen3_5_moe_text", DELTA | QWEN | SHARED, 1_077_984, 1_028_832),
    ("deepseek_v2", MLA, 217_312, 168_160),
    ("deepseek_v2", MLA | BIASES | {"first_k_dense_replace": 1, "q_lora_rank": None}, 208_912, 172_048),
    ("deepseek_v3", MLA, 155_108, 142_820),
    ("deepseek_v3", MLA | BIASES | {"first_k_dense_replace": 1, "n_shared_experts": 2}, 199_068, 162_204),
    ("kimi_k2", MLA, 155_108, 142_820),  # counted there as deepseek_v3
    ("deepseek_v32", INDEXED | BIASES, 239_508, 227_220),
    ("glm_moe_dsa", INDEXED | {"mlp_layer_types": ["sparse", "dense"] * 2}, 251_624, 227_048),
    ("gpt_oss", LOCAL | WINDOWS, 644_464, 494_960),
    ("gpt_oss", LOCAL | WINDOWS | {"attention_bias": False}, 641_136, 491_632),
    ("minimax_m2", LOCAL | {"head_dim": 16}, 391_888, 244_432),
    ("mimo_v2_flash", MIMO | BIASES, 220_220, 183_356),
    ("mimo_v2_flash", MIMO | BIASES | {"moe_layer_freq": [0, 1, 1, 1]}, 220_220, 183_356),
    ("llama4_text", LLAMA4 | BIASES, 424_640, 277_184),
    ("llama4_text", LLAMA4 | {"moe_layers": [0]}, 261_952, 225_088),
    ("gemma2", WINDOWS | BIASES | {"head_dim": 16}, 164_160, 164_160),
    ("gemma3_text", WINDOWS | BIASES | {"head_dim": 16}, 164_288, 164_288),
    ("cohere2", WINDOWS | BIASES, 122_048, 122_048),
    ("olmo3", WINDOWS | BIASES, 129_024, 129_024),
    ("exaone4", WINDOWS | BIASES, 128_128, 128_128),
    ("granite", BIASES, 129_728, 129_728),
    ("granitemoe", LOCAL | BIASES, 350_912, 203_456),
    ("granitemoeshared", LOCAL | {"shared_intermediate_size": 40}, 380_992, 233_536),
    ("granitemoehybrid", GRANITE, 421_104, 273_648),
    (
        "granitemoehybrid",
        GRANITE | BIASES | {"num_local_experts": 0, "mamba_conv_bias": False, "mamba_proj_bias": True},
        125_888,
        125_888,
    ),
    ("bamba", MAMBA | {"attn_layer_indices": [1]}, 188_232, 188_232),
    ("bamba", MAMBA | BIASES | {"attn_layer_indices": [1, 2], "mamba_proj_bias": True}, 170_304, 170_304),
    ("nemotron_h", NEMOTRON, 101_020, 88_732),
    (
        "nemotron_h",
        NEMOTRON | BIASES | {"use_bias": True, "use_conv_bias": False, "mamba_proj_bias": True, "moe_latent_size": 32},
        93_428,
        87_284,
    ),
    ("zamba2", ZAMBA, 314_464, 466_400),
    (
        "zamba2",
        ZAMBA
        | {"num_mem_blocks": 2, "use_shared_attention_adapter": True, "adapter_rank": 8}
        | {"add_bias_linear": True, "use_conv_bias": False},
        318_784,
        395_008,
    ),
]
"""Counted in models that transformers 5.24.0 built from these very fields (torch 2.13.0, device "meta"): parameters, a
tied one once, plus the buffers e_score_correction_bias, which checkpoints hold. Active: of the tensors of experts the
share that works on a token; of Zamba2's shared blocks every use.
"""


@pytest.mark.parametrize(("model_type", "beside", "total", "active"), BY_TRANSFORMERS)
def test_every_type_has_the_weights_that_transformers_gives_it(
    model_type: str, beside: dict[str, Any], total: int, active: int
) -> None:
    assert counts(read(model_type=model_type, **beside)) == (total, active)


def test_every_known_type_is_counted_and_tested() -> None:
    known = frozenset().union(*(family.model_types for family in FAMILIES))
    assert known <= ARCHITECTURES.keys()
    alike = {"qwen3_vl_text", "qwen3_vl_moe_text", "gemma3"}  # as their namesakes
    alike |= {"qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"}  # as qwen2
    elsewhere = {"nemotron-nas", "deci"}  # not in transformers; below
    assert ARCHITECTURES.keys() - alike - elsewhere == {model_type for model_type, *_ in BY_TRANSFORMERS}


# --- real models -----------------------------------------------------------------------------------------------------


def hybrid(layers: int, attention: tuple[int, ...], name: str, other: str) -> list[str]:
    return [name if layer in attention else other for layer in range(layers)]


GRANITE_4 = {
    "model_type": "granitemoehybrid",
    "tie_word_embeddings": True,
    "layer_types": hybrid(40, (5, 15, 25, 35), "attention", "mamba"),
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
NEMOTRON_3 = {
    "model_type": "nemotron_h",
    "head_dim": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "n_shared_experts": 1,
}

REAL: dict[str, tuple[dict[str, Any], int, int, int]] = {  # config, all, active, embedding
    # the Hub's safetensors metadata say 32,207,337,984, and so does llama.cpp
    "granite-4.0-h-small": (
        sized(40, 4096, 32, 8, 768, 100_352)
        | GRANITE_4
        | {"num_local_experts": 72, "num_experts_per_tok": 10, "shared_intermediate_size": 1536, "mamba_n_heads": 128},
        32_207_337_984,
        8_803_121_664,
        411_041_792,
    ),
    # the card: 8.17B; safetensors 8,170,864,640
    "granite-3.3-8b": (
        sized(40, 4096, 32, 8, 12_800, 49_159) | {"model_type": "granite", "tie_word_embeddings": True},
        8_170_864_640,
        8_170_864_640,
        201_355_264,
    ),
    # safetensors 3,298,793,472; the name says 800M active
    "granite-3.1-3b-a800m": (
        sized(32, 1536, 24, 8, 512, 49_155)
        | {"model_type": "granitemoe", "tie_word_embeddings": True, "num_local_experts": 40, "num_experts_per_tok": 8},
        3_298_793_472,
        882_874_368,
        75_502_080,
    ),
    # the card: 9.78B
    "bamba-9b": (
        sized(32, 4096, 32, 8, 14_336, 128_256)
        | {"model_type": "bamba", "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128, "mamba_d_head": 64}
        | {"mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2},
        9_780_235_392,
        9_780_235_392,
        1_050_673_152,
    ),
    # the report: 7.4B; two shared blocks that 13 layers use
    "zamba2-7b": (
        sized(81, 3584, 32, 32, 14_336, 32_000)
        | {"model_type": "zamba2", "layers_block_type": hybrid(81, (6, 11, *range(17, 81, 6)), "hybrid", "mamba")}
        | {"n_mamba_heads": 112, "mamba_ngroups": 2, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2}
        | {"num_mem_blocks": 2, "adapter_rank": 128, "use_shared_attention_adapter": False},
        7_356_749_648,
        11_030_553_936,
        114_688_000,
    ),
    # the report: 1.2B; one block with adapters of q, k and v, which six layers use
    "zamba2-1.2b": (
        sized(38, 2048, 32, 32, 8192, 32_000)
        | {"model_type": "zamba2", "layers_block_type": hybrid(38, tuple(range(5, 38, 6)), "hybrid", "mamba")}
        | {"n_mamba_heads": 64, "mamba_ngroups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2}
        | {"num_mem_blocks": 1, "adapter_rank": 128, "use_shared_attention_adapter": True},
        1_215_064_704,
        1_760_354_944,
        65_536_000,
    ),
    # llama.cpp: 31,577,940,288 of the GGUF; the safetensors metadata leave the 2,944 routers' biases out
    "nemotron-3-nano": (
        sized(52, 2688, 32, 2, 1856, 131_072)
        | NEMOTRON_3
        | {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_num_heads": 64}
        | {"n_routed_experts": 128, "num_experts_per_tok": 6}
        | {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712},
        31_577_940_288,
        3_580_076_352,
        704_643_072,
    ),
    # llama.cpp: 120,668,707,840 (the experts' latent of 1024; the order of layers does not matter here)
    "nemotron-3-super": (
        sized(88, 4096, 32, 2, 21_504, 131_072)
        | NEMOTRON_3
        | {"hybrid_override_pattern": "ME" * 40 + "*" * 8, "mamba_num_heads": 128}
        | {"n_routed_experts": 512, "num_experts_per_tok": 22, "moe_latent_size": 1024}
        | {"moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376},
        120_668_707_840,
        12_770_237_440,
        1_073_741_824,
    ),
    # safetensors 8,888,227,328
    "nemotron-nano-9b-v2": (
        sized(56, 4480, 40, 8, 15_680, 131_072)
        | NEMOTRON_3
        | {"hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"}
        | {"mamba_num_heads": 128, "mamba_head_dim": 80},
        8_888_227_328,
        8_888_227_328,
        1_174_405_120,
    ),
    # safetensors 15,706,484,224; the card: 2.4B active, of which tables are left out
    "deepseek-v2-lite": (
        sized(27, 2048, 16, 16, 10_944, 102_400)
        | {"model_type": "deepseek_v2", "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128}
        | {"qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2}
        | {"num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        15_706_484_224,
        2_661_150_208,
        419_430_400,
    ),
    # the card: 309B, 15B active
    "mimo-v2-flash": (
        sized(48, 4096, 64, 4, 16_384, 152_576)
        | {"model_type": "mimo_v2_flash", "head_dim": 192, "v_head_dim": 128, "sliding_window": 128}
        | {"swa_num_key_value_heads": 8, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}
        | {"hybrid_layer_pattern": [0 if layer == 0 or layer % 6 == 5 else 1 for layer in range(48)]}
        | {"moe_layer_freq": [0, *[1] * 47], "n_shared_experts": None, "topk_method": "noaux_tc"}
        | {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
        308_778_780_864,
        15_445_936_320,
        1_249_902_592,
    ),
    # safetensors 9,241,705,984
    "gemma-2-9b": (
        sized(42, 3584, 16, 8, 14_336, 256_000) | {"model_type": "gemma2", "head_dim": 256, "sliding_window": 4096},
        9_241_705_984,
        9_241_705_984,
        917_504_000,
    ),
    # safetensors 14,659,507,200
    "phi-4": (
        sized(40, 5120, 40, 10, 17_920, 100_352) | {"model_type": "phi3", "sliding_window": None},
        14_659_507_200,
        14_659_507_200,
        1_027_604_480,
    ),
    # safetensors 7,615,616,512
    "qwen2.5-7b": (
        sized(28, 3584, 28, 4, 18_944, 152_064) | {"model_type": "qwen2"},
        7_615_616_512,
        7_615_616_512,
        1_089_994_752,
    ),
    # safetensors 7,248,023,552
    "mistral-7b-v0.3": (
        sized(32, 4096, 32, 8, 14_336, 32_768) | {"model_type": "mistral"},
        7_248_023_552,
        7_248_023_552,
        268_435_456,
    ),
}


"""All of them are what transformers 5.24.0 counts, as above, and what was published, which the comments name: the Hub's
safetensors metadata (number of parameters), n_params that llama.cpp prints of a GGUF, a model card or a report.
"""


@pytest.mark.parametrize("name", REAL)
def test_real_models(name: str) -> None:
    config, total, active, embedding = REAL[name]
    model = shape_from_config(config, name, "config.json")
    assert (*counts(model), model.params_embedding) == (total, active, embedding)
    assert not any("--params" in notice or "not known" in notice for notice in model.notices)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_dense_by_hand() -> None:
    """Embedding and head 2·100·64; a layer: q, o 64·64, k, v 64·16, MLP 3·64·96, norms 2·64; the last norm 64."""
    layer = 2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 96 + 2 * 64
    plain = read(model_type="llama")
    assert plain.params_total == 2 * 100 * 64 + 4 * layer + 64
    assert plain.params_embedding == 2 * 100 * 64
    tied = read(model_type="llama", tie_word_embeddings=True)
    assert tied.params_embedding == 100 * 64
    assert tied.params_total == 100 * 64 + 4 * layer + 64


def test_mixture_of_experts_by_hand() -> None:
    """Each layer has 4 experts of 3·64·96 and a router of 4·64 in place of the MLP; 2 experts work on a token."""
    model = read(model_type="mixtral", **LOCAL)
    dense = read(model_type="mistral").params_total
    assert dense is not None
    assert model.params_total == dense + 4 * (3 * 3 * 64 * 96 + 4 * 64)
    assert model.params_active == dense + 4 * (1 * 3 * 64 * 96 + 4 * 64)


def test_shared_blocks_work_as_often_as_they_are_used() -> None:
    """Three layers use one block of Zamba2: two thirds of their work is not in the total."""
    model = read(model_type="zamba2", **ZAMBA)
    attention = 3 * 128 * 128 + 128 * 64 + 2 * 64
    block = attention + 3 * 64 * 96 + 64
    assert model.params_total is not None
    assert model.params_active == model.params_total + 2 * block
    three = read(model_type="zamba2", **ZAMBA, num_mem_blocks=3)
    assert three.params_total == three.params_active == model.params_active


# --- pruned layers ---------------------------------------------------------------------------------------------------


def blocks(*described: tuple[dict[str, Any], dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"attention": attention, "ffn": ffn} for attention, ffn in described]


IN_PLACE: dict[str, dict[str, Any]] = {
    "attention": {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False, "window_length": None},
    "none": {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False},
    "linear": {"n_heads_in_group": None, "no_op": False, "replace_with_linear": True},
}


def test_llama_nemotron_super_49b() -> None:
    """Its 80 layers by kind. The Hub's safetensors metadata say 49,867,145,216."""
    kinds = [("attention", 5.25, 48), ("none", 1.3125, 10), ("none", 1.0, 8), ("none", 0.5, 6), ("none", 2.625, 5)]
    kinds += [("attention", 2.625, 1), ("none", 3.28125, 1), ("none", 5.25, 1)]
    layers = [(IN_PLACE[name], {"ffn_mult": mult, "no_op": False}) for name, mult, count in kinds for _ in range(count)]
    config = sized(80, 8192, 64, 8, 0, 128_256) | {"model_type": "nemotron-nas", "block_configs": blocks(*layers)}
    config |= {"num_key_value_heads": None, "intermediate_size": None}
    model = shape_from_config(config, "super", "config.json")
    assert counts(model) == (49_867_145_216, 49_867_145_216)
    assert model.notices == ()


PRUNED_HEADS = 2 * 64 * 64 + 2 * 64 * 8  # q and o, k and v of one KV head


@pytest.mark.parametrize(
    ("attention", "ffn", "expected"),
    [
        ("attention", {"ffn_mult": 2.0}, PRUNED_HEADS + 64 + 3 * 64 * 256 + 64),  # 85 is rounded up to 256
        ("attention", {"ffn_mult": 6.02}, PRUNED_HEADS + 64 + 3 * 64 * 256 + 64),  # 256.8 is cut first
        ("attention", {"ffn_mult": 6.1}, PRUNED_HEADS + 64 + 3 * 64 * 512 + 64),
        ("attention", {"ffn_mult": None, "intermediate_size": 96}, PRUNED_HEADS + 64 + 3 * 64 * 96 + 64),
        ("none", {"no_op": True}, 0),
        ("linear", {"no_op": True}, 64 * 64 + 64),
        ("none", {"replace_with_linear": True, "ffn_mult": None}, 64 * 64 + 64),
    ],
)
def test_a_pruned_layer_by_hand(attention: str, ffn: dict[str, Any], expected: int) -> None:
    """What is a no-op has no norm; a linear layer in place of something has that one's norm and no bias."""
    model = read(model_type="nemotron-nas", block_configs=blocks(*[(IN_PLACE[attention], ffn)] * 4))
    assert model.params_total == 2 * 100 * 64 + 64 + 4 * expected


def test_layers_with_kv_heads_of_their_own() -> None:
    layer = 2 * 64 * 64 + 3 * 64 * 96 + 2 * 64
    model = read(model_type="deci", num_key_value_heads_per_layer=[4, 4, 2, 1], num_key_value_heads=None)
    assert model.params_total == 2 * 100 * 64 + 64 + 4 * layer + 2 * 64 * 8 * (4 + 4 + 2 + 1)


# --- what is not determined ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mixtral", "num_local_experts": 8},
        {"model_type": "llama", "num_experts": 8},
        {"model_type": "granitemoehybrid", **GRANITE, "num_local_experts": None},
        {"model_type": "nemotron_h", **NEMOTRON, "n_shared_experts": 2},
        {"model_type": "deci", "num_key_value_heads_per_layer": [2, 2, 0, 2]},
        {"model_type": "nemotron-nas", "block_configs": blocks(*[(IN_PLACE["attention"], {"gated": False})] * 4)},
        {"model_type": "nemotron-nas", "block_configs": blocks(*[(IN_PLACE["attention"], {"moe": {"n": 2}})] * 4)},
        {"model_type": "nemotron-nas", "block_configs": [{"attention": IN_PLACE["attention"]}] * 4},
    ],
)
def test_a_config_that_does_not_say_enough_is_sized_but_not_counted(changes: dict[str, Any]) -> None:
    model = read(**changes)
    assert model.kv_bytes_per_token(BF16) > 0
    assert counts(model) == (None, None)
    assert any("--params-active" in notice for notice in model.notices)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("attention_bias", {"model_type": "llama", "attention_bias": "yes"}),
        ("mlp_only_layers", {"model_type": "qwen3_moe", **QWEN, "mlp_only_layers": 3}),
        ("mlp_layer_types", {"model_type": "glm_moe_dsa", **INDEXED, "mlp_layer_types": ["sparse", "none"] * 2}),
        ("moe_layer_freq", {"model_type": "mimo_v2_flash", **MIMO, "moe_layer_freq": [0, 1]}),
        ("moe_layers", {"model_type": "llama4_text", **LLAMA4, "moe_layers": "all"}),
        (
            "ffn_mult",
            {"model_type": "nemotron-nas", "block_configs": blocks(*[(IN_PLACE["attention"], {"ffn_mult": -1})] * 4)},
        ),
    ],
)
def test_a_field_that_is_wrong_is_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=field) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)
