"""How the strategies fill batches, against references written plainly here."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bert.sampling import LengthBalancedBatchSampler
from ds_bert.sampling.deal import deal_equal_counts, deal_free_counts
from tests.sampling.samplers import samplers, sizes, some_lengths

costs = st.integers(1, 12).flatmap(
    lambda bins: st.tuples(
        st.just(bins),
        st.lists(st.integers(1, 1 << 20), min_size=bins, max_size=6 * bins).map(lambda c: sorted(c, reverse=True)),
    )
)


@given(costs)
def test_free_counts_go_to_the_least_loaded_bin_longest_first(case):
    num_bins, falling = case
    loads, expected = [0] * num_bins, []
    for cost in falling:
        expected.append(loads.index(min(loads)))
        loads[expected[-1]] += cost
    bins = deal_free_counts(np.array(falling, dtype=np.int64), num_bins)
    assert set(bins) == set(range(num_bins))
    if num_bins < 8:  # from there on several items are dealt at once
        assert bins.tolist() == expected
    dealt = np.bincount(bins, weights=falling)
    assert dealt.max() <= max(loads) + falling[-1] + falling[0] / 8


@given(costs)
def test_equal_counts_give_each_round_to_the_bins_with_the_least_first(case):
    num_bins, falling = case
    falling = falling[: len(falling) // num_bins * num_bins]
    loads, expected = [0] * num_bins, [[] for _ in range(num_bins)]
    for first in range(0, len(falling), num_bins):
        order = sorted(range(num_bins), key=lambda b: (loads[b], b))
        for item, number in enumerate(order, first):
            loads[number] += falling[item]
            expected[number].append(item)
    assert deal_equal_counts(np.array(falling, dtype=np.int64), num_bins).tolist() == expected


def work_of_ranks(sampler, cost):
    """(steps, ranks)"""
    lengths, ranks = sampler.lengths.of_sample, sampler.sizes.world_size
    result = []
    for step in range(sampler.steps_per_epoch):
        plan = sampler.step_plan(step)
        work = [cost(lengths[plan.samples[a:b]].astype(float)) for a, b in itertools.pairwise(plan.bounds)]
        result.append(np.reshape(work, (-1, ranks)).sum(axis=0))
    return np.array(result)


def test_balanced_gives_all_ranks_the_same_work_packed():
    def flops(n):
        return (n + n * n / (6 * 768)).sum()

    worst = {}
    for strategy, packed, accumulation in itertools.product(("random", "balanced"), (False, True), (1, 4)):
        sampler = samplers(8000, 16, accumulation, 8, strategy=strategy, packed=packed)[0]
        work = work_of_ranks(sampler, flops)
        worst[strategy, packed, accumulation] = (work.max(axis=1) / work.mean(axis=1)).max()
    assert worst["balanced", False, 1] < 1.01
    assert worst["balanced", True, 1] < 1.01
    assert worst["balanced", True, 4] < 1.002
    assert worst["random", True, 1] > 1.15


def test_balanced_with_accumulation_needs_little_padding_and_all_ranks_the_same_time():
    def padded(n):
        return len(n) * (n.max() + n.max() ** 2 / (6 * 768))

    def ideal(n):
        return (n + n * n / (6 * 768)).sum()

    sampler = samplers(20_000, 8, 16, 8, strategy="balanced")[0]
    time_over_ideal = work_of_ranks(sampler, padded).max(axis=1) / work_of_ranks(sampler, ideal).mean(axis=1)
    assert time_over_ideal.mean() < 1.02
    # Like lengths at the same micro-step on all ranks.
    plan = sampler.step_plan(0)
    longest = np.maximum.reduceat(sampler.lengths.of_sample[plan.samples], plan.bounds[:-1]).reshape(16, 8)
    assert (np.ptp(longest, axis=1) < 60).all()
    assert np.ptp(longest) > 300


def test_packed_micro_batches_all_cost_the_same():
    sampler = samplers(8000, 8, 4, 4, strategy="balanced", packed=True)[0]
    plan = sampler.step_plan(3)
    tokens = np.add.reduceat(sampler.lengths.of_sample[plan.samples].astype(int), plan.bounds[:-1])
    assert tokens.max() / tokens.mean() < 1.05


@given(sizes, st.sampled_from([{}, {"strata": 3}, {"strata": 16}, {"edges": [100, 200]}]))
@settings(max_examples=60)
def test_every_micro_batch_takes_its_share_of_every_stratum(sizes, options):
    n, micro, accumulation, world_size = sizes
    sampler = samplers(n, micro, accumulation, world_size, strategy="stratified", **options)[0]
    lengths = sampler.lengths.of_sample.astype(int)
    used = np.concatenate([sampler.global_batch(step) for step in range(sampler.steps_per_epoch)])
    ordered = np.sort(lengths[used])
    if "strata" in options:
        ends = [round(k * len(used) / options["strata"] / world_size) * world_size for k in range(1, options["strata"])]
    else:
        edges = options.get("edges", [128, 256, 384, 512])
        ends = [round((ordered <= edge).sum() / world_size) * world_size for edge in edges]
    bounds = sorted({0, *ends, len(used)})
    micro_steps = sampler.steps_per_epoch * accumulation
    # Samples of one length can lie on both sides of a bound; so compare counts up to each bound's length.
    for step in range(sampler.steps_per_epoch):
        plan = sampler.step_plan(step)
        for micro_step in range(accumulation):
            done = step * accumulation + micro_step + 1
            parts = [
                lengths[plan.samples[plan.bounds[g * world_size] : plan.bounds[(g + 1) * world_size]]]
                for g in range(micro_step + 1)
            ]
            so_far = np.concatenate(
                [lengths[sampler.global_batch(s)] for s in range(step)] + [part.ravel() for part in parts]
            )
            for bound in bounds[1:-1]:
                below, above = ordered[bound - 1], ordered[bound]
                # At least what lies surely below, at most what may lie below, each within the strata's rounding.
                slack = world_size * (1 + len(bounds) / 2)
                assert (so_far < below).sum() <= bound * done / micro_steps + slack
                assert (so_far <= above).sum() >= bound * done / micro_steps - slack


def test_the_papers_quotas():
    # 6 : 3 : 2 : 5 of 16 samples, as in the record run.
    lengths = np.repeat([100, 200, 300, 500], [600, 300, 200, 500])
    sampler = LengthBalancedBatchSampler(
        lengths, micro_batch_size=16, gradient_accumulation_steps=1, world_size=4, rank=1, strategy="stratified"
    )
    for batch in sampler:
        assert np.unique(lengths[batch], return_counts=True)[1].tolist() == [6, 3, 2, 5]


def test_local_sort_pads_least_and_lets_ranks_run_like_lengths_together():
    by_scope = {}
    for scope in ("rank", "world"):
        ranks = samplers(4096, 4, 1, 4, strategy="local_sort", window_scope=scope, window=32)
        batches = [[ranks[0].lengths.of_sample[batch] for batch in rank] for rank in ranks]
        padding = [1 - b.mean() / b.max() for rank in batches for b in rank]
        spread = [np.ptp([b.max() for b in together]) for together in zip(*batches, strict=True)]
        by_scope[scope] = np.mean(padding), np.mean(spread)
    drawn = samplers(4096, 4, 1, 4, strategy="random")
    random_padding = np.mean([1 - b.mean() / b.max() for r in drawn for b in (some_lengths(4096)[i] for i in r)])
    assert by_scope["world"][0] < by_scope["rank"][0] < 0.1 < 0.3 < random_padding
    assert by_scope["world"][1] < by_scope["rank"][1] < 80


def test_local_sort_shuffles_the_micro_steps_of_a_window_alike_on_all_ranks():
    ranks = samplers(4096, 4, 1, 2, strategy="local_sort", window=64)
    longest = [[ranks[0].lengths.of_sample[batch].max() for batch in itertools.islice(r, 64)] for r in ranks]
    places = [np.argsort(np.argsort(lengths, kind="stable")) for lengths in longest]
    assert np.corrcoef(places[0], places[1])[0, 1] > 0.95
    assert abs(np.corrcoef(places[0], np.arange(64))[0, 1]) < 0.4


def test_local_sort_shards_are_disjoint_windows_of_the_drawn_order():
    ranks = samplers(640, 2, 1, 2, strategy="local_sort", window=8)
    drawn = samplers(640, 2, 1, 2, strategy="random")[0]
    first_window = np.concatenate([drawn.global_batch(step) for step in range(8)])
    for number, rank in enumerate(ranks):
        mine = sorted(i for batch in itertools.islice(rank, 8) for i in batch)
        assert mine == sorted(first_window[number * 16 : (number + 1) * 16])


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_token_budget_is_filled_and_never_exceeded(accumulation):
    budget = 2048
    sampler = samplers(3000, 4, accumulation, 8, max_tokens_per_micro_batch=budget)[0]
    lengths, filled, counts = sampler.lengths.of_sample.astype(int), [], []
    order = samplers(3000, 1, 1, 1, strategy="random")[0].global_batch
    start = 0
    for step in range(sampler.steps_per_epoch):
        plan = sampler.step_plan(step)
        tokens = np.add.reduceat(lengths[plan.samples], plan.bounds[:-1])
        assert tokens.max() <= budget
        assert len(tokens) == 8 * accumulation
        filled.append(tokens.mean() / budget)
        counts.append(len(plan.samples))
        # The step is the next run of the drawn order.
        assert sorted(plan.samples) == sorted(int(order(i)[0]) for i in range(start, start + counts[-1]))
        start += counts[-1]
    assert np.mean(filled) > 0.96
    assert len(set(counts)) > 1


def test_free_counts_beat_equal_ones():
    rng = np.random.default_rng(0)
    lengths = np.where(rng.random(8000) < 0.25, 512, rng.integers(20, 300, 8000))
    spread = {}
    for equal in (True, False):
        sampler = LengthBalancedBatchSampler(
            lengths, micro_batch_size=4, gradient_accumulation_steps=1, world_size=64, rank=0, equal_counts=equal
        )
        work = work_of_ranks(sampler, np.sum)
        spread[equal] = (work.max(axis=1) / work.mean(axis=1)).mean()
    assert spread[False] < 1.05 < spread[True]


@pytest.mark.parametrize(
    "options",
    [{}, {"packed": True}, {"equal_counts": False}, {"gradient_accumulation_steps": 4}],
    ids=["equal counts", "packed", "free counts", "accumulation"],
)
def test_no_rank_always_has_the_longest_sample(options):
    sizes = {"micro_batch_size": 4, "gradient_accumulation_steps": 1, "world_size": 4, **options}
    lengths = np.random.default_rng(0).permutation(np.arange(1, 4001))
    sampler = LengthBalancedBatchSampler(lengths, **sizes, rank=0)
    ranks = []
    for step in range(40):
        plan = sampler.step_plan(step)
        longest = int(np.argmax(lengths[plan.samples]))
        ranks.append((np.searchsorted(plan.bounds, longest, side="right") - 1) % 4)
    assert np.bincount(ranks, minlength=4).min() >= 4
