"""The MLPs of a model's layers: dense, or a mixture of experts, and their parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.model.fields import Fields


@dataclass(frozen=True)
class Mlp:
    """Parameters of one layer's MLP, router included: all, and those that work on one token."""

    total: int
    active: int


@dataclass(frozen=True)
class Experts:
    """What a mixture's layer holds. intermediate is one expert's, shared that of all shared experts together."""

    count: int
    per_token: int
    intermediate: int
    shared: int = 0
    shared_gate: bool = False  # one weight per hidden element
    router_bias: bool = False
    biases: bool = False  # in the experts' products

    def mlp(self, hidden: int) -> Mlp:
        expert = gated(hidden, self.intermediate)
        expert += 2 * self.intermediate + hidden if self.biases else 0
        router = self.count * (hidden + (1 if self.router_bias else 0))
        beside = router + gated(hidden, self.shared) + (hidden if self.shared_gate else 0)
        return Mlp(self.count * expert + beside, self.per_token * expert + beside)


def gated(hidden: int, intermediate: int) -> int:
    """Parameters of gate, up and down."""
    return 3 * hidden * intermediate


def dense(parameters: int) -> Mlp:
    return Mlp(parameters, parameters)


def mlps(fields: Fields, hidden: int, layers: int) -> list[Mlp] | None:
    """The MLP of each layer, of a model_type in DENSE or MIXTURES; None for another, or for an odd mixture."""
    if fields.model_type in DENSE:
        if any(fields.has(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            return None
        intermediate = fields.positive("intermediate_size")
        bias = 2 * intermediate + hidden if fields.config.get("mlp_bias") is True else 0
        return [dense(gated(hidden, intermediate) + bias)] * layers
    mixture = MIXTURES.get(fields.model_type)
    return mixture(fields, hidden, layers) if mixture else None


def _every_layer(fields: Fields, hidden: int, layers: int) -> list[Mlp]:
    """Mixtral and MiniMax-M2; gpt-oss has biases everywhere."""
    oss = fields.model_type == "gpt_oss"
    experts = Experts(
        count=fields.positive("num_local_experts"),
        per_token=fields.positive("num_experts_per_tok"),
        intermediate=fields.positive("intermediate_size"),
        router_bias=oss or fields.config.get("use_routing_bias") is True,
        biases=oss,
    )
    return [experts.mlp(hidden)] * layers


def _qwen(fields: Fields, hidden: int, layers: int) -> list[Mlp]:
    """Qwen's: every decoder_sparse_step-th layer but those of mlp_only_layers, perhaps with a gated shared expert."""
    shared = fields.count("shared_expert_intermediate_size")
    experts = Experts(
        count=fields.positive("num_experts"),
        per_token=fields.positive("num_experts_per_tok"),
        intermediate=fields.positive("moe_intermediate_size"),
        shared=shared,
        shared_gate=shared > 0,
    )
    step = fields.positive("decoder_sparse_step", 1)
    plain = fields.config.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        fields.fail("mlp_only_layers", "is no list of layers")
    sparse = [(layer + 1) % step == 0 and layer not in plain for layer in range(layers)]
    return _mixed(fields, hidden, experts, sparse)


def _deepseek(fields: Fields, hidden: int, layers: int) -> list[Mlp]:
    """DeepSeek's: dense layers first, then every moe_layer_freq-th a mixture with shared experts."""
    intermediate = fields.positive("moe_intermediate_size")
    experts = Experts(
        count=fields.positive("n_routed_experts"),
        per_token=fields.positive("num_experts_per_tok"),
        intermediate=intermediate,
        shared=fields.count("n_shared_experts") * intermediate,
        router_bias=fields.config.get("topk_method") == "noaux_tc",
    )
    first, every = fields.count("first_k_dense_replace"), fields.positive("moe_layer_freq", 1)
    sparse = [layer >= first and layer % every == 0 for layer in range(layers)]
    return _mixed(fields, hidden, experts, sparse)


def _llama4(fields: Fields, hidden: int, layers: int) -> list[Mlp]:
    """Llama-4's: a shared expert of the same size, and dense layers of intermediate_size_mlp between."""
    intermediate = fields.positive("intermediate_size")
    count, per_token = fields.positive("num_local_experts"), fields.positive("num_experts_per_tok")
    experts = Experts(count, per_token, intermediate, shared=intermediate)
    step = fields.positive("interleave_moe_layer_step", 1)
    plain = dense(gated(hidden, fields.positive("intermediate_size_mlp")))
    return [experts.mlp(hidden) if (layer + 1) % step == 0 else plain for layer in range(layers)]


def _mixed(fields: Fields, hidden: int, experts: Experts, sparse: list[bool]) -> list[Mlp]:
    if all(sparse):
        return [experts.mlp(hidden)] * len(sparse)
    plain = dense(gated(hidden, fields.positive("intermediate_size")))
    return [experts.mlp(hidden) if is_sparse else plain for is_sparse in sparse]


def _nemotron_h(fields: Fields, hidden: int, layers: int) -> list[Mlp] | None:
    """Nemotron-H's letters: `-` is an MLP without a gate, `M` and `*` have none; mixtures (`E`) are not counted."""
    letters = fields.config.get("hybrid_override_pattern")
    if not isinstance(letters, str) or "E" in letters:
        return None
    plain, none = dense(2 * hidden * fields.positive("intermediate_size")), dense(0)
    return [plain if letter == "-" else none for letter in letters]


DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_vl_text", "gemma3_text"),
    *("qwen3_5_text",),
)

MIXTURES: dict[str, Callable[[Fields, int, int], list[Mlp] | None]] = {
    **dict.fromkeys(("mixtral", "minimax_m2", "gpt_oss"), _every_layer),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_next", "qwen3_5_moe_text"), _qwen),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa"), _deepseek),
    "llama4_text": _llama4,
    "nemotron_h": _nemotron_h,
}
"""How the mixtures of a model_type are described in its config."""
