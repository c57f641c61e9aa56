"""`ds_bert.initialize`: `deepspeed.initialize` plus what the "ds_bert" section of the configuration asks for."""

import copy
import functools
import inspect
import os
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from ds_bert.config import SECTION, parse_section, read_json
from ds_bert.engine.bucket_clipping import attach_to_engine
from ds_bert.errors import UserError
from ds_bert.optim import polynomial_schedule
from ds_bert.resolution.bucket_clipping import resolve_bucket_clipping
from ds_bert.resolution.resolve import resolve_rates

TRACE_FOLDER = "trace"

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}


@functools.wraps(deepspeed.initialize)
def initialize(*args: Any, **kwargs: Any) -> tuple:
    """Same arguments and same four results as `deepspeed.initialize`.

    Reads the "ds_bert" section of the DeepSpeed configuration. Without that section this is `deepspeed.initialize`,
    bit for bit. With `bucket_clipping.enabled` the engine clips and reduces gradients bucket by bucket
    (`ds_bert.reduction`), and its `bucket_clipping` has the figures of each step. `lr_scaling` writes the learning
    rate, and `schedule` gives the engine a schedule of ours (`ds_bert.optim`).

    Args:
        args, model, optimizer, ...: see `deepspeed.initialize`. The configuration may come as a dictionary or a path
            (`config`, `config_params`) or through `args.deepspeed_config`.

    Returns:
        engine, optimizer, training dataloader, learning-rate scheduler.

    Raises:
        UserError: an unknown key in the section (with its path and the nearest valid one), a bad value, or one that
            contradicts a key of DeepSpeed's (both are named).
    """
    given = inspect.signature(deepspeed.initialize).bind_partial(*args, **kwargs).arguments
    config = given.get("config") or given.get("config_params") or getattr(given.get("args"), "deepspeed_config", None)
    source = ""
    if isinstance(config, str) and config.endswith(".json"):
        source, config = config, read_json(config)
    if not isinstance(config, dict) or SECTION not in config:
        return deepspeed.initialize(*args, **kwargs)
    section = parse_section(config, source)
    if not (section.bucket_clipping.enabled or section.lr_scaling or section.schedule):
        return deepspeed.initialize(*args, **kwargs)
    try:
        return _initialize_ours(config, given)
    except UserError as error:
        raise UserError(f"{source}: {error}" if source else str(error)) from None


def _initialize_ours(config: dict, given: dict) -> tuple:
    config = resolve_rates(config, world_size=_world_size())
    section = parse_section(config)
    clipping = section.bucket_clipping
    if section.schedule:
        if given.get("lr_scheduler") is not None:
            raise UserError("two schedules: the argument lr_scheduler and ds_bert.schedule are given")
        given["lr_scheduler"] = functools.partial(polynomial_schedule, schedule=section.schedule)
    if clipping.enabled:
        config, clipping = resolve_bucket_clipping(config, clipping)
    if getattr(given.get("args"), "deepspeed_config", None):
        # DeepSpeed takes one place only, and the file does not say what we resolved.
        given["args"] = copy.copy(given["args"])
        given["args"].deepspeed_config = None
    results = deepspeed.initialize(**{**given, "config": config, "config_params": None})
    if clipping.enabled:
        attach_to_engine(
            results[0],
            threshold=clipping.threshold,
            bucket_size_mb=clipping.bucket_size_mb,
            overlap=clipping.overlap,
            communication_dtype=DTYPES[clipping.communication_dtype],
            trace=TRACE_FOLDER if clipping.trace else None,
        )
    return results


def _world_size() -> int:
    # As deepspeed.initialize, which joins the ranks itself if nobody has, finds it.
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
