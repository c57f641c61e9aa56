"""Layers of our own that any model can take: the vocabulary projection that computes the loss, dropout on CPUs.

Plain torch; may import nothing of this package.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "VocabularyProjection": "vocabulary_projection",
    "WeightGradientSink": "vocabulary_projection",
    "use_cpu_dropout": "cpu_dropout",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
