"""Arguments of the sampler: what a caller may pass, checked once, as plain values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ds_bert.errors import UserError

MAX_SAMPLES = np.iinfo(np.int32).max // 2  # as many again can be carried over

MAX_LENGTH = 1 << 24  # tokens: the cost table has an entry for each


def whole_number(name: str, value: Any, minimum: int = 0, maximum: int | None = None) -> int:
    """The value as a plain integer: one of numpy's would not survive json.dumps.

    Raises:
        UserError: it is not an integer, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < minimum:
        raise UserError(f"{name}: must be a whole number of at least {minimum}, not {value!r}")
    if maximum is not None and value > maximum:
        raise UserError(f"{name}: must be at most {maximum}, not {value}")
    return int(value)


def as_lengths(lengths: np.ndarray | torch.Tensor | Sequence[int]) -> np.ndarray:
    """The lengths in the smallest unsigned type of at least 16 bits that holds them: (n,).

    Raises:
        UserError: they are not a one-dimensional row of whole numbers of at least 1.
    """
    try:
        if isinstance(lengths, torch.Tensor):
            if lengths.dtype.is_floating_point:
                lengths = lengths.float()  # numpy has no bfloat16; refused below
            lengths = lengths.detach().cpu().numpy()
        array = np.asarray(lengths)
    except (TypeError, ValueError, OverflowError):
        raise UserError("lengths: must be one whole number a sample, not rows of different lengths") from None
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise UserError(
            f"lengths: must be a one-dimensional row of whole numbers, not shape {array.shape} of {array.dtype}"
        )
    smallest, largest = int(array.min()), int(array.max())
    if smallest < 1:
        raise UserError(f"lengths: sample {int(array.argmin())} has {smallest} tokens; must be at least 1")
    if largest > MAX_LENGTH:
        raise UserError(
            f"lengths: sample {int(array.argmax())} has {largest} tokens; at most {MAX_LENGTH} are supported"
        )
    if array.size > MAX_SAMPLES:
        raise UserError(f"lengths: {array.size} samples; at most {MAX_SAMPLES} are supported")
    return array.astype(np.uint16 if largest < 1 << 16 else np.uint32, copy=False)
