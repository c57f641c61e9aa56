"""How the section "bucket_clipping" and DeepSpeed's own keys agree, on plain dictionaries."""

import copy
from typing import Any

from ds_bert.config import MIB, BucketClippingConfig
from ds_bert.errors import UserError

KEY = "ds_bert.bucket_clipping"

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

# They send gradients in a compressed form of their own.
COMPRESSING_OPTIMIZERS = {"onebitadam", "onebitlamb", "zerooneadam"}


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
        size = BYTES[dtype or _model_dtype(config)]
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


def _model_dtype(config: dict) -> str:
    return next((name for name in ("fp16", "bf16") if config.get(name, {}).get("enabled")), "fp32")


def check_compatible(config: dict) -> None:
    """Refuse what reduces gradients in a way that cannot be clipped by bucket.

    Raises:
        UserError: names the key.
    """
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    optimizer = str((config.get("optimizer") or {}).get("type", ""))
    accumulation = (config.get("data_types") or {}).get("grad_accum_dtype")
    autocast = config.get("torch_autocast") or {}
    obstacles = {
        f'"zero_optimization.stage": {stage} (0, 1 and 2 do)': stage not in (0, 1, 2),
        '"zero_optimization.contiguous_gradients": false': stage and zero.get("contiguous_gradients") is False,
        '"zero_optimization.compute_grad_norm": false': stage and zero.get("compute_grad_norm") is False,
        f'"data_types.grad_accum_dtype": "{accumulation}" (another dtype than the parameters\')': (
            accumulation not in (None, _model_dtype(config))
        ),
        f'"optimizer.type": "{optimizer}", which sends gradients itself': (
            optimizer.lower() in COMPRESSING_OPTIMIZERS
        ),
        '"sparse_gradients": true': config.get("sparse_gradients"),
        '"prescale_gradients": true': config.get("prescale_gradients"),
        '"gradient_predivide_factor"': config.get("gradient_predivide_factor", 1.0) != 1.0,
        '"torch_autocast.dtype": "float16"': autocast.get("enabled") and "bfloat16" not in str(autocast.get("dtype")),
        '"amp"': (config.get("amp") or {}).get("enabled"),
        '"compile.deepcompile"': (config.get("compile") or {}).get("deepcompile"),
        '"tensor_parallel"': ((config.get("tensor_parallel") or {}).get("autotp_size") or 0) > 1,
        **{
            f'"zero_optimization.{key}"': stage and zero.get(key)
            for key in ("offload_optimizer", "offload_param", "cpu_offload", "zenflow", "zero_quantized_gradients")
        },
    }  # fmt: skip
    for obstacle, present in obstacles.items():
        if present:
            raise UserError(f"{KEY} does not work together with {obstacle}; remove that, or set {KEY}.enabled to false")
