"""The rule that no reader of config.json may pass over certain fields."""

from __future__ import annotations

RULE = (
    *("window", "lora", "index", "compress", "shar", "state", "conv", "ssm", "chunk", "sparse", "linear", "latent"),
    "pattern",
)
"""What no family may pass over."""
