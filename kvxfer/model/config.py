"""Reading a Hugging Face config.json: which family it is of, what its layers keep, and how many parameters it has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvxfer.errors import UsageError
from kvxfer.model.config_file import read_config_file
from kvxfer.model.defaults import with_defaults
from kvxfer.model.families import family_of
from kvxfer.model.families.family import Family, Reading
from kvxfer.model.fields import Fields
from kvxfer.model.layers import NoCache
from kvxfer.model.parameters.count import Parameters, count_parameters
from kvxfer.model.rules import KEEPS_STATES, refuse_unknown, unknown_field
from kvxfer.model.shape import MTP_LEFT_OUT, ModelShape
from kvxfer.wording import quoted

TEXT_TOWERS = ("text_config", "llm_config", "language_config")
"""Where a multimodal config keeps its language model."""

OTHER_TOWERS = ("vision", "audio")
"""What fields beside the language model may speak of: those towers keep nothing between tokens."""

INHERITED = ("tie_word_embeddings", "torch_dtype", "dtype")
"""Fields that a language model without them takes from the config around it."""

MTP_UNKNOWN = "its layers of multi-token prediction are left out: its config.json does not tell what they keep"

WRITES_TEXT = ("CausalLM", "LMHead", "ForConditionalGeneration")
"""Parts of the names of architectures that write text token by token: others have no KV cache to move."""


def read_config(path: Path, *, cache_given: bool = False) -> ModelShape:
    """The model of a config.json. Raises UsageError when it is unreadable, malformed, or not understood.

    With cache_given its cache need not be understood, and one that is not is a model of so many layers.
    """
    config = read_config_file(path)
    name = (path.resolve().parent.name if path.name == "config.json" else path.stem) or "model"
    name = name.encode("utf-8", "replace").decode("utf-8")  # as a result has it
    try:
        return shape_from_config(config, name, str(path))
    except UsageError:
        if not cache_given:
            raise
        return _layers_alone(config, name, str(path))


def _layers_alone(config: Mapping[str, Any], name: str, source: str) -> ModelShape:
    """A model of which only the number of layers is known. Raises UsageError when not even that is."""
    fields = _text_tower(config, source)
    layers = fields.positive("num_hidden_layers")
    return ModelShape(
        name=name,
        family="unknown",
        layers=layers,
        hidden_size=1,
        heads=1,
        kv_heads=1,
        head_dim_k=1,
        head_dim_v=1,
        notices=(f"{name}: its config.json is not understood here; the attention of its prefill is not counted",),
        layer_kinds=(NoCache(),) * layers,
    )


def shape_from_config(config: Mapping[str, Any], name: str, source: str) -> ModelShape:
    """The model of a parsed config.json; `source` says in errors where it comes from. Raises UsageError."""
    fields, left_out = with_defaults(_language_model(config, source))
    family = family_of(fields)
    refuse_unknown(fields.config, family.keys, family.name, source, fields.prefix)
    known = fields.model_type in family.model_types
    if not known:
        _refuse_an_encoder(config, family, source)
    reading = family.read(fields)
    if not known and not any(kind.state_bytes for kind in reading.kinds):
        _refuse_a_name_of_states(config, fields, family)
    heads = fields.positive("num_attention_heads")
    parameters = count_parameters(fields, reading.kinds)
    return ModelShape(
        name=name,
        family=family.name,
        layers=fields.positive("num_hidden_layers"),
        hidden_size=fields.positive("hidden_size"),
        heads=heads,
        kv_heads=fields.positive("num_key_value_heads", heads),
        head_dim_k=reading.head_dim_k,
        head_dim_v=reading.head_dim_v,
        params_total=parameters.total if parameters else None,
        params_active=parameters.active if parameters else None,
        params_embedding=parameters.embedding if parameters else None,
        notices=tuple(f"{name}: {notice}" for notice in [*left_out, *_notices(fields, family, reading, parameters)]),
        layer_kinds=reading.kinds,
        naive_head_dim=reading.naive_head_dim,
        mtp_kinds=(reading.mtp,) * _mtp_layers(fields) if reading.mtp else (),
        mlps=parameters.mlps if parameters else (),
        query_rank=fields.count("q_lora_rank"),
        output_gate=parameters is not None and parameters.output_gate,
    )


def _language_model(config: Mapping[str, Any], source: str) -> Fields:
    """The fields of the language model: the config's own, or those of its text tower."""
    fields = _text_tower(config, source)
    if fields.prefix:
        beside = {
            field: value
            for field, value in config.items()
            if f"{field}." != fields.prefix and not any(other in field.lower() for other in OTHER_TOWERS)
        }
        refuse_unknown(beside, (), "a multimodal model", source, "")
    return fields


def _text_tower(config: Mapping[str, Any], source: str) -> Fields:
    """The same, whatever stands beside it."""
    tower = next((tower for tower in TEXT_TOWERS if isinstance(config.get(tower), dict) and config[tower]), None)
    if tower is None:
        return Fields(config, source)
    inherited = {field: config[field] for field in INHERITED if field in config}
    return Fields(inherited | config[tower], source, f"{tower}.")


def _refuse_an_encoder(config: Mapping[str, Any], family: Family, source: str) -> None:
    """Raises UsageError when none of the architectures named writes text token by token."""
    named = config.get("architectures")
    if not isinstance(named, list) or not named:
        return
    if not any(isinstance(name, str) and part in name for name in named for part in WRITES_TEXT):
        raise unknown_field(config, ["architectures"], family.name, source)


def _refuse_a_name_of_states(config: Mapping[str, Any], fields: Fields, family: Family) -> None:
    """Raises UsageError when the model's name says that it keeps states, of which no field here told."""
    for field, where in (("model_type", fields.config), ("architectures", config)):
        if any(word in str(where.get(field)).lower() for word in KEEPS_STATES):
            raise unknown_field(where, [field], family.name, fields.source)


def _mtp_layers(fields: Fields) -> int:
    """Layers of multi-token prediction: the number of them, or of modules times the layers of one."""
    if fields.has("num_mtp_modules"):
        return fields.positive("num_mtp_modules") * fields.positive("mtp_transformer_layers", 1)
    return fields.count("num_nextn_predict_layers") or fields.count("mtp_num_hidden_layers")


def _notices(fields: Fields, family: Family, reading: Reading, parameters: Parameters | None) -> list[str]:
    notices = list(reading.notices)
    heads = fields.config["num_attention_heads"]
    if fields.config.get("num_key_value_heads") is None and family.name not in ("mla", "mla_indexer", "pruned"):
        notices.append(f"num_key_value_heads is absent, taken as num_attention_heads ({heads})")
    if fields.model_type not in family.model_types:
        notices.append(
            f"model_type {quoted(fields.config.get('model_type'))} is not known here; it is sized as "
            f"{family.name.replace('_', ' ')}, since nothing in its config.json speaks against that"
        )
    if parameters is None:
        notices.append("its parameters are not counted here; pass --params and --params-active")
    if _mtp_layers(fields):
        notices.append(MTP_LEFT_OUT if reading.mtp else MTP_UNKNOWN)
    return notices
