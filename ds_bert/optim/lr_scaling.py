"""The learning rate, warm-up and Adam's constants for another batch size than the one they were found with.

Linear: SGD's rule (arXiv 1706.02677); with plain Adam it trained BERT at batch 16,384 (arXiv 2402.02447). Square root:
what keeps the noise of Adam the same (arXiv 2205.10287, section 5): for a batch of k times the size, with 1 - beta much
smaller than 1,

    lr: sqrt(k) lr    beta: 1 - k (1 - beta), of both    eps: eps / sqrt(k)
"""

import math

from ds_bert.config import SECTION, LrScalingConfig
from ds_bert.errors import UserError

KEY = f"{SECTION}.lr_scaling"

# DeepSpeed's and torch's defaults, where the configuration names none.
ADAM_DEFAULTS = {"betas": (0.9, 0.999), "eps": 1e-8}

# Where a DeepSpeed scheduler keeps a peak of its own; it then ignores the optimizer's rate.
PEAK_KEYS = {"WarmupLR": "warmup_max_lr", "WarmupDecayLR": "warmup_max_lr", "OneCycle": "cycle_max_lr"}

# And the length of its warm-up, in steps.
WARMUP_KEYS = {
    "WarmupLR": "warmup_num_steps",
    "WarmupDecayLR": "warmup_num_steps",
    "WarmupCosineLR": "warmup_num_steps",
    "OneCycle": "cycle_first_step_size",
}


def scaled_rate(scaling: LrScalingConfig, batch_size: int) -> float:
    """The learning rate for a batch of so many samples a step."""
    power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[scaling.rule]
    return scaling.base_lr * _times(scaling, batch_size) ** power


def scale_learning_rate(config: dict, scaling: LrScalingConfig, batch_size: int) -> str:
    """Write the scaled values into a DeepSpeed configuration: rate, and on request warm-up, betas and eps.

    Args:
        config: changed in place; the peak of a scheduler is left to who unifies learning rates.
        scaling: the rule and its base.
        batch_size: samples a step, over all ranks.

    Returns:
        what was done, for the log.

    Raises:
        UserError: the configuration gives a rate already, or a beta would not be in [0, 1).
    """
    optimizer = config.setdefault("optimizer", {}).setdefault("params", {})
    scheduler = config.get("scheduler") or {}
    peak_key = PEAK_KEYS.get(scheduler.get("type"), "")
    given = {"optimizer.params.lr": optimizer.get("lr")}
    given[f"scheduler.params.{peak_key}"] = scheduler.get("params", {}).get(peak_key)
    for key, value in given.items():
        if value not in (None, "auto"):
            raise UserError(
                f"two learning rates: {key} is {value} and {KEY}.base_lr is {scaling.base_lr}; keep one of them"
            )
    optimizer["lr"] = scaled_rate(scaling, batch_size)
    told = f"learning rate {optimizer['lr']:.4g}"
    if scaling.rule != "none":
        told += f" ({scaling.rule} rule: {scaling.base_lr:g} at batch {scaling.base_batch_size:,}, here {batch_size:,})"
    if scaling.scale_warmup:
        told += _scale_warm_up(config, scaling, batch_size)
    if scaling.scale_adam:
        told += _scale_adam(optimizer, _times(scaling, batch_size))
    return told


def _times(scaling: LrScalingConfig, batch_size: int) -> float:
    return batch_size / (scaling.base_batch_size or batch_size)


def _scale_warm_up(config: dict, scaling: LrScalingConfig, batch_size: int) -> str:
    scheduler = config.get("scheduler") or {}
    places = [
        (scheduler.get("params", {}), WARMUP_KEYS.get(scheduler.get("type"), "")),
        (config.get(SECTION, {}).get("schedule") or {}, "warmup_steps"),
    ]
    for place, key in places:
        steps = place.get(key)
        if isinstance(steps, int) and steps:
            place[key] = max(1, round(steps / _times(scaling, batch_size)))
            return f", warm-up {place[key]:,} steps ({steps:,} at batch {scaling.base_batch_size:,})"
    raise UserError(f"{KEY}.scale_warmup: the configuration has no warm-up of so many steps to scale; remove the key")


def _scale_adam(optimizer: dict, times: float) -> str:
    given = {key: value for key, value in optimizer.items() if value != "auto"}
    betas, eps = (given.get(key, default) for key, default in ADAM_DEFAULTS.items())
    scaled = [1 - times * (1 - beta) for beta in betas]
    if min(scaled) < 0:
        largest = 1 / (1 - min(betas))
        raise UserError(
            f"{KEY}.scale_adam: betas {list(betas)} at {times:.4g} times the batch would be "
            f"{[round(beta, 4) for beta in scaled]}; they scale up to {largest:.4g} times: set it to false"
        )
    optimizer["betas"], optimizer["eps"] = scaled, eps / math.sqrt(times)
    return f", betas {[round(beta, 6) for beta in scaled]}, eps {optimizer['eps']:.3g}"
