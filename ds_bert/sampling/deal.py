"""Dealing items of known cost into bins of equal load: the same on every rank, from the costs alone.

A load and the number of its bin share one integer, load << bits | bin: no two are equal, so that a sort gives the same
order whichever algorithm a processor's numpy uses.
"""

import numpy as np

# Items dealt at once, as a share of the bins: on real lengths the loads came out as if dealt one by one.
SHARE_AT_ONCE = 4


def deal_equal_counts(costs: np.ndarray, num_bins: int) -> np.ndarray:
    """Deal rounds of one item a bin, the dearest of a round to the lightest bin.

    Args:
        costs: (rounds x num_bins,) int64, never rising within a round.
        num_bins: number of bins.

    Returns:
        (num_bins, rounds) int64: the items of each bin, as indices into `costs`.
    """
    bits = num_bins.bit_length()
    rounds = costs.reshape(-1, num_bins)
    loads = np.arange(num_bins, dtype=np.int64)
    items = np.empty((num_bins, len(rounds)), dtype=np.int64)
    for number, round_costs in enumerate(rounds):
        loads.sort()
        items[loads & ((1 << bits) - 1), number] = np.arange(number * num_bins, (number + 1) * num_bins)
        loads += round_costs << bits
    return items


def deal_free_counts(costs: np.ndarray, num_bins: int) -> np.ndarray:
    """Deal every item to the bin with the least load, the dearest item first; no bin stays empty.

    Args:
        costs: (N,) int64 with N >= num_bins, never rising.
        num_bins: number of bins.

    Returns:
        (N,) int64: the bin of each item.
    """
    bits = num_bins.bit_length()
    mask = (1 << bits) - 1
    bins = np.empty(len(costs), dtype=np.int64)
    bins[:num_bins] = np.arange(num_bins)
    loads = costs[:num_bins] << bits | bins[:num_bins]
    at_once = max(1, num_bins // SHARE_AT_ONCE)
    for start in range(num_bins, len(costs), at_once):
        here = costs[start : start + at_once]
        lightest = np.sort(np.partition(loads, len(here) - 1)[: len(here)]) & mask
        bins[start : start + at_once] = lightest
        loads[lightest] += here << bits
    return bins
