"""MLA (DeepSeek-V2, -V3, -R1, Kimi-K2), and MLA with an indexer (DeepSeek-V3.2, GLM-5).

Every layer keeps one latent of kv_lora_rank + qk_rope_head_dim elements per token, K and V in one;
num_key_value_heads and head_dim say nothing of it. An indexer keeps its own key beside it.
"""

from __future__ import annotations

from dataclasses import replace

from kvxfer.model.families.family import Family, Reading
from kvxfer.model.fields import Fields
from kvxfer.model.layers import Latent

KEYS = frozenset({"kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "qk_head_dim", "v_head_dim"})
INDEXER_KEYS = frozenset({"index_head_dim", "index_n_heads", "index_topk", "indexer_rope_interleave"})

FULL_HEADS_CACHED = ("minicpm3",)
"""Types with these fields whose engines keep K and V per head all the same."""


def _read(fields: Fields) -> Reading:
    if fields.model_type in FULL_HEADS_CACHED:
        fields.fail("kv_lora_rank", f"does not shape the cache of {fields.model_type}, which engines keep per head")
    if fields.config.get("use_mla") is False:
        fields.fail("use_mla", "says that K and V are kept per head, which is not read here")
    layers, rank = fields.positive("num_hidden_layers"), fields.positive("kv_lora_rank")
    nope, rope = fields.positive("qk_nope_head_dim"), fields.positive("qk_rope_head_dim")
    if fields.has("qk_head_dim") and fields.positive("qk_head_dim") != nope + rope:
        fields.fail("qk_head_dim", f"is not qk_nope_head_dim + qk_rope_head_dim ({nope + rope})")
    value = fields.positive("v_head_dim")
    latent = Latent(rank, rope, qk_head_dim=nope + rope, v_head_dim=value)
    naive = fields.optional("head_dim") or value
    return Reading((latent,) * layers, nope + rope, value, mtp=latent, naive_head_dim=naive)


def _read_with_indexer(fields: Fields) -> Reading:
    reading = _read(fields)
    if fields.positive("index_head_dim") % 128:
        fields.fail("index_head_dim", "is no multiple of 128, the elements that share a scale")
    (latent,) = set(reading.kinds)
    assert isinstance(latent, Latent)
    indexed = replace(
        latent,
        index_head_dim=fields.positive("index_head_dim"),
        index_heads=fields.positive("index_n_heads"),
        index_topk=fields.positive("index_topk"),
    )
    return replace(reading, kinds=(indexed,) * len(reading.kinds), mtp=indexed)


FAMILY = Family(
    name="mla",
    keys=KEYS,
    model_types=frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2"}),
    applies=lambda fields: fields.has("kv_lora_rank"),
    read=_read,
)

WITH_INDEXER = Family(
    name="mla_indexer",
    keys=KEYS | INDEXER_KEYS,
    model_types=frozenset({"deepseek_v32", "glm_moe_dsa"}),
    applies=lambda fields: fields.has("kv_lora_rank") and fields.has("index_head_dim"),
    read=_read_with_indexer,
)
