"""Sliding-window models: which layers have the window, and with what heads.

Layers are told apart by layer_types, by a list of 0 and 1, by a pattern that repeats, by the layer from which windows
begin, or by what the type is known to do. Where a config says it twice, both must agree. Window layers may have head
counts and head sizes of their own (swa_*), and so may the full ones (global_head_dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.model.families.family import Family, Reading
from kvxfer.model.families.heads import Heads, read_heads
from kvxfer.model.fields import Fields
from kvxfer.model.layers import FullAttention, LayerKind, SlidingWindow

FULL, WINDOW = "full_attention", "sliding_attention"

PATTERN_FIELDS = ("sliding_window_pattern", "_sliding_window_pattern")

FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "gpt_oss": 2, "olmo3": 4, "exaone4": 4}
"""Of types whose configs may leave the pattern out: one layer in so many, the last of them, is full (transformers)."""

ALL_WINDOWS = ("mistral", "mixtral", "phi3", "starcoder2")
"""Types in which every layer has the window."""


@dataclass(frozen=True)
class Said:
    """What a field says of the layers: True where a layer has the window."""

    field: str
    windows: tuple[bool, ...]


def _applies(fields: Fields) -> bool:
    kinds = fields.config.get("layer_types")
    named = isinstance(kinds, list) and WINDOW in kinds
    switched_off = fields.config.get("use_sliding_window") is False
    given = any(fields.has(field) for field in ("sliding_window", "sliding_window_size", "hybrid_layer_pattern"))
    return named or (given and not switched_off)


def _read(fields: Fields) -> Reading:
    layers = fields.positive("num_hidden_layers")
    heads = read_heads(fields)
    windows = _window_layers(fields, layers)
    full = _full_kind(fields, heads)
    window: LayerKind = _window_kind(fields, heads) if any(windows) else full
    kinds = tuple(window if windowed else full for windowed in windows)
    value = fields.optional("v_head_dim") or heads.head_dim
    return Reading(kinds, heads.head_dim, value)


def _full_kind(fields: Fields, heads: Heads) -> FullAttention:
    head_dim = fields.optional("global_head_dim") or heads.head_dim
    value = fields.optional("v_head_dim") or head_dim
    return FullAttention(fields.positive("num_global_key_value_heads", heads.kv), head_dim, value)


def _window_kind(fields: Fields, heads: Heads) -> SlidingWindow:
    key = fields.optional("swa_head_dim") or heads.head_dim
    value = fields.optional("swa_v_head_dim") or fields.optional("v_head_dim") or key
    query = fields.optional("swa_num_attention_heads")
    return SlidingWindow(
        fields.positive("swa_num_key_value_heads", heads.kv),
        key,
        value,
        query_heads=None if query == heads.query else query,
        window=_window_size(fields),
    )


def _window_size(fields: Fields) -> int:
    """Tokens that a window layer attends to; every field that names them must name the same."""
    if isinstance(fields.config.get("sliding_window"), list):
        sizes = [size for size in fields.config["sliding_window"] if size is not None]
        if not sizes or any(type(size) is not int or size < 1 or size != sizes[0] for size in sizes):
            fields.fail("sliding_window", "is no list of one window size and null")
        return int(sizes[0])
    named = [name for name in ("sliding_window", "sliding_window_size") if fields.has(name)]
    if not named:
        raise fields.missing("sliding_window")
    size = fields.positive(named[0])
    for name in (*named[1:], "attention_chunk_size"):
        if fields.has(name) and fields.positive(name) != size:
            fields.fail(name, f"is not {named[0]} ({size})")
    return size


def _window_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers have the window."""
    if fields.config.get("use_sliding_window") is False:
        return (False,) * layers
    said = _all_said(fields, layers) or _said_by_type(fields, layers)
    for other in said[1:]:
        if other.windows != said[0].windows:
            fields.fail(other.field, f"puts the windows in other layers than {said[0].field}")
    return said[0].windows


def _all_said(fields: Fields, layers: int) -> list[Said]:
    said = []
    if fields.has("layer_types"):
        said.append(_listed(fields, "layer_types", layers, {FULL: False, WINDOW: True}))
    if fields.has("hybrid_layer_pattern"):
        said.append(_listed(fields, "hybrid_layer_pattern", layers, {0: False, 1: True}))
    said += [_repeated(fields, field, layers) for field in PATTERN_FIELDS if fields.has(field)]
    if isinstance(fields.config.get("sliding_window"), list):
        windows = [size is not None for size in fields.config["sliding_window"]]
        said.append(_cycled(fields, "sliding_window", windows, layers))
    if fields.config.get("use_sliding_window") is True and fields.config.get("max_window_layers") is not None:
        first = fields.whole("max_window_layers")  # 0: all layers have the window
        said.append(Said("max_window_layers", tuple(layer >= first for layer in range(layers))))
    return said


def _said_by_type(fields: Fields, layers: int) -> list[Said]:
    if fields.model_type in FULL_EVERY:
        return [Said("model_type", _full_every(FULL_EVERY[fields.model_type], layers))]
    if fields.model_type in ALL_WINDOWS:
        return [Said("model_type", (True,) * layers)]
    field = next((name for name in ("sliding_window", "sliding_window_size") if fields.has(name)), None)
    if field is None:
        raise fields.missing("layer_types")
    raise fields.error(field, "does not say which layers have the window, nor does any other field that is understood")


def _listed(fields: Fields, field: str, layers: int, meaning: dict[object, bool]) -> Said:
    entries = fields.per_layer(field, layers)
    if not all(isinstance(entry, (str, int)) and entry in meaning for entry in entries):
        fields.fail(field, f"has entries other than {' and '.join(map(str, meaning))}")
    return Said(field, tuple(meaning[entry] for entry in entries))


def _repeated(fields: Fields, field: str, layers: int) -> Said:
    """A number n: every n-th layer is full. A string such as LLLG: local and global layers."""
    value = fields.config[field]
    if isinstance(value, str):
        if set(value) - {"L", "G"}:
            fields.fail(field, "has letters other than L (local) and G (global)")
        return _cycled(fields, field, [letter == "L" for letter in value], layers)
    return Said(field, _full_every(fields.positive(field), layers))


def _cycled(fields: Fields, field: str, windows: Sequence[bool], layers: int) -> Said:
    if not windows or layers % len(windows):
        fields.fail(field, f"does not repeat evenly over num_hidden_layers = {layers}")
    return Said(field, tuple(windows) * (layers // len(windows)))


def _full_every(count: int, layers: int) -> tuple[bool, ...]:
    return tuple((layer + 1) % count != 0 for layer in range(layers))


FAMILY = Family(
    name="sliding_window",
    keys=frozenset(
        {
            *("sliding_window", "sliding_window_size", "use_sliding_window", "max_window_layers", "layer_types"),
            *(*PATTERN_FIELDS, "hybrid_layer_pattern", "v_head_dim"),
            *("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim", "swa_rope_theta"),
            *("global_head_dim", "num_global_key_value_heads"),
            # of bias terms, and a second name of the window (checked to be the same)
            *("add_swa_attention_sink_bias", "add_full_attention_sink_bias", "attention_chunk_size"),
            "vision_config",
        }
    ),
    model_types=frozenset(
        {
            *(*FULL_EVERY, *ALL_WINDOWS, "qwen2", "qwen3", "mimo_v2_flash"),
            *("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
        }
    ),
    applies=_applies,
    read=_read,
)
