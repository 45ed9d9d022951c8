"""Reading a Hugging Face config.json of a plain full-attention model.

The formula L · kv_heads · (d_k + d_v) · b holds for these only. So a field that may say otherwise (a window, a latent,
a state, layers of other kinds, …) and is neither switched off nor understood here refuses the model by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvxfer.errors import UsageError
from kvxfer.model.config_file import read_config_file
from kvxfer.model.parameters import DENSE, EXPERT_FIELDS, Parameters, count_parameters
from kvxfer.model.shape import ModelShape
from kvxfer.wording import quoted, quoted_path

SUSPICIOUS = (
    # the cache holds fewer tokens, or something other than K and V
    *("window", "chunk", "sparse", "compress", "index", "lora", "latent", "linear", "delta", "retention"),
    *("state", "conv", "ssm", "mamba", "rwkv", "recurrent", "memory", "local_att", "global_att"),
    # layers differ, share a cache, or there are more of them
    *("layer_type", "attn_type", "attention_type", "attn_layer", "attention_layer", "block", "per_layer"),
    *("pattern", "hybrid", "interval", "period", "every_n", "shar", "mtp", "nextn"),
    # heads are counted another way
    *("head", "kv", "key_value", "multi_query", "new_decoder_architecture"),
    # more than one tower
    *("cross", "encoder", "text_config", "llm_config", "language_config", "vision", "audio"),
)
"""Substrings of field names. A field that matches one must be inert or understood."""

UNDERSTOOD = frozenset(
    {
        *("num_attention_heads", "num_key_value_heads", "head_dim"),
        # these shape the MLP or the positions, not the cache
        *("decoder_sparse_step", "shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts"),
        *("no_rope_layer_interval",),
    }
)

WINDOW_SWITCHED_OFF = ("sliding_window", "max_window_layers")
"""Meaningless while use_sliding_window is false."""

PLAIN_TYPES = (*DENSE, "mixtral", "qwen2_moe", "qwen3_moe")
"""Values of model_type known to keep a plain cache when no suspicious field says otherwise."""

LARGEST = {"num_hidden_layers": 10_000}
LARGEST_DEFAULT = 1 << 24


def read_config(path: Path) -> ModelShape:
    """The model of a config.json. Raises UsageError when it is unreadable, malformed, or not plain full attention."""
    config = read_config_file(path)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return shape_from_config(config, name or "model", str(path))


def shape_from_config(config: Mapping[str, Any], name: str, source: str) -> ModelShape:
    """The model of a parsed config.json; `source` says in errors where it comes from. Raises UsageError."""
    _refuse_what_is_not_plain(config, source)
    reader = _Fields(config, source)
    layers = reader.positive("num_hidden_layers")
    hidden = reader.positive("hidden_size")
    heads = reader.positive("num_attention_heads")
    kv_heads = reader.optional("num_key_value_heads") or heads
    if heads % kv_heads:
        reader.fail("num_key_value_heads", f"does not divide num_attention_heads ({heads})")
    head_dim = reader.optional("head_dim") or _head_dim(reader, hidden, heads)
    _check_layer_types(reader, layers)

    notices = []
    if config.get("num_key_value_heads") is None:
        notices.append(f"{name}: num_key_value_heads is absent, taken as num_attention_heads ({heads})")
    if config.get("model_type") not in PLAIN_TYPES:
        notices.append(
            f"{name}: model_type {quoted(config.get('model_type'))} is not known here; it is sized as plain full "
            "attention, since nothing in its config.json speaks against that"
        )
    parameters = _parameters(config, reader, (layers, hidden, heads, kv_heads, head_dim))
    if parameters is None:
        kind = "mixtures of experts" if _is_moe(config) else "this model_type"
        notices.append(f"{name}: parameters of {kind} are not counted here; pass --params and --params-active")
    return ModelShape(
        name=name,
        family="full_attention",
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim_k=head_dim,
        head_dim_v=head_dim,
        params_total=parameters.total if parameters else None,
        params_active=parameters.total if parameters else None,
        params_embedding=parameters.embedding if parameters else None,
        notices=tuple(notices),
    )


class _Fields:
    """Integer fields of a config, with errors that name the field and the file."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def positive(self, field: str) -> int:
        if self.config.get(field) is None:
            raise UsageError(
                f"{quoted_path(self.source)} has no {field}; give the config.json of a decoder-only language model"
            )
        value = self.config[field]
        largest = LARGEST.get(field, LARGEST_DEFAULT)
        if type(value) is not int or not 1 <= value <= largest:
            self.fail(field, f"is not a whole number from 1 to {largest:,}")
        return int(value)

    def optional(self, field: str) -> int | None:
        return None if self.config.get(field) is None else self.positive(field)

    def fail(self, field: str, why: str) -> None:
        raise UsageError(f"{field} is {quoted(self.config.get(field))} in {quoted_path(self.source)}: it {why}")


def _head_dim(reader: _Fields, hidden: int, heads: int) -> int:
    if hidden % heads:
        reader.fail("num_attention_heads", f"does not divide hidden_size ({hidden}), and there is no head_dim")
    return hidden // heads


def _check_layer_types(reader: _Fields, layers: int) -> None:
    layer_types = reader.config.get("layer_types")
    if layer_types and len(layer_types) != layers:
        reader.fail("layer_types", f"has {len(layer_types)} entries for num_hidden_layers = {layers}")


def _is_moe(config: Mapping[str, Any]) -> bool:
    return any(not _is_inert(config.get(field)) for field in EXPERT_FIELDS)


def _parameters(config: Mapping[str, Any], reader: _Fields, dims: tuple[int, int, int, int, int]) -> Parameters | None:
    if config.get("model_type") not in tuple(DENSE) or _is_moe(config):
        return None
    return count_parameters(config, *dims, reader.positive)


def _refuse_what_is_not_plain(config: Mapping[str, Any], source: str) -> None:
    """Raises UsageError naming the fields that may mean another kind of cache."""
    fields = [field for field in config if _is_suspicious(field) and not _is_settled(config, field)]
    if not fields and config.get("model_type") not in PLAIN_TYPES and _is_no_decoder(config.get("architectures")):
        fields = ["architectures"]
    if not fields:
        return
    first, *others = fields
    beside = f" (beside {', '.join(quoted(field)[1:-1] for field in others[:3])})" if others else ""
    raise UsageError(
        f"cannot size the cache of {quoted_path(source)} by the plain formula: {quoted(first)[1:-1]} is "
        f"{quoted(config[first])}{beside}, which this version does not understand; choose a plain full-attention "
        "model, or set the field to null if it does not touch the cache"
    )


def _is_suspicious(field: str) -> bool:
    lower = field.lower()
    return any(part in lower for part in SUSPICIOUS)


def _is_settled(config: Mapping[str, Any], field: str) -> bool:
    """Whether a suspicious field is switched off or understood."""
    value = config[field]
    if field in UNDERSTOOD or _is_inert(value):
        return True
    if field in WINDOW_SWITCHED_OFF:
        return config.get("use_sliding_window") is False
    if field == "layer_types":
        return isinstance(value, list) and all(kind == "full_attention" for kind in value)
    return False


def _is_inert(value: object) -> bool:
    return value is None or value is False or value in (0, "", [], {})


def _is_no_decoder(architectures: object) -> bool:
    """Whether none of the architectures named writes text token by token (an encoder has no KV cache to move)."""
    if not isinstance(architectures, list) or not architectures:
        return False
    return not any(isinstance(name, str) and ("CausalLM" in name or "LMHead" in name) for name in architectures)
