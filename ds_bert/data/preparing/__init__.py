"""Raw text to prepared samples on disk: documents, held-out part, vocabulary, chunks, samples, storage.

`prepare` is the whole of it. Worker processes load no torch. May import: data, and the ground.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "PrepareSettings": "prepare",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
