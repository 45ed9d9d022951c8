"""Models known by name, and the one way in: a preset's name or the path of a config.json."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from kvxfer.errors import UsageError
from kvxfer.model.config import read_config
from kvxfer.model.layers import ChunkedAttention, FullAttention, Latent, LayerKind, SlidingWindow, gated_delta_state
from kvxfer.model.mlp import Mlp
from kvxfer.model.shape import ModelShape
from kvxfer.wording import did_you_mean, quoted, quoted_path

KINDS: dict[str, Callable[..., LayerKind]] = {
    "full": FullAttention,
    "window": SlidingWindow,
    "chunk": ChunkedAttention,
    "latent": Latent,
    "gated_delta": gated_delta_state,
}
"""What presets.json calls the kinds of layers; the other words there are the fields of these."""


def load_model(text: str, *, cache_given: bool = False) -> ModelShape:
    """The model of a preset's name or alias (whatever the case), or of a config.json or a folder that holds one.

    A config.json that exists wins over a preset of the same name. Raises UsageError when there is neither, or when the
    file cannot be read as a model whose cache this version can size. With cache_given its number of layers is enough.
    """
    name = text.strip()
    path = _config_path(name)
    if path is not None:
        return read_config(path, cache_given=cache_given)
    preset = _aliases().get(name.lower())
    if preset is not None:
        return _shape(preset)
    if os.path.isdir(name):
        raise UsageError(f"there is no config.json in {quoted_path(name)}; give a model's folder or its config.json")
    if name.endswith(".json") or name.startswith((os.sep, os.curdir)):
        raise UsageError(f"there is no file {quoted_path(name)}; give a model's config.json or a preset: {_listed()}")
    raise UsageError(
        f"unknown model {quoted(text)}{did_you_mean(name, _aliases())}; presets are {_listed()}, "
        "or give the path of a config.json"
    )


def preset_names() -> list[str]:
    """The presets' full names, family by family."""
    return list(_presets())


def _config_path(name: str) -> Path | None:
    """The config.json that a name points to, when it exists."""
    if os.path.isdir(name):
        inside = os.path.join(name, "config.json")
        return Path(inside) if os.path.exists(inside) else None
    return Path(name) if name and os.path.exists(name) else None


@cache
def _presets() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("presets.json").read_text(encoding="utf-8")
    presets: dict[str, dict[str, Any]] = json.loads(text)
    return presets


@cache
def _aliases() -> dict[str, str]:
    return {alias: name for name, preset in _presets().items() for alias in (name, *preset["aliases"])}


def _listed() -> str:
    return ", ".join(_presets())


def _shape(name: str) -> ModelShape:
    preset = _presets()[name]
    kinds = _kinds(preset)
    return ModelShape(
        name=name,
        family=preset.get("family", "full_attention"),
        layers=len(kinds) or preset["layers"],
        hidden_size=preset["hidden_size"],
        heads=preset["heads"],
        kv_heads=preset["kv_heads"],
        head_dim_k=preset.get("head_dim_k", preset["head_dim"]),
        head_dim_v=preset.get("head_dim_v", preset["head_dim"]),
        params_total=preset["params"],
        params_active=preset.get("params_active", preset["params"]),
        params_embedding=preset["params_embedding"],
        layer_kinds=kinds,
        naive_head_dim=preset["head_dim"],
        mtp_kinds=(_kind(preset["kinds"][preset["mtp"]]),) if "mtp" in preset else (),
        mlps=_mlps(preset),
        query_rank=preset.get("query_rank", 0),
        output_gate=preset.get("output_gate", False),
    )


def _mlps(preset: Mapping[str, Any]) -> tuple[Mlp, ...]:
    """The layers' in order: how many of one kind, and its widths."""
    activation = preset.get("activation", "silu")
    return tuple(
        mlp for count, *widths in preset["mlps"] for mlp in (replace(Mlp(*widths), activation=activation),) * count
    )


def _kinds(preset: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """The layers in order: `pattern` is a list of letters of `kinds` and how often they repeat; none: a plain model."""
    letters = "".join(letters * count for letters, count in preset.get("pattern", []))
    return tuple(_kind(preset["kinds"][letter]) for letter in letters)


def _kind(described: Mapping[str, Any]) -> LayerKind:
    fields = dict(described)
    return KINDS[fields.pop("kind")](**fields)
