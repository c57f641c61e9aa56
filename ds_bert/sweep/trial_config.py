"""The DeepSpeed configuration of one trial."""

import copy
from typing import Any

from ds_bert.config import SECTION
from ds_bert.errors import UserError, did_you_mean
from ds_bert.optim.lr_scaling import PEAK_KEYS
from ds_bert.resolution import BATCH_KEYS

LEARNING_RATE = "optimizer.params.lr"
# The names at the top of a DeepSpeed configuration that training values stand under.
SECTIONS = (
    *BATCH_KEYS, "optimizer", "scheduler", "gradient_clipping", "fp16", "bf16", "torch_autocast", "zero_optimization",
    "communication_data_type", "prescale_gradients", "gradient_predivide_factor", SECTION,
)  # fmt: skip
BATCH, MICRO_BATCH, ACCUMULATION = BATCH_KEYS


def trial_config(base: dict, values: dict[str, Any], *, world_size: int, micro_batch_limit: int | None) -> dict:
    """The base with a trial's values in it.

    A swept `optimizer.params.lr` is the peak: a peak of the scheduler gives way to it. A swept `train_batch_size`
    frees micro-batch and accumulation, unless they are swept, too: the micro-batch is the largest that divides a
    rank's share and is at most the limit.

    Args:
        base: a DeepSpeed configuration; it is not changed.
        values: by path.
        world_size: number of ranks.
        micro_batch_limit: samples; None for no limit.

    Raises:
        UserError: a path leads through something that is no object, or a batch cannot be shared among the ranks.
    """
    config = copy.deepcopy(base)
    for path, value in values.items():
        _put(config, path, value)
    if LEARNING_RATE in values:
        scheduler = config.get("scheduler") or {}
        scheduler.get("params", {}).pop(PEAK_KEYS.get(scheduler.get("type")), None)
    if frees_micro_batch(values):
        batch = values[BATCH]
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1 or batch % world_size:
            raise UserError(f"{BATCH}: {batch!r} is no positive multiple of the {world_size} ranks")
        share = batch // world_size
        limit = min(share, micro_batch_limit or share)
        config[MICRO_BATCH] = next(size for size in range(limit, 0, -1) if share % size == 0)
        config.pop(ACCUMULATION, None)
    return config


def frees_micro_batch(values: dict[str, Any]) -> bool:
    """Whether a trial's micro-batch follows from its batch size."""
    return BATCH in values and not {MICRO_BATCH, ACCUMULATION} & values.keys()


def _put(config: dict, path: str, value: Any) -> None:
    *parents, key = path.split(".")
    node = config
    for depth, name in enumerate(parents):
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise UserError(f"--param {path}: {'.'.join(parents[: depth + 1])} is {node!r}, which holds no keys")
    node[key] = value


def check_path(path: str, base: dict) -> None:
    """Refuse a path whose first name DeepSpeed would silently ignore.

    Args:
        path: of a swept key.
        base: the configuration, all of whose names are good.

    Raises:
        UserError: with the nearest name.
    """
    name, known = path.split(".")[0], {*base, *SECTIONS}
    if name not in known:
        raise UserError(f"--param {path}: {name!r} is no key of the configuration{did_you_mean(name, sorted(known))}")
