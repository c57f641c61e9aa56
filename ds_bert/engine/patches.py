"""The one list of DeepSpeed's methods that are wrapped, and the order in which the wrappers lie.

DeepSpeed has no hooks for most of what this package adds, so methods are replaced on the instance. Several parts do
that to one method, at different times; `wrap` puts each wrapper where `ORDER` says, whoever comes first.
`tests/engine/test_private_names.py` names everything of DeepSpeed's inside that is relied on.
"""

from collections.abc import Callable
from typing import Any

# Method -> wrappers, innermost first. All belong to the engine but the last two, which belong to its optimizer.
ORDER: dict[str, tuple[str, ...]] = {
    # The guard scales the loss where DeepSpeed forgets to; what is traced is the whole of it.
    "forward": ("trace",),
    "backward": ("gradient guard", "trace"),
    "scale": ("gradient guard",),
    # The clock stops before anything of the reduction, where ranks begin to wait for each other.
    "allreduce_gradients": ("bucket clipping", "trace", "rank clock"),
    # Called at the end of accumulation only, whoever decides when that is; `engine.step` is called every micro-step.
    "_take_model_step": ("gradient guard", "trace"),
    "get_global_grad_norm": ("gradient guard",),
    "save_checkpoint": ("bucket clipping",),
    "load_checkpoint": ("bucket clipping",),
    "step": ("gradient guard",),
    "average_tensor": ("bucket clipping",),
}

_LAYERS = "ds_bert_layers"

Method = Callable[..., Any]


def wrap(owner: Any, method: str, layer: str, wrapper: Callable[[Method], Method]) -> None:
    """Wrap a method of one instance.

    Args:
        owner: DeepSpeed's engine, or its optimizer.
        method: key of `ORDER`.
        layer: who wraps it, one of `ORDER[method]`; a second wrapper of one layer takes the first one's place.
        wrapper: called with the next inner method, returns the method that takes its place.

    Raises:
        AttributeError: the owner has no such method: a DeepSpeed of another version.
        ValueError: `ORDER` does not have this layer.
    """
    if layer not in ORDER[method]:
        raise ValueError(f"{layer!r} is not a layer of {method} (patches.ORDER has {ORDER[method]})")
    records = vars(owner).setdefault(_LAYERS, {})
    original, layers, installed = records.get(method, (None, {}, None))
    if getattr(owner, method) is not installed:
        # Untouched so far, or somebody else has wrapped it since: what is there now is left inside.
        original, layers = getattr(owner, method), {}
    layers[layer] = wrapper
    outermost = original
    for name in ORDER[method]:
        if name in layers:
            outermost = layers[name](outermost)
    setattr(owner, method, outermost)
    records[method] = (original, layers, outermost)
