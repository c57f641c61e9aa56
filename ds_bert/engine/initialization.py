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
from ds_bert.resolution import Resolved, resolve

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
        model_config = getattr(given.get("model"), "config", None)
        resolved = resolve(
            config,
            world_size=_world_size(given),
            hidden_size=getattr(model_config, "hidden_size", None),
            section=section,
        )
        return initialize_resolved(resolved, given)
    except UserError as error:
        raise UserError(f"{source}: {error}" if source else str(error)) from None


def initialize_resolved(resolved: Resolved, given: dict[str, Any]) -> tuple:
    """`initialize` for a configuration that is resolved already.

    Args:
        resolved: the configuration.
        given: arguments of `deepspeed.initialize` by name.

    Raises:
        UserError: `lr_scheduler` is given although the section has a schedule, or see `attach_to_engine`.
    """
    given, section, clipping = dict(given), resolved.section, resolved.bucket_clipping
    if section.schedule:
        if given.get("lr_scheduler") is not None:
            raise UserError("two schedules: the argument lr_scheduler and ds_bert.schedule are given")
        given["lr_scheduler"] = functools.partial(polynomial_schedule, schedule=section.schedule)
    if getattr(given.get("args"), "deepspeed_config", None):
        # DeepSpeed takes one place only, and the file does not say what we resolved.
        given["args"] = copy.copy(given["args"])
        given["args"].deepspeed_config = None
    results = deepspeed.initialize(**{**given, "config": resolved.ds_config, "config_params": None})
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


def _world_size(given: dict[str, Any]) -> int:
    if given.get("mpu") is not None:
        return given["mpu"].get_data_parallel_world_size()
    # As deepspeed.initialize, which joins the ranks itself if nobody has, finds it.
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
