"""`ds_bert.initialize`: `deepspeed.initialize` with the "ds_bert" section of the configuration checked."""

import functools
import inspect
from typing import Any

import deepspeed

from ds_bert.config import SECTION, parse_section, read_json


@functools.wraps(deepspeed.initialize)
def initialize(*args: Any, **kwargs: Any) -> tuple:
    """Same arguments and same four results as `deepspeed.initialize`.

    Reads the "ds_bert" section of the DeepSpeed configuration. Without that section this is `deepspeed.initialize`,
    bit for bit.

    Args:
        args, model, optimizer, ...: see `deepspeed.initialize`. The configuration may come as a dictionary or a path
            (`config`, `config_params`) or through `args.deepspeed_config`.

    Returns:
        engine, optimizer, training dataloader, learning-rate scheduler.

    Raises:
        UserError: an unknown key in the section (with its path and the nearest valid one), or a bad value.
    """
    given = inspect.signature(deepspeed.initialize).bind_partial(*args, **kwargs).arguments
    config = given.get("config") or given.get("config_params") or getattr(given.get("args"), "deepspeed_config", None)
    source = ""
    if isinstance(config, str) and config.endswith(".json"):
        source, config = config, read_json(config)
    if isinstance(config, dict) and SECTION in config:
        parse_section(config, source)
    return deepspeed.initialize(*args, **kwargs)
