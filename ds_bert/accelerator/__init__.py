"""The device that DeepSpeed trains on, and DeepSpeed's compiled ops for it.

torch and DeepSpeed load when a function needs them. May import: optim, and the ground.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "build_ops": "compiled_ops",
    "choose_device": "device",
    "default_num_procs": "device",
    "needed_ops": "compiled_ops",
    "skip_unused_comm_op": "compiled_ops",
    "use_torch_adam": "compiled_ops",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
