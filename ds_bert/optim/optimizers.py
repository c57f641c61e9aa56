"""Optimizers by the names that users write in a DeepSpeed configuration, and those DeepSpeed has none of here."""

import inspect
import logging
from collections.abc import Iterable

from torch.optim import Optimizer

from ds_bert.errors import UserError, did_you_mean
from ds_bert.optim.lamb import Lamb

# What users write for what DeepSpeed calls otherwise.
OTHER_NAMES = {"fusedadam": "Adam", "fusedadamw": "AdamW", "fusedlamb": "Lamb", "fusedlion": "Lion"}

# DeepSpeed's kernels, by the lower-case name of the optimizer.
BUILDERS = {
    "adam": "FusedAdamBuilder",
    "adamw": "FusedAdamBuilder",
    "lamb": "FusedLambBuilder",
    "lion": "FusedLionBuilder",
}

# What DeepSpeed calls the builder of what a device has no kernel of.
NOT_IMPLEMENTED = "deepspeed_not_implemented"

log = logging.getLogger(__name__)


def resolve_name(config: dict) -> None:
    """Give the optimizer of a DeepSpeed configuration the name that DeepSpeed knows it by, in place."""
    optimizer = config.get("optimizer")
    if isinstance(optimizer, dict) and str(optimizer.get("type", "")).lower() in OTHER_NAMES:
        optimizer["type"] = OTHER_NAMES[optimizer["type"].lower()]


def kernel_builder(name: str) -> str | None:
    """Which of DeepSpeed's builders makes this optimizer's kernel for this device; None if none does."""
    from deepspeed.accelerator import get_accelerator

    found = BUILDERS.get(name.lower())
    builder = found and get_accelerator().create_op_builder(found)
    return found if builder is not None and builder.NAME != NOT_IMPLEMENTED else None


def substitute(config: dict, groups: Iterable[dict]) -> Optimizer | None:
    """The optimizer of a configuration in plain torch, if DeepSpeed has no kernel of it for this device.

    Args:
        config: a DeepSpeed configuration.
        groups: see `parameter_groups`.

    Returns:
        None if it is DeepSpeed's to make.

    Raises:
        UserError: there is none for this device, or a parameter has no meaning there.
    """
    from deepspeed.accelerator import get_accelerator

    name, parameters = config["optimizer"]["type"], config["optimizer"].get("params", {})
    device = get_accelerator().device_name()
    if name.lower() not in BUILDERS or kernel_builder(name):
        return None
    if name.lower() != "lamb":
        raise UserError(f"optimizer.type: DeepSpeed has no {name} for this device ({device}); take AdamW or Lamb")
    known = inspect.signature(Lamb).parameters.keys() - {"params"}
    unknown = sorted(parameters.keys() - known)
    if unknown:
        raise UserError(
            f"optimizer.params.{unknown[0]}: {name} has no such parameter on this device ({device})"
            f"{did_you_mean(unknown[0], sorted(known))}"
        )
    log.info(f"DeepSpeed has no {name} for this device ({device}); training with ds_bert's, in plain torch")
    return Lamb(groups, **parameters)
