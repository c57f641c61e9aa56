"""How much of the maximum norm each bucket gets (docs/clipping.md)."""

import math
from collections.abc import Callable, Sequence

Rule = Callable[[float, Sequence[int]], list[float]]


def proportional(max_norm: float, bucket_elements: Sequence[int]) -> list[float]:
    """A bucket with n of the model's N elements gets max_norm · sqrt(n / N).

    The squares add up to max_norm², so the averaged gradient's norm never exceeds max_norm.
    """
    total = sum(bucket_elements)
    return [max_norm * math.sqrt(elements / total) for elements in bucket_elements]


def equal(max_norm: float, bucket_elements: Sequence[int]) -> list[float]:
    """Each of B buckets gets max_norm / sqrt(B): the same bound, but a small bucket gets as much as a large one.

    The record run of arXiv 2402.02447 did this, with its 22 buckets written into the code.
    """
    return [max_norm / math.sqrt(len(bucket_elements))] * len(bucket_elements)


def uniform(max_norm: float, bucket_elements: Sequence[int]) -> list[float]:
    """Every bucket gets max_norm: no bound on the norm of the whole gradient; for comparison."""
    return [max_norm] * len(bucket_elements)


RULES: dict[str, Rule] = {rule.__name__: rule for rule in (proportional, equal, uniform)}
