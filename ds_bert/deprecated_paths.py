"""Module paths of version 0.1's docs that have moved: they work for one more version, with a warning."""

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "ds_bert.data.prepare": "ds_bert.data.preparing.prepare",
    "ds_bert.modeling.cpu_dropout": "ds_bert.layers.cpu_dropout",
    "ds_bert.reduction.engine": "ds_bert.engine.bucket_clipping",
    "ds_bert.vocabulary_projection": "ds_bert.layers.vocabulary_projection",
}


class _MovedModules(MetaPathFinder, Loader):
    """Finder asked after Python's own ones, so that a module that exists costs nothing."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        new = MOVED[module.__name__]
        # FutureWarning, because Python hides DeprecationWarning from the users of a script's imports.
        warnings.warn(
            f"{module.__name__} has moved to {new}; the old path will be gone after version 0.2", FutureWarning, 2
        )
        target = importlib.import_module(new)
        module.__getattr__ = lambda name: getattr(target, name)  # type: ignore[method-assign]


def install() -> None:
    """Make the old paths importable."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
