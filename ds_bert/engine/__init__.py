"""Everything that reaches into DeepSpeed's engine: `initialize`, bucket clipping, the gradient guard, the clock.

`patches` is the one list of what is wrapped, and in which order. DeepSpeed loads when a name is first used, so that a
device can be chosen before. May import: reduction, resolution, optim, and the ground.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "BucketClipping": "gradient_guard",
    "GradientGuard": "gradient_guard",
    "RankClock": "rank_clock",
    "TRACE_FOLDER": "initialization",
    "ZeroClipping": "zero_clipping",
    "attach_to_engine": "bucket_clipping",
    "guard_of": "gradient_guard",
    "initialize": "initialization",
    "initialize_resolved": "initialization",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
