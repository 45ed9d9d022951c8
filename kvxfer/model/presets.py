"""Models known by name, and the one way in: a preset's name or the path of a config.json."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from kvxfer.errors import UsageError
from kvxfer.model.config import read_config
from kvxfer.model.shape import ModelShape
from kvxfer.wording import did_you_mean, quoted, quoted_path


def load_model(text: str) -> ModelShape:
    """The model of a preset's name or alias (whatever the case), or of a config.json or a folder that holds one.

    A config.json that exists wins over a preset of the same name. Raises UsageError when there is neither, or when the
    file cannot be read as a model whose cache this version can size.
    """
    name = text.strip()
    path = _config_path(name)
    if path is not None:
        return read_config(path)
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
    """The presets' full names, smallest model first."""
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
    return ", ".join(f"{preset['aliases'][0]} ({name})" for name, preset in _presets().items())


def _shape(name: str) -> ModelShape:
    preset = _presets()[name]
    return ModelShape(
        name=name,
        family="full_attention",
        layers=preset["layers"],
        hidden_size=preset["hidden_size"],
        heads=preset["heads"],
        kv_heads=preset["kv_heads"],
        head_dim_k=preset["head_dim"],
        head_dim_v=preset["head_dim"],
        params_total=preset["params"],
        params_active=preset["params"],
        params_embedding=preset["params_embedding"],
    )
