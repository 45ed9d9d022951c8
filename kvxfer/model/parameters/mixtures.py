"""Mixtures of experts: how the config of each model_type describes them, and their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.model.families.nemotron_h import layer_names
from kvxfer.model.fields import Fields
from kvxfer.model.mlp import NO_MLP, Mlp
from kvxfer.model.parameters.mlps import gated, gated_mlp, plain, plain_mlp
from kvxfer.model.parameters.weights import NotCountedError, Weights, always, linear


@dataclass(frozen=True)
class Experts:
    """What a mixture's layer holds: so many experts of `each` weights, and `beside` what all tokens pass.

    `columns` are those of one expert, `shared` those of the shared ones, and either kind is gated or not; routed ones
    may work on a `latent`.
    """

    count: int
    per_token: int
    each: int
    beside: int = 0  # shared experts and their gates
    router_bias: bool = False
    columns: int = 0
    shared: int = 0
    latent: int = 0
    gated: bool = True

    def weights(self, hidden: int) -> Weights:
        beside = always(linear(hidden, self.count, self.router_bias) + self.beside)
        mlp = Mlp(self.shared, self.count, self.per_token, self.columns, self.latent, self.gated)
        return Weights(self.count * self.each, self.per_token * self.each, mlp) + beside


def mixtral(fields: Fields, hidden: int, layers: int) -> list[Weights]:
    return [_local_experts(fields, hidden).weights(hidden)] * layers


def minimax(fields: Fields, hidden: int, layers: int) -> list[Weights]:
    experts = _local_experts(fields, hidden, router_bias=fields.flag("use_routing_bias", True))
    return [experts.weights(hidden)] * layers


def gpt_oss(fields: Fields, hidden: int, layers: int) -> list[Weights]:
    """With biases everywhere."""
    return [_local_experts(fields, hidden, router_bias=True, biases=True).weights(hidden)] * layers


def granite(fields: Fields, hidden: int, layers: int) -> list[Weights]:
    """A shared expert beside the others, which granitemoe does not have; with 0 others it is a dense MLP."""
    shared = 0
    if fields.model_type != "granitemoe":
        shared = fields.positive("shared_intermediate_size")
    if fields.model_type == "granitemoehybrid" and fields.config.get("num_local_experts") == 0:
        return [gated_mlp(hidden, shared)] * layers
    return [_local_experts(fields, hidden, shared).weights(hidden)] * layers


def _local_experts(
    fields: Fields, hidden: int, shared: int = 0, router_bias: bool = False, biases: bool = False
) -> Experts:
    columns = fields.positive("intermediate_size")
    return Experts(
        count=fields.positive("num_local_experts"),
        per_token=fields.positive("num_experts_per_tok"),
        each=gated(hidden, columns, biases),
        beside=gated(hidden, shared),
        router_bias=router_bias,
        columns=columns,
        shared=shared,
    )


def qwen(fields: Fields, hidden: int, layers: int) -> list[Weights]:
    """Every decoder_sparse_step-th layer but those of mlp_only_layers, perhaps with a shared expert."""
    shared = fields.count("shared_expert_intermediate_size")
    return _qwen(fields, hidden, layers, shared)


def qwen_shared(fields: Fields, hidden: int, layers: int) -> list[Weights]:
    """With a shared expert in any case."""
    return _qwen(fields, hidden, layers, fields.positive("shared_expert_intermediate_size"))


def _qwen(fields: Fields, hidden: int, layers: int, shared: int) -> list[Weights]:
    experts = Experts(
        count=fields.positive("num_experts"),
        per_token=fields.positive("num_experts_per_tok"),
        each=gated(hidden, columns := fields.positive("moe_intermediate_size")),
        beside=gated(hidden, shared) + hidden if shared else 0,  # its gate has one weight per hidden element
        columns=columns,
        shared=shared,
    )
    step = fields.positive("decoder_sparse_step", 1)
    dense = fields.config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        fields.fail("mlp_only_layers", "is no list of layers")
    sparse = [(layer + 1) % step == 0 and layer not in dense for layer in range(layers)]
    return _mixed(fields, hidden, experts, sparse)


def deepseek(fields: Fields, hidden: int, layers: int) -> list[Weights]:
    """DeepSeek-V3's and its like: dense layers first, then mixtures with shared experts."""
    return _deepseek(fields, hidden, _sparse(fields, layers, dense_first=3), shared=1, topk_method="noaux_tc")


def deepseek_v2(fields: Fields, hidden: int, layers: int) -> list[Weights]:
    sparse = _sparse(fields, layers, dense_first=0)
    return _deepseek(fields, hidden, sparse, shared=2, topk_method="greedy", bias=fields.flag("mlp_bias", False))


def mimo(fields: Fields, hidden: int, layers: int) -> list[Weights]:
    return _deepseek(fields, hidden, _sparse(fields, layers, dense_first=1), shared=0, topk_method="noaux_tc")


def _deepseek(
    fields: Fields, hidden: int, sparse: Sequence[bool], shared: int, topk_method: str, bias: bool = False
) -> list[Weights]:
    """`shared` and topk_method are what an absent field means; `bias` is of dense and shared MLPs."""
    intermediate = fields.positive("moe_intermediate_size")
    shared = fields.count("n_shared_experts") if "n_shared_experts" in fields.config else shared
    experts = Experts(
        count=fields.positive("n_routed_experts"),
        per_token=fields.positive("num_experts_per_tok"),
        each=gated(hidden, intermediate),
        beside=gated(hidden, shared * intermediate, bias) if shared else 0,
        router_bias=fields.config.get("topk_method", topk_method) == "noaux_tc",
        columns=intermediate,
        shared=shared * intermediate,
    )
    return _mixed(fields, hidden, experts, sparse, bias)


def _sparse(fields: Fields, layers: int, dense_first: int) -> list[bool]:
    """Which layers are mixtures: by a list of names, a list of 0 and 1, or after so many dense ones every n-th."""
    if fields.has("mlp_layer_types"):
        return _listed(fields, "mlp_layer_types", layers, {"dense": False, "sparse": True})
    if isinstance(fields.config.get("moe_layer_freq"), list):
        return _listed(fields, "moe_layer_freq", layers, {0: False, 1: True})
    first = fields.count("first_k_dense_replace") if "first_k_dense_replace" in fields.config else dense_first
    every = fields.positive("moe_layer_freq", 1)
    return [layer >= first and layer % every == 0 for layer in range(layers)]


def _listed(fields: Fields, field: str, layers: int, meaning: dict[object, bool]) -> list[bool]:
    entries = fields.per_layer(field, layers)
    if not all(isinstance(entry, (str, int)) and entry in meaning for entry in entries):
        fields.fail(field, f"has entries other than {' and '.join(map(str, meaning))}")
    return [meaning[entry] for entry in entries]


def llama4(fields: Fields, hidden: int, layers: int) -> list[Weights]:
    """A shared expert of the same size; dense layers of intermediate_size_mlp between, perhaps."""
    columns = fields.positive("intermediate_size")
    expert = gated(hidden, columns)
    count, per_token = fields.positive("num_local_experts"), fields.positive("num_experts_per_tok")
    experts = Experts(count, per_token, expert, beside=expert, columns=columns, shared=columns)
    step = fields.positive("interleave_moe_layer_step", 1)
    named = fields.config.get("moe_layers")
    if named is not None and not isinstance(named, list):
        fields.fail("moe_layers", "is no list of layers")
    sparse = [layer in named if named is not None else (layer + 1) % step == 0 for layer in range(layers)]
    return _mixed(fields, hidden, experts, sparse, dense="intermediate_size_mlp")


def _mixed(
    fields: Fields,
    hidden: int,
    experts: Experts,
    sparse: Sequence[bool],
    bias: bool = False,
    dense: str = "intermediate_size",
) -> list[Weights]:
    """`dense` is the field that has the size of the layers that are no mixtures; they may have biases."""
    if all(sparse):
        return [experts.weights(hidden)] * len(sparse)
    mlp = gated_mlp(hidden, fields.positive(dense), bias)
    return [experts.weights(hidden) if is_sparse else mlp for is_sparse in sparse]


def nemotron(fields: Fields, hidden: int, layers: int) -> list[Weights]:
    """Nemotron-H's: its MLPs and experts have no gate, and layers of Mamba-2 and attention have neither."""
    names = layer_names(fields, layers)
    meaning = dict.fromkeys(("mamba", "attention"), always(0, NO_MLP))
    if "mlp" in names:
        bias = fields.flag("mlp_bias", False)
        meaning["mlp"] = plain_mlp(hidden, fields.positive("intermediate_size"), bias)
    if "moe" in names:
        meaning["moe"] = _nemotron_experts(fields, hidden).weights(hidden)
    return [meaning[name] for name in names]


def _nemotron_experts(fields: Fields, hidden: int) -> Experts:
    """One shared expert; the routed ones may work on a smaller latent, with a way down to it and up again."""
    if fields.positive("n_shared_experts", 1) != 1:  # engines differ in what several are
        raise NotCountedError
    bias, latent = fields.flag("mlp_bias", False), fields.optional("moe_latent_size")
    columns, shared = fields.positive("moe_intermediate_size"), fields.positive("moe_shared_expert_intermediate_size")
    beside = plain(hidden, shared, bias)
    return Experts(
        count=fields.positive("n_routed_experts"),
        per_token=fields.positive("num_experts_per_tok"),
        each=plain(latent or hidden, columns),
        beside=beside + (plain(hidden, latent, bias) if latent else 0),
        router_bias=True,
        columns=columns,
        shared=shared,
        latent=latent or 0,
        gated=False,
    )
