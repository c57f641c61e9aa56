"""Prepared samples to masked micro-batches: masks, the torch data set, collators.

May import: data, and the ground.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Collator": "collators",
    "MaskedBatch": "collators",
    "MaskedLMDataset": "masked_dataset",
    "PackedMaskedLMCollator": "hf_packed_collator",
    "TokenMasker": "masking",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
