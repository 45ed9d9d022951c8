"""Where the inputs and right answers lie that are shared between checkouts, when they are here."""

from __future__ import annotations

import os
from pathlib import Path

SHARED = Path(os.environ.get("KVXFER_SHARED") or Path(__file__).parents[2].parent / "shared")
"""Beside the checkout, or where KVXFER_SHARED says."""

CASES = SHARED / "cases" / "geometry-and-ratio.json"
CONFIGS = SHARED / "model-configs"
