"""Batch sizes by DeepSpeed's rule: two of the three numbers give the third."""

from ds_bert.errors import UserError

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


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
