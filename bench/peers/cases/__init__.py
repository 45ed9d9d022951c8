"""The questions, one file each: NAME is what --only takes, run(run) measures and adds its goals."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def all_cases() -> list[ModuleType]:
    """In the order of their names' numbers."""
    modules = (importlib.import_module(f"cases.{one.name}") for one in pkgutil.iter_modules(__path__))
    return sorted(modules, key=lambda case: int(case.ORDER))
