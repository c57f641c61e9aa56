"""Samplers of all ranks, and every strategy with the settings that change what it does."""

import numpy as np
from hypothesis import strategies as st

from ds_bert.sampling import LengthBalancedBatchSampler

# One tuple a way to fill batches: name, options.
WAYS = {
    "random": {"strategy": "random"},
    "local_sort": {"strategy": "local_sort"},
    "local_sort-window": {"strategy": "local_sort", "window": 3},
    "local_sort-world": {"strategy": "local_sort", "window": 5, "window_scope": "world"},
    "stratified": {"strategy": "stratified"},
    "stratified-strata": {"strategy": "stratified", "strata": 5},
    "balanced": {"strategy": "balanced"},
    "balanced-packed": {"strategy": "balanced", "packed": True},
    "balanced-free": {"strategy": "balanced", "equal_counts": False},
    "balanced-budget": {"strategy": "balanced", "max_tokens_per_micro_batch": 600},
}
SAME_GLOBAL_BATCHES = ("random", "balanced", "balanced-packed", "balanced-free")


def some_lengths(n: int) -> np.ndarray:
    """n lengths with many equal ones, a fifth of them the maximum, as real text has."""
    rng = np.random.default_rng(n)
    return np.minimum(rng.integers(1, 640, n), 512)


def samplers(n: int, micro: int, accumulation: int, world_size: int, **options) -> list[LengthBalancedBatchSampler]:
    """One a rank."""
    sizes = {"micro_batch_size": micro, "gradient_accumulation_steps": accumulation, "world_size": world_size}
    lengths = some_lengths(n)
    return [LengthBalancedBatchSampler(lengths, **sizes, rank=rank, **options) for rank in range(world_size)]


def steps_of(ranks: list[LengthBalancedBatchSampler]) -> list[list[int]]:
    """What is left of the epoch: for each optimizer step the samples of all ranks, sorted."""
    accumulation = ranks[0].sizes.gradient_accumulation_steps
    per_rank = [list(sampler) for sampler in ranks]
    assert len({len(batches) for batches in per_rank}) == 1
    return [
        sorted(i for batches in per_rank for batch in batches[first : first + accumulation] for i in batch)
        for first in range(0, len(per_rank[0]), accumulation)
    ]


# n, micro-batch, accumulation, world size; so many samples that the budget above fills a step, too.
sizes = st.tuples(st.integers(1, 300), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)).filter(
    lambda s: s[0] >= 3 * max(s[1], 4) * s[2] * s[3]
)
