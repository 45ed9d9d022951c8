"""What of a config.json may be passed over: the rule that refuses a model by the name of a field.

Every family has a list of the fields it understands. Any other field whose name suggests that it may change the cache,
and whose value does not switch it off, refuses the model: a wrong number of bytes would make every later figure wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kvxfer.errors import UsageError
from kvxfer.model.fields import is_inert
from kvxfer.wording import quoted, quoted_path

SUSPICIOUS = (
    # the cache holds fewer tokens, or something other than K and V
    *("window", "sliding", "swa", "chunk", "sparse", "compress", "index", "lora", "latent", "linear", "delta"),
    *("retention", "state", "conv", "ssm", "mamba", "rwkv", "memory", "local_att", "global_att", "full_att"),
    # more of it: layers that work several times on a token keep K and V each time
    *("recurr", "loop", "ut_step"),
    # layers differ, share a cache, or there are more of them
    *("layer_type", "layers_type", "layer_group", "mixer", "attn_type", "attention_type", "attn_layer"),
    *("attention_layer", "block", "per_layer"),
    *("pattern", "hybrid", "interval", "period", "every_n", "shar", "mtp", "nextn"),
    # heads are counted another way
    *("head", "kv", "key_value", "k_eq_v", "multi_query", "new_decoder_architecture"),
    # more than one tower
    *("cross", "encoder", "text_config", "llm_config", "language_config", "vision", "audio"),
)
"""Substrings of field names. A field that matches one must be inert or understood."""

KEEPS_STATES = ("linear", "mamba", "ssm", "rwkv", "hybrid", "recurr", "retnet", "delta", "xlstm")
"""Parts of the names of models that keep states: one that is not known here is not sized as a model without any."""

DETERMINING = frozenset(
    {
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        # layers of multi-token prediction, which are counted apart
        *("num_nextn_predict_layers", "use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mtp_num_hidden_layers"),
    }
)
"""Fields that every family reads. In an object that no family reads they may mean another cache."""

HARMLESS = frozenset(
    {
        *("decoder_sparse_step", "n_shared_experts", "num_shared_experts", "no_rope_layer_interval"),
        *("mlp_layer_types", "qkv_bias"),
        *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"),
    }
)
"""Fields that shape the MLP, biases or the positions, not the cache."""

COMMON = DETERMINING | HARMLESS
"""Fields that every family understands."""

TOKEN_IDS = ("_token_id", "_token_index")
"""How the names of fields end that hold the number of a token in the vocabulary."""

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
    fields = [name for name, value in config.items() if _is_suspicious(name, value)]
    fields = [name for name in fields if name not in COMMON and name not in understood]
    if fields:
        raise unknown_field(config, fields, family, where, prefix)
    for path, inner in _objects_inside(config, ABOUT_OTHER_THINGS.union(understood)):
        fields = [name for name, value in inner.items() if _is_suspicious(name, value) or name in DETERMINING]
        fields = [name for name in fields if name not in HARMLESS and not is_inert(inner[name])]
        if fields:
            raise unknown_field(inner, fields, family, where, f"{prefix}{path}.")


def _objects_inside(config: Mapping[str, Any], passed_over: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object inside the fields of this one, however deep in objects and lists, and the path that leads to it."""
    waiting = [(_shown(name), value) for name, value in config.items() if name not in passed_over]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(path, entry) for entry in value]
        elif isinstance(value, dict):
            yield path, value
            waiting += [
                (f"{path}.{_shown(name)}", inner) for name, inner in value.items() if name not in ABOUT_OTHER_THINGS
            ]


def unknown_field(
    config: Mapping[str, Any], fields: list[str], family: str, where: str, prefix: str = ""
) -> UsageError:
    """The error that refuses a model for these fields."""
    first, *others = (f"{prefix}{_shown(name)}" for name in fields)
    beside = f" (beside {', '.join(others[:3])})" if others else ""
    return UsageError(
        f"cannot size the cache of {quoted_path(where)} as {family.replace('_', ' ')}: {first} is "
        f"{quoted(config[fields[0]])}{beside}, which this version does not understand; set the field to null if it "
        "does not touch the cache"
    )


def _is_suspicious(field: str, value: object) -> bool:
    """Whether the name says that the cache may be another, and the value does not switch that off."""
    lower = field.lower()
    if is_inert(value) or (type(value) is int and lower.endswith(TOKEN_IDS)):
        return False
    return any(part in lower for part in SUSPICIOUS)


def _shown(name: str) -> str:
    return quoted(name)[1:-1]
