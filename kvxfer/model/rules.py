"""What of a config.json may be passed over: the rule that refuses a model by the name of a field.

Every family has a list of the fields it understands. Any other field whose name suggests that it may change the cache,
and whose value does not switch it off, refuses the model: a wrong number of bytes would make every later figure wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvxfer.errors import UsageError
from kvxfer.model.fields import is_inert
from kvxfer.wording import quoted, quoted_path

SUSPICIOUS = (
    # the cache holds fewer tokens, or something other than K and V
    *("window", "sliding", "swa", "chunk", "sparse", "compress", "index", "lora", "latent", "linear", "delta"),
    *("retention", "state", "conv", "ssm", "mamba", "rwkv", "recurrent", "memory", "local_att", "global_att"),
    # layers differ, share a cache, or there are more of them
    *("layer_type", "attn_type", "attention_type", "attn_layer", "attention_layer", "block", "per_layer"),
    *("pattern", "hybrid", "interval", "period", "every_n", "shar", "mtp", "nextn"),
    # heads are counted another way
    *("head", "kv", "key_value", "k_eq_v", "multi_query", "new_decoder_architecture"),
    # more than one tower
    *("cross", "encoder", "text_config", "llm_config", "language_config", "vision", "audio"),
)
"""Substrings of field names. A field that matches one must be inert or understood."""

COMMON = frozenset(
    {
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        # these shape the MLP, biases or the positions, not the cache
        *("decoder_sparse_step", "n_shared_experts", "num_shared_experts", "no_rope_layer_interval"),
        *("mlp_layer_types", "qkv_bias"),
        *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"),
        # layers of multi-token prediction, which are counted apart
        *("num_nextn_predict_layers", "use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mtp_num_hidden_layers"),
    }
)
"""Fields that every family understands."""

ABOUT_OTHER_THINGS = frozenset(
    {
        *("rope_scaling", "rope_parameters", "quantization_config", "compression_config", "auto_map"),
        *("id2label", "label2id", "task_specific_params", "generation_config", "bnb_config"),
        *("text_config", "llm_config", "language_config"),  # read as a config of their own
        *("vision_config", "audio_config"),  # another tower, which a family that has one knows
    }
)
"""Fields whose objects say nothing of the cache, whatever their fields are called."""


def refuse_unknown(
    config: Mapping[str, Any], understood: Collection[str], family: str, where: str, prefix: str
) -> None:
    """Raises UsageError that names the fields that may mean another kind of cache than `family` has.

    `where` is the file's name, `prefix` leads to this object in it.
    """
    fields = [name for name in config if _is_suspicious(name) and not is_inert(config[name])]
    fields = [name for name in fields if name not in COMMON and name not in understood]
    if fields:
        raise unknown_field(config, fields, family, where, prefix)
    for name, value in config.items():
        if name in understood or name in COMMON or name in ABOUT_OTHER_THINGS:
            continue
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                refuse_unknown(inner, (), family, where, f"{prefix}{quoted(name)[1:-1]}.")


def unknown_field(
    config: Mapping[str, Any], fields: list[str], family: str, where: str, prefix: str = ""
) -> UsageError:
    """The error that refuses a model for these fields."""
    first, *others = (f"{prefix}{quoted(name)[1:-1]}" for name in fields)
    beside = f" (beside {', '.join(others[:3])})" if others else ""
    return UsageError(
        f"cannot size the cache of {quoted_path(where)} as {family.replace('_', ' ')}: {first} is "
        f"{quoted(config[fields[0]])}{beside}, which this version does not understand; set the field to null if it "
        "does not touch the cache"
    )


def _is_suspicious(field: str) -> bool:
    lower = field.lower()
    return any(part in lower for part in SUSPICIOUS)
