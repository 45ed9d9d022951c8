"""Nemotron-H: a letter for each layer (`M-M*E`): Mamba-2, an MLP, full attention, or experts."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.model.families.family import Family, Reading
from kvxfer.model.families.heads import Heads, default_head_dim, read_head_counts
from kvxfer.model.families.mamba2 import Mamba2
from kvxfer.model.fields import Fields
from kvxfer.model.layers import FullAttention, LayerKind, NoCache

LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
NAMES = {**{name: name for name in LETTERS.values()}, "linear_attention": "mamba", "full_attention": "attention"}
"""What layers_block_type calls them; the longer names are those of newer configs."""

SSM_BYTES = 4
"""What vLLM keeps the recurrent state in when the config does not name a type: float32."""


def _read(fields: Fields) -> Reading:
    layers = fields.positive("num_hidden_layers")
    full = read_attention(fields).full()
    meaning: dict[str, LayerKind] = {"attention": full, "mlp": NoCache(), "moe": NoCache()}
    names = layer_names(fields, layers)
    notices: tuple[str, ...] = ()
    if "mamba" in names:
        meaning["mamba"] = read_mamba(fields).layer(fields.model_bytes(), _ssm_bytes(fields))
        if not fields.has("mamba_ssm_cache_dtype"):
            notices = ("mamba_ssm_cache_dtype is absent, its recurrent states taken as float32, which vLLM keeps",)
    kinds = tuple(meaning[name] for name in names)
    return Reading(kinds, full.head_dim_k, full.head_dim_v, mtp=_mtp(fields, full), notices=notices)


def _mtp(fields: Fields, full: FullAttention) -> FullAttention | None:
    """What a layer of multi-token prediction keeps: its letters must be one of attention and some of no cache."""
    letters = fields.config.get("mtp_hybrid_override_pattern")
    if not isinstance(letters, str) or set(letters) - {"*", "-", "E"} or letters.count("*") != 1:
        return None
    return full


def read_attention(fields: Fields) -> Heads:
    query, kv = read_head_counts(fields)
    head_dim = fields.optional("attention_head_dim") or fields.optional("head_dim")
    return Heads(query, kv, head_dim or default_head_dim(fields, query))


def read_mamba(fields: Fields) -> Mamba2:
    return Mamba2(
        fields.positive("mamba_num_heads"),
        fields.positive("mamba_head_dim"),
        fields.positive("n_groups"),
        fields.positive("ssm_state_size"),
        fields.positive("conv_kernel"),
    )


def _ssm_bytes(fields: Fields) -> int:
    return fields.element_bytes("mamba_ssm_cache_dtype", SSM_BYTES)


def layer_names(fields: Fields, layers: int) -> list[str]:
    """mamba, attention, mlp or moe for each layer, by the letters or by layers_block_type, or by both alike."""
    by_letters = by_names = None
    if fields.has("hybrid_override_pattern"):
        letters = fields.per_layer("hybrid_override_pattern", layers)
        by_letters = _known(fields, "hybrid_override_pattern", letters, LETTERS)
    if fields.has("layers_block_type"):
        names = fields.per_layer("layers_block_type", layers)
        by_names = _known(fields, "layers_block_type", names, NAMES)
    if by_letters and by_names and by_letters != by_names:
        fields.fail("layers_block_type", "names other layers than hybrid_override_pattern")
    found = by_letters or by_names
    if found is None:
        fields.fail("hybrid_override_pattern", "is needed, or layers_block_type, to know the layers")
    return found


def _known(fields: Fields, field: str, entries: Sequence[object], meaning: dict[str, str]) -> list[str]:
    if not all(isinstance(entry, str) and entry in meaning for entry in entries):
        fields.fail(field, f"has entries other than {', '.join(meaning)}")
    return [meaning[str(entry)] for entry in entries]


FAMILY = Family(
    name="mamba_hybrid",
    keys=frozenset(
        {
            *("hybrid_override_pattern", "layers_block_type", "attention_head_dim", "chunk_size"),
            *("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "conv_kernel", "mamba_ssm_cache_dtype"),
            *("mamba_hidden_act", "use_conv_bias", "mamba_proj_bias", "use_mamba_kernels"),
            *("mtp_hybrid_override_pattern", "moe_latent_size"),  # the latter is of the experts
        }
    ),
    model_types=frozenset({"nemotron_h"}),
    applies=lambda fields: fields.model_type == "nemotron_h" or fields.has("hybrid_override_pattern"),
    read=_read,
)
