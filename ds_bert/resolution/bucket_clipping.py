"""How the section "bucket_clipping" and DeepSpeed's own keys agree, on plain dictionaries."""

import copy
from typing import Any

from ds_bert.config import BucketClippingConfig
from ds_bert.constants import MIB
from ds_bert.errors import UserError
from ds_bert.resolution.refusals import KEY, check_compatible, model_dtype

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def resolve_bucket_clipping(config: dict, section: BucketClippingConfig) -> tuple[dict, BucketClippingConfig]:
    """Make both sides of the configuration say the same; a default of ours gives way to a DeepSpeed key that is given.

    Args:
        config: a DeepSpeed configuration; it is not changed.
        section: its "bucket_clipping".

    Returns:
        the configuration as DeepSpeed shall see it, and the section as we shall; both as they are if not enabled.

    Raises:
        UserError: two values that differ, no maximum norm, or something that reduces gradients in another way.
    """
    if not section.enabled:
        return config, section
    check_compatible(config)
    maximum = config.get("gradient_clipping", 0)
    if isinstance(maximum, bool) or not isinstance(maximum, int | float) or not 0 < maximum < float("inf"):
        given = f"is {maximum!r}" if "gradient_clipping" in config else "is missing"
        raise UserError(
            f"{KEY}.enabled is true and gradient_clipping {given}; write the maximum norm there, such as "
            '"gradient_clipping": 1.0'
        )
    config = copy.deepcopy(config)
    dtype = _agree(config, "communication_data_type", section, "communication_dtype")
    resolved = {"communication_dtype": dtype}
    if dtype:
        config["communication_data_type"] = dtype
    zero = config.get("zero_optimization", {})
    if zero.get("stage", 0):
        size = BYTES[dtype or model_dtype(config)]
        elements = max(1, int(section.bucket_size_mb * MIB / size))
        given = zero.get("reduce_bucket_size")
        if given is not None and "bucket_size_mb" in section.model_fields_set and int(given) != elements:
            raise UserError(
                f"{KEY}.bucket_size_mb {section.bucket_size_mb:g} is {elements} elements and zero_optimization."
                f"reduce_bucket_size is {given}; remove one of them"
            )
        zero["reduce_bucket_size"] = elements if given is None else int(given)
        overlap = _agree(zero, "overlap_comm", section, "overlap", "zero_optimization.")
        zero["overlap_comm"] = resolved["overlap"] = overlap
        resolved["bucket_size_mb"] = zero["reduce_bucket_size"] * size / MIB
    return config, section.model_copy(update=resolved)


def _agree(theirs: dict, their_key: str, section: BucketClippingConfig, our_key: str, path: str = "") -> Any:
    their, our = theirs.get(their_key), getattr(section, our_key)
    if their is None:
        return our
    if our_key in section.model_fields_set and our is not None and our != their:
        raise UserError(f"{KEY}.{our_key} is {our!r} and {path}{their_key} is {their!r}; remove one of them")
    return their
