"""The one learning rate of a configuration: scaled by our rule, with a schedule, written where DeepSpeed reads it."""

import logging
from typing import Any

from ds_bert.config import SECTION, DsBertConfig, parse_section
from ds_bert.errors import UserError
from ds_bert.optim.lr_scaling import PEAK_KEYS, scale_learning_rate

SCHEDULE = f"{SECTION}.schedule"

log = logging.getLogger(__name__)


def carry_out_section(config: dict, section: DsBertConfig, batch_size: int, total_steps: int | None) -> DsBertConfig:
    """Scale the learning rate by `lr_scaling`, which is gone then, and give `schedule` its length. `config` in place.

    Args:
        config: a DeepSpeed configuration.
        section: its section "ds_bert", checked.
        batch_size: samples a step, over all ranks.
        total_steps: optimizer steps of the run; None if nobody knows.

    Returns:
        the section as it is in `config` afterwards.

    Raises:
        UserError: two schedules, a length that nobody knows, no learning rate or one below `end_lr`.
    """
    if section.lr_scaling:
        del config[SECTION]["lr_scaling"]
        log.info(scale_learning_rate(config, section.lr_scaling, batch_size))
        # Its warm-up may have been scaled, too.
        section = parse_section(config)
    if not section.schedule:
        return section
    schedule = config[SECTION]["schedule"]
    if config.get("scheduler"):
        raise UserError(f"two schedules: scheduler.type is {config['scheduler'].get('type')} and {SCHEDULE} is given")
    if section.schedule.total_steps == "auto":
        if total_steps is None:
            raise UserError(f'{SCHEDULE}.total_steps: "auto" is known to ds-bert pretrain only; write a number')
        schedule["total_steps"] = total_steps
        section = parse_section(config)
    peak, end = learning_rate(config), section.schedule.end_lr
    if peak is None:
        raise UserError("no learning rate: write optimizer.params.lr")
    if end > peak:
        raise UserError(f"{SCHEDULE}.end_lr: {end} is more than the learning rate {peak}")
    return section


def learning_rate(config: dict) -> float | None:
    return number(config.get("optimizer", {}).get("params", {}).get("lr"))


def unify_learning_rate(config: dict) -> None:
    """Write the one learning rate given wherever DeepSpeed keeps one (its schedulers ignore the optimizer's)."""
    scheduler = config.get("scheduler") or {}
    peak_key = PEAK_KEYS.get(scheduler.get("type"))
    if peak_key is None or "optimizer" not in config:
        return
    peak, rate = scheduler.setdefault("params", {}).get(peak_key), learning_rate(config)
    if peak is not None and rate is not None and peak != rate:
        raise UserError(
            f"two learning rates: optimizer.params.lr is {rate} and scheduler.params.{peak_key} is {peak}; "
            f"{scheduler['type']} uses only its own, so remove one of them"
        )
    if peak is None and rate is None:
        raise UserError(f"no learning rate: write optimizer.params.lr (or scheduler.params.{peak_key})")
    scheduler["params"][peak_key] = config["optimizer"].setdefault("params", {})["lr"] = peak if rate is None else rate


def number(value: Any) -> Any:
    """A value as it is given; None for "auto"."""
    return None if value == "auto" else value
