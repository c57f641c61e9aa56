"""Reading samples' lengths from where people have them."""

import json
from pathlib import Path

import numpy as np

from ds_bert.errors import UserError
from ds_bert.sampling import MAX_SAMPLES

MAX_DIGITS = 18  # of a 64-bit number


def read_lengths(path: str | Path) -> np.ndarray:
    """The length of each sample, in tokens.

    Args:
        path: `.npy`: a one-dimensional array. `.json`: {"counts": [...]}, counts[i] samples of i + 1 tokens, or a list
            of lengths. Anything else: text, one whole number a line.

    Returns:
        (n,) integers; `.npy` as a memory map.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    path = Path(path)
    try:
        if path.suffix == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"--lengths {path}: {error.strerror}") from None
    except (ValueError, EOFError) as error:
        raise UserError(f"--lengths {path}: cannot be read: {error}") from None
    return _from_json(path, text) if path.suffix == ".json" else _from_lines(path, text)


def _from_json(path: Path, text: str) -> np.ndarray:
    try:
        content = json.loads(text)
    except RecursionError:
        raise UserError(f"--lengths {path}: too deeply nested") from None
    except json.JSONDecodeError as error:
        raise UserError(f"--lengths {path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from None
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"--lengths {path}: {error}") from None
    counts = content.get("counts") if isinstance(content, dict) else None
    values = content if counts is None else counts
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise UserError(
            f'--lengths {path}: must be a list of whole numbers, or {{"counts": [...]}} with the number of samples of '
            "1, 2, 3, ... tokens"
        )
    if counts is None:
        try:
            return np.array(values, dtype=np.int64)
        except OverflowError:
            raise UserError(f"--lengths {path}: {max(values)} is no sample's number of tokens") from None
    if sum(counts) > MAX_SAMPLES:
        raise UserError(f"--lengths {path}: {sum(counts)} samples; at most {MAX_SAMPLES} are supported")
    return np.repeat(np.arange(1, len(counts) + 1, dtype=np.uint32), counts)


def _from_lines(path: Path, text: str) -> np.ndarray:
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip() and not (line.strip().isdecimal() and len(line.strip()) <= MAX_DIGITS):
            raise UserError(f"--lengths {path}:{number}: {line.strip()[:40]!r} is no whole number; write one a line")
    return np.array([int(line) for line in lines if line.strip()], dtype=np.int64)
