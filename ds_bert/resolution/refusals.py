"""What is refused, and why: settings that would train wrongly, and those that bucket clipping cannot live with.

`ds_bert.initialize` and `ds-bert pretrain` refuse the same.
"""

from ds_bert.config import SECTION
from ds_bert.errors import UserError, did_you_mean

KEY = f"{SECTION}.bucket_clipping"

# They send gradients in a compressed form of their own.
COMPRESSING_OPTIMIZERS = {"onebitadam", "onebitlamb", "zerooneadam"}


def check_supported(ds_config: dict) -> None:
    """Refuse what would train wrongly, or not at all.

    Raises:
        UserError: names the key.
    """
    from deepspeed.accelerator import get_accelerator

    zero = ds_config.get("zero_optimization", {})
    _check_names(ds_config)
    optimizer = str(ds_config.get("optimizer", {}).get("type", ""))
    if zero.get("stage") and "lamb" in optimizer.lower():
        raise UserError(
            f"optimizer.type {optimizer} and zero_optimization.stage {zero['stage']}: ZeRO cuts "
            "layers in pieces, and Lamb's trust ratio is that of a whole layer; use stage 0, or AdamW"
        )
    if zero.get("compute_grad_norm") is False:
        raise UserError(
            "zero_optimization.compute_grad_norm: false takes away the check for non-finite gradients; remove it"
        )
    if ds_config.get("bf16", {}).get("check_grad_overflow") is False:
        raise UserError("bf16.check_grad_overflow: false would let NaN into the weights; remove it")
    autocast = ds_config.get("torch_autocast", {})
    if autocast.get("enabled") and str(autocast.get("dtype", "bfloat16")) not in (
        "bfloat16",
        "torch.bfloat16",
    ):
        raise UserError('torch_autocast.dtype: only "bfloat16" is supported; for fp16 use the section "fp16"')
    if ds_config.get("fp16", {}).get("enabled") and not get_accelerator().is_fp16_supported():
        raise UserError(
            f"fp16.enabled: this device ({get_accelerator().device_name()}) cannot train in fp16; "
            'use "bf16": {"enabled": true} instead'
        )


def _check_names(ds_config: dict) -> None:
    """Refuse an optimizer or a scheduler that neither DeepSpeed nor torch has."""
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    optimizer = ds_config.get("optimizer", {}).get("type")
    torch_optimizers = [name for name, kind in vars(torch.optim).items() if isinstance(kind, type)]
    if optimizer and optimizer.lower() not in DEEPSPEED_OPTIMIZERS and optimizer not in torch_optimizers:
        valid = ["Adam", "AdamW", "Lamb", "Lion", *torch_optimizers]
        raise UserError(f"optimizer.type: {optimizer!r} is not known{did_you_mean(optimizer, valid)}")
    scheduler = ds_config.get("scheduler", {}).get("type")
    if scheduler and scheduler not in VALID_LR_SCHEDULES and not hasattr(torch.optim.lr_scheduler, scheduler):
        hint = did_you_mean(scheduler, VALID_LR_SCHEDULES)
        raise UserError(f"scheduler.type: {scheduler!r} is not known{hint}")


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
            accumulation not in (None, model_dtype(config))
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


def model_dtype(config: dict) -> str:
    """Dtype of the weights that the engine holds: "fp32", "bf16" or "fp16"."""
    return next((name for name in ("fp16", "bf16") if config.get(name, {}).get("enabled")), "fp32")
