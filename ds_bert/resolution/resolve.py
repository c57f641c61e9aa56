"""A DeepSpeed configuration as DeepSpeed shall see it: batch sizes filled in, "auto" resolved, one learning rate.

Plain dictionaries, so that a mistake is found before any rank starts.
"""

import copy
import logging
from typing import Any

from ds_bert.config import SECTION, parse_section
from ds_bert.errors import UserError
from ds_bert.optim.lr_scaling import PEAK_KEYS, scale_learning_rate
from ds_bert.optim.optimizers import resolve_name

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

# Where Hugging Face's own default for an "auto" equals DeepSpeed's, so that leaving the key out means the same.
SAME_DEFAULTS = {"optimizer.params.betas", "optimizer.params.eps"}

SCHEDULE = f"{SECTION}.schedule"

log = logging.getLogger(__name__)


def resolve_batch_sizes(config: dict, world_size: int) -> tuple[int, int, int]:
    """Fill in the batch sizes that are not given, by DeepSpeed's rule.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size

    Args:
        config: a DeepSpeed configuration; "auto" counts as not given.
        world_size: number of data-parallel ranks.

    Returns:
        global batch (samples a step), micro-batch (samples a rank and micro-step), accumulation (micro-steps).

    Raises:
        UserError: none is given, one is no positive integer, or they do not multiply out; the latter names the three
            numbers and the nearest valid ones.
    """
    given = {key: config.get(key) for key in BATCH_KEYS}
    for key, value in given.items():
        if value == "auto":
            given[key] = None
        elif value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UserError(f"{key}: must be a whole number of at least 1, not {value!r}")
    batch, micro, accumulation = given.values()
    if batch is None and micro is None:
        raise UserError(
            "no batch size: give train_batch_size (samples a step over all ranks) or train_micro_batch_size_per_gpu"
        )
    if batch is None:
        accumulation = accumulation or 1
        return micro * accumulation * world_size, micro, accumulation
    if micro is None:
        unit = (accumulation or 1) * world_size
        micro, accumulation, rest = batch // unit, accumulation or 1, batch % unit
    elif accumulation is None:
        unit = micro * world_size
        accumulation, rest = batch // unit, batch % unit
    else:
        unit, rest = micro * accumulation * world_size, batch - micro * accumulation * world_size
        if rest:
            raise UserError(
                f"train_batch_size {batch} is not train_micro_batch_size_per_gpu {micro} x "
                f"gradient_accumulation_steps {accumulation} x world size {world_size} = {unit}; write "
                f"train_batch_size {unit}, or leave one of the three keys out and DeepSpeed's rule fills it"
            )
    if rest:
        known = {"train_micro_batch_size_per_gpu": given[BATCH_KEYS[1]], BATCH_KEYS[2]: given[BATCH_KEYS[2]]}
        factors = " x ".join([f"{key} {value}" for key, value in known.items() if value] + [f"world size {world_size}"])
        nearest = [n for n in (batch - batch % unit, batch - batch % unit + unit) if n > 0]
        raise UserError(
            f"train_batch_size {batch} is not a multiple of {factors} = {unit}; nearest valid train_batch_size: "
            + " or ".join(map(str, nearest))
        )
    return batch, micro, accumulation


def resolve(config: dict, *, world_size: int, total_steps: int | None = None, hidden_size: int | None = None) -> dict:
    """The configuration as DeepSpeed shall see it: batch sizes filled in, "auto" resolved, one learning rate.

    Args:
        config: the DeepSpeed configuration as the user wrote it; it is not changed.
        world_size: number of data-parallel ranks.
        total_steps: optimizer steps of the run, for a schedule's length of "auto".
        hidden_size: of the model, for "auto" bucket sizes.

    Raises:
        UserError: an "auto" whose value nobody knows, batch sizes that do not divide, two learning rates.
    """
    config = copy.deepcopy(config)
    config.update(zip(BATCH_KEYS, resolve_batch_sizes(config, world_size), strict=True))
    resolve_name(config)
    _resolve_ours(config, config["train_batch_size"], total_steps)
    _fill_auto(config, total_steps, hidden_size)
    _unify_learning_rate(config)
    return config


def resolve_rates(config: dict, *, world_size: int) -> dict:
    """The configuration with what the section "ds_bert" says of learning rates carried out, and nothing else changed.

    Args:
        config: a DeepSpeed configuration; it is not changed.
        world_size: number of data-parallel ranks.

    Raises:
        UserError: see `resolve`.
    """
    section, config = parse_section(config), copy.deepcopy(config)
    if section.lr_scaling or section.schedule:
        batch_size, *_ = resolve_batch_sizes(config, world_size)
        _resolve_ours(config, batch_size, None)
        _unify_learning_rate(config)
    return config


def _resolve_ours(config: dict, batch_size: int, total_steps: int | None) -> None:
    """Carry out `lr_scaling` of the section "ds_bert", which is gone then, and give `schedule` its length. In place."""
    section = parse_section(config)
    if section.lr_scaling:
        del config[SECTION]["lr_scaling"]
        log.info(scale_learning_rate(config, section.lr_scaling, batch_size))
    if not section.schedule:
        return
    schedule = config[SECTION]["schedule"]
    if config.get("scheduler"):
        raise UserError(f"two schedules: scheduler.type is {config['scheduler'].get('type')} and {SCHEDULE} is given")
    if schedule.get("total_steps", "auto") == "auto":
        if total_steps is None:
            raise UserError(f'{SCHEDULE}.total_steps: "auto" is known to ds-bert pretrain only; write a number')
        schedule["total_steps"] = total_steps
    peak, end = _learning_rate(config), parse_section(config).schedule.end_lr
    if peak is None:
        raise UserError("no learning rate: write optimizer.params.lr")
    if end > peak:
        raise UserError(f"{SCHEDULE}.end_lr: {end} is more than the learning rate {peak}")


def _fill_auto(config: dict, total_steps: int | None, hidden_size: int | None) -> None:
    scheduler = config.get("scheduler") or {}
    peak_key = PEAK_KEYS.get(scheduler.get("type"), "warmup_max_lr")
    fill = {
        "optimizer.params.lr": _number(scheduler.get("params", {}).get(peak_key)),
        f"scheduler.params.{peak_key}": _learning_rate(config),
        "scheduler.params.total_num_steps": total_steps,
        "scheduler.params.warmup_min_lr": 0.0,
        "zero_optimization.reduce_bucket_size": hidden_size and hidden_size * hidden_size,
    }
    unknown = []

    def visit(node: dict, path: str) -> None:
        for key, value in list(node.items()):
            here = f"{path}{key}"
            if isinstance(value, dict):
                visit(value, here + ".")
            elif value != "auto":
                continue
            elif here in SAME_DEFAULTS or here.startswith("zero_optimization.stage3_"):
                del node[key]
            elif fill.get(here) is not None:
                node[key] = fill[here]
            else:
                unknown.append(here)

    visit(config, "")
    if unknown:
        raise UserError(
            f'"auto" stands for a value that only the Hugging Face Trainer knows, at: {", ".join(unknown)}; '
            "write the numbers there"
        )


def _learning_rate(config: dict) -> float | None:
    return _number(config.get("optimizer", {}).get("params", {}).get("lr"))


def _number(value: Any) -> Any:
    return None if value == "auto" else value


def _unify_learning_rate(config: dict) -> None:
    """Write the one learning rate given wherever DeepSpeed keeps one (its schedulers ignore the optimizer's)."""
    scheduler = config.get("scheduler") or {}
    peak_key = PEAK_KEYS.get(scheduler.get("type"))
    if peak_key is None or "optimizer" not in config:
        return
    peak, rate = scheduler.setdefault("params", {}).get(peak_key), _learning_rate(config)
    if peak is not None and rate is not None and peak != rate:
        raise UserError(
            f"two learning rates: optimizer.params.lr is {rate} and scheduler.params.{peak_key} is {peak}; "
            f"{scheduler['type']} uses only its own, so remove one of them"
        )
    if peak is None and rate is None:
        raise UserError(f"no learning rate: write optimizer.params.lr (or scheduler.params.{peak_key})")
    scheduler["params"][peak_key] = config["optimizer"].setdefault("params", {})["lr"] = peak if rate is None else rate
