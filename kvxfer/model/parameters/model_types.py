"""The model types whose parameters are counted, and what each of them has (transformers, vLLM)."""

from __future__ import annotations

from dataclasses import replace

from kvxfer.model.parameters import mixtures, pruned, states, zamba2
from kvxfer.model.parameters.architecture import Architecture, Biases
from kvxfer.model.parameters.mlps import gated_mlps, gated_mlps_perhaps_with_biases, starcoder_mlps

OPTIONAL = Biases("attention_bias")
IN_Q_K_V = Biases(default=True, output=False)

GELU = "gelu_pytorch_tanh"
GEMMA = Architecture(gated_mlps, biases=OPTIONAL, norms=4, tied=True, activation=("hidden_activation", GELU))
QWEN3 = Architecture(gated_mlps, biases=OPTIONAL, qk_norm=True)
QWEN3_MOE = Architecture(mixtures.qwen, biases=OPTIONAL, qk_norm=True)
GATED_DELTA = Architecture(gated_mlps, states.gated_delta, biases=OPTIONAL, qk_norm=True, output_gate=True)

ARCHITECTURES = {
    "llama": Architecture(gated_mlps_perhaps_with_biases, biases=OPTIONAL),
    "mistral": Architecture(gated_mlps),
    "mixtral": Architecture(mixtures.mixtral),
    "phi3": Architecture(gated_mlps),
    "starcoder2": Architecture(
        starcoder_mlps,
        biases=Biases("use_bias", default=True),
        norm_biases=True,
        tied=True,
        activation=("hidden_act", GELU),
    ),
    **dict.fromkeys(
        ("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
        Architecture(gated_mlps, biases=IN_Q_K_V),
    ),
    "qwen2_moe": Architecture(mixtures.qwen_shared, biases=Biases("qkv_bias", default=True, output=False)),
    **dict.fromkeys(("qwen3", "qwen3_vl_text"), QWEN3),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe_text"), QWEN3_MOE),
    "qwen3_5_text": GATED_DELTA,
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), replace(GATED_DELTA, mlps=mixtures.qwen_shared)),
    "deepseek_v2": Architecture(mixtures.deepseek_v2),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa"), Architecture(mixtures.deepseek)),
    "gpt_oss": Architecture(mixtures.gpt_oss, biases=Biases("attention_bias", default=True), sinks=(True, True)),
    "minimax_m2": Architecture(mixtures.minimax, wide_qk_norm=True),
    "mimo_v2_flash": Architecture(mixtures.mimo, biases=Biases("attention_bias", output=False), sinks=(False, True)),
    "llama4_text": Architecture(mixtures.llama4, biases=OPTIONAL),
    "gemma2": GEMMA,
    **dict.fromkeys(("gemma3", "gemma3_text"), replace(GEMMA, qk_norm=True)),
    "cohere2": Architecture(gated_mlps, biases=OPTIONAL, norms=1, tied=True),
    "olmo3": Architecture(gated_mlps, biases=OPTIONAL, wide_qk_norm=True),
    "exaone4": Architecture(gated_mlps, qk_norm=True),
    "granite": Architecture(gated_mlps_perhaps_with_biases, biases=OPTIONAL),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), Architecture(mixtures.granite, biases=OPTIONAL)),
    "granitemoehybrid": Architecture(mixtures.granite, states.granite_state, biases=OPTIONAL),
    "bamba": Architecture(gated_mlps_perhaps_with_biases, states.granite_state, biases=OPTIONAL),
    "nemotron_h": Architecture(
        mixtures.nemotron, states.nemotron_state, norms=1, activation=("mlp_hidden_act", "relu2")
    ),
    "zamba2": Architecture(layers=zamba2.layers, tied=True),
    **dict.fromkeys(("nemotron-nas", "deci"), Architecture(layers=pruned.layers, biases=OPTIONAL)),
}
