"""What a sample costs to train on, by its length alone."""

import json
from pathlib import Path

import numpy as np

from ds_bert.errors import UserError

# The largest cost as an integer: loads are added as integers, so that every rank, on whatever processor, deals alike.
COST_UNITS = 1 << 20


def cost_table(cost_model: str, max_length: int, *, hidden_size: int) -> np.ndarray:
    """The relative cost of a sample of each length.

    Args:
        cost_model: "tokens": n. "flops": n + n^2 / (6 hidden_size), a transformer layer's multiplications divided by
            those it needs for one token outside of attention. Else a file that `ds-bert balance --measure` wrote.
        max_length: tokens of the longest sample.
        hidden_size: of the model, for "flops".

    Returns:
        (max_length + 1,) float64, never falling; entry 0 is 0.

    Raises:
        UserError: the file cannot be read or makes a longer sample cheaper than a shorter one.
    """
    n = np.arange(max_length + 1, dtype=np.float64)
    if cost_model == "tokens":
        return n
    if cost_model == "flops":
        return n + n * n / (6 * hidden_size)
    seconds_per_token, seconds_per_token_squared = _read_measured(Path(cost_model))
    with np.errstate(over="ignore"):
        table = seconds_per_token * n + seconds_per_token_squared * n * n
    if not np.isfinite(table).all():
        raise UserError(f"ds_bert.sampling.cost_model: {cost_model}: a sample of {max_length} tokens costs too much")
    return table


def cost_units(table: np.ndarray) -> np.ndarray:
    """A cost table in whole units of 1/2^20 of its largest entry: int64, at least 1 for every length above 0."""
    units = np.rint(table * (COST_UNITS / table[-1])).astype(np.int64)
    units[1:] = np.maximum(units[1:], 1)
    return units


def _read_measured(path: Path) -> tuple[float, float]:
    what = f"ds_bert.sampling.cost_model: {path}"
    try:
        measured = json.loads(path.read_text(encoding="utf-8"))
        linear, square = (float(measured[key]) for key in ("seconds_per_token", "seconds_per_token_squared"))
    except OSError as error:
        raise UserError(
            f"{what}: {error.strerror}; write tokens, flops, or a file from `ds-bert balance --measure`"
        ) from None
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{what} is no cost table; make one with `ds-bert balance --measure FILE`") from None
    if not (linear >= 0 and square >= 0 and 0 < linear + square < np.inf):
        raise UserError(f"{what}: seconds must be finite, at least 0, and not both 0, not {linear} and {square}")
    return linear, square
