"""One reader per family of models, each a file; the order in which they are asked."""

from __future__ import annotations

from kvxfer.model.families import (
    chunked,
    full,
    gated_delta,
    mamba_hybrid,
    mla,
    nemotron_h,
    pruned,
    window,
    zamba2,
)
from kvxfer.model.families.family import Family
from kvxfer.model.fields import Fields

FAMILIES: tuple[Family, ...] = (
    nemotron_h.FAMILY,
    zamba2.FAMILY,
    mamba_hybrid.FAMILY,
    pruned.FAMILY,
    mla.WITH_INDEXER,
    mla.FAMILY,
    gated_delta.FAMILY,
    window.FAMILY,
    chunked.FAMILY,
    full.FAMILY,  # when nothing else applies
)


def family_of(fields: Fields) -> Family:
    """The first family that the config says it belongs to.

    A model_type that is known is of a family that knows it, even where the field that tells the family is absent: then
    the family's reader names it, and no other sizes the model as what it is not.
    """
    families = [family for family in FAMILIES if fields.model_type in family.model_types] or FAMILIES
    return next((family for family in families if family.applies(fields)), families[-1])
