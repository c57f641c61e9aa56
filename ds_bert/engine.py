"""`ds_bert.initialize`: `deepspeed.initialize` plus what the "ds_bert" section of the configuration asks for."""

import copy
import functools
import inspect
from typing import Any

import deepspeed
import torch

from ds_bert.config import SECTION, BucketClippingConfig, parse_section, read_json
from ds_bert.errors import UserError
from ds_bert.reduction.configuration import resolve_bucket_clipping
from ds_bert.reduction.engine import attach_to_engine

TRACE_FOLDER = "trace"

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}


@functools.wraps(deepspeed.initialize)
def initialize(*args: Any, **kwargs: Any) -> tuple:
    """Same arguments and same four results as `deepspeed.initialize`.

    Reads the "ds_bert" section of the DeepSpeed configuration. Without that section this is `deepspeed.initialize`,
    bit for bit. With `bucket_clipping.enabled` the engine clips and reduces gradients bucket by bucket
    (`ds_bert.reduction`), and its `bucket_clipping` has the figures of each step.

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
    section = parse_section(config, source).bucket_clipping
    if not section.enabled:
        return deepspeed.initialize(*args, **kwargs)
    try:
        config, section = resolve_bucket_clipping(config, section)
        return _initialize_clipping(config, section, given)
    except UserError as error:
        raise UserError(f"{source}: {error}" if source else str(error)) from None


def _initialize_clipping(config: dict, section: BucketClippingConfig, given: dict) -> tuple:
    if getattr(given.get("args"), "deepspeed_config", None):
        # DeepSpeed takes one place only, and the file does not say what we resolved.
        given["args"] = copy.copy(given["args"])
        given["args"].deepspeed_config = None
    results = deepspeed.initialize(**{**given, "config": config, "config_params": None})
    attach_to_engine(
        results[0],
        threshold=section.threshold,
        bucket_size_mb=section.bucket_size_mb,
        overlap=section.overlap,
        communication_dtype=DTYPES[section.communication_dtype],
        trace=TRACE_FOLDER if section.trace else None,
    )
    return results
