"""What every strategy promises, for any sizes."""

import itertools
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ds_bert.errors import UserError
from tests.sampling.samplers import SAME_GLOBAL_BATCHES, WAYS, samplers, sizes, some_lengths, steps_of

each_way = pytest.mark.parametrize("way", WAYS)


@each_way
@given(sizes, st.integers(0, 3))
@settings(max_examples=40)
def test_every_sample_at_most_once_equal_micro_steps_and_less_than_a_batch_dropped(way, sizes, epoch):
    ranks = samplers(*sizes, **WAYS[way])
    for sampler in ranks:
        sampler.set_epoch(epoch)
    batches = [list(sampler) for sampler in ranks]
    assert {len(b) for b in batches} == {len(sampler) for sampler in ranks}
    assert all(batch for b in batches for batch in b)
    seen = [i for b in batches for batch in b for i in batch]
    assert len(set(seen)) == len(seen) == sizes[0] - ranks[0].num_dropped
    if way != "balanced-budget":
        assert ranks[0].num_dropped < ranks[0].global_batch_size
    if way not in ("balanced-free", "balanced-budget"):
        assert {len(batch) for b in batches for batch in b} == {sizes[1]}


@each_way
def test_a_prime_number_of_samples_on_odd_sizes(way):
    ranks = samplers(1009, 3, 5, 7, **WAYS[way])
    steps = steps_of(ranks)
    assert len(steps) == ranks[0].steps_per_epoch
    assert len(set(itertools.chain(*steps))) == 1009 - ranks[0].num_dropped


@pytest.mark.parametrize("way", SAME_GLOBAL_BATCHES)
@given(st.integers(24, 200), st.sampled_from([(24, 1, 1), (1, 24, 1), (1, 1, 24), (4, 3, 2), (2, 3, 4), (3, 8, 1)]))
@settings(max_examples=30)
def test_the_global_batches_are_those_of_random_however_they_are_split(way, n, split):
    drawn = samplers(n, 6, 2, 2, strategy="random")
    assert steps_of(samplers(n, *split, **WAYS[way])) == steps_of(drawn)


@each_way
def test_the_planned_step_is_what_the_ranks_get(way):
    ranks = samplers(301, 3, 2, 4, **WAYS[way])
    for step, samples in enumerate(steps_of(ranks)):
        assert sorted(ranks[0].global_batch(step)) == samples
        plan = ranks[2].step_plan(step)
        assert len(plan.bounds) == 9
        assert plan.bounds[-1] == len(plan.samples)
    with pytest.raises(IndexError):
        ranks[0].step_plan(ranks[0].steps_per_epoch)


@each_way
def test_the_same_again_and_other_orders_for_other_epochs_and_seeds(way):
    orders = []
    for epoch, seed in ((0, 0), (0, 0), (1, 0), (0, 1), (1, 1)):
        sampler = samplers(200, 2, 2, 2, seed=seed, **WAYS[way])[1]
        sampler.set_epoch(epoch)
        orders.append(str(list(sampler)))
    assert orders[0] == orders[1]
    assert len(set(orders)) == 4


def test_the_order_of_an_epoch_never_changes():
    # Recorded with numpy 2.4: a run must be resumable after an upgrade.
    recorded = {
        "random": [3, 8, 9, 7, 4, 6, 1, 2],
        "balanced": [8, 7, 9, 3, 4, 6, 1, 2],
        "local_sort-window": [8, 9, 1, 4, 3, 7, 6, 2],
        "stratified": [3, 8, 9, 4, 7, 6, 2, 1],
    }
    for way, order in recorded.items():
        ranks = samplers(10, 2, 1, 2, seed=3, **WAYS[way])
        assert [i for batch in zip(*ranks, strict=True) for part in batch for i in part] == order, way


@each_way
@given(sizes, st.integers(0, 2), st.data())
@settings(max_examples=30)
def test_resuming_at_any_micro_step_goes_on_at_the_same_sample(way, sizes, epoch, data):
    sampler = samplers(*sizes, **WAYS[way])[-1]
    sampler.set_epoch(epoch)
    whole = list(sampler)
    done = data.draw(st.integers(0, len(whole)))
    state = json.loads(json.dumps(sampler.state_dict(done)))
    ranks = samplers(*sizes, **WAYS[way])
    for resumed in ranks:
        resumed.load_state_dict(state)
        resumed.set_epoch(epoch)  # does not rewind
    assert len(ranks[-1]) == len(whole) - done
    assert list(ranks[-1]) == whole[done:]
    more = data.draw(st.integers(0, len(whole) - done))
    again = samplers(*sizes, **WAYS[way])[0]
    again.load_state_dict(json.loads(json.dumps(ranks[0].state_dict(more))))
    assert list(again) == list(ranks[0])[more:]
    again.set_epoch(epoch + 1)
    sampler.set_epoch(epoch + 1)
    assert sorted(again.global_batch(0)) == sorted(sampler.global_batch(0))
    assert len(again) == len(sampler)


@each_way
@given(sizes, st.data())
@settings(max_examples=30)
def test_changing_sizes_twice_within_an_epoch_still_yields_every_sample_once(way, sizes, data):
    n, micro, accumulation, world_size = sizes
    seen, state, sizes_now = [], None, (micro, accumulation, world_size)
    for last in (False, False, True):
        ranks = samplers(n, *sizes_now, **WAYS[way])
        if state:
            for sampler in ranks:
                sampler.load_state_dict(state)
        steps = steps_of(ranks)
        done = len(steps) if last else data.draw(st.integers(0, len(steps)))
        seen += itertools.chain(*steps[:done])
        state = json.loads(json.dumps(ranks[-1].state_dict(done * sizes_now[1])))
        assert all(json.loads(json.dumps(s.state_dict(done * sizes_now[1]))) == state for s in ranks)
        if not last:
            sizes_now = data.draw(st.permutations(sizes_now))
    assert len(set(seen)) == len(seen)
    if way != "balanced-budget":
        assert n - len(seen) < ranks[0].global_batch_size


@pytest.mark.parametrize("way", SAME_GLOBAL_BATCHES)
def test_on_another_world_size_the_same_global_batches_follow(way):
    before = samplers(200, 2, 4, 2, **WAYS[way])
    after = samplers(200, 4, 1, 4, **WAYS[way])
    for sampler in after:
        sampler.load_state_dict(before[0].state_dict(5 * 4))
    assert steps_of(after) == steps_of(before)[5:]


@pytest.mark.parametrize("way", ["balanced", "stratified", "balanced-budget"])
def test_a_state_inside_a_step_needs_the_same_sizes(way):
    state = samplers(200, 2, 4, 2, **WAYS[way])[0].state_dict(6)
    with pytest.raises(UserError, match=r"after 2 of the 4 micro-steps .* gradient_accumulation_steps 4 \(here 2\)"):
        samplers(200, 2, 2, 4, **WAYS[way])[0].load_state_dict(state)


@each_way
def test_the_state_counts_what_was_trained_although_workers_ran_ahead(way):
    lengths = some_lengths(120)
    dataset = list(range(120))
    sampler = samplers(120, 2, 2, 2, **WAYS[way])[0]
    expected = list(sampler)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, prefetch_factor=4, collate_fn=list)
    batches = iter(loader)
    assert [next(batches) for _ in range(3)] == expected[:3]
    state = sampler.state_dict(micro_steps_consumed=3)
    resumed = samplers(120, 2, 2, 2, **WAYS[way])[0]
    resumed.load_state_dict(state)
    assert list(DataLoader(dataset, batch_sampler=resumed, num_workers=1, collate_fn=list)) == expected[3:]
    assert len(lengths) == 120


@each_way
def test_without_a_count_the_state_holds_what_was_yielded(way):
    sampler = samplers(120, 2, 2, 2, **WAYS[way])[1]
    batches = iter(sampler)
    taken = [next(batches) for _ in range(5)]
    resumed = samplers(120, 2, 2, 2, **WAYS[way])[1]
    resumed.load_state_dict(sampler.state_dict())
    assert taken + list(resumed) == list(sampler)


@each_way
@given(sizes)
@settings(max_examples=20)
def test_carried_samples_come_in_the_next_epoch_and_none_is_lost(way, sizes):
    n = sizes[0]
    ranks = samplers(*sizes, carry_over=True, **WAYS[way])
    counts, left = np.zeros(n, dtype=int), 0
    for epoch in range(4):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        for batch in itertools.chain(*ranks):
            for index in batch:
                counts[index] += 1
                assert getattr(index, "epoch", epoch) in (epoch - 1, epoch)
        carried = sum(hasattr(i, "epoch") for batch in itertools.chain(*ranks) for i in batch)
        assert carried == left
        left = ranks[0].num_dropped
    assert counts.sum() == 4 * n - left
    assert set(counts) <= {3, 4}
    jumped = samplers(*sizes, carry_over=True, **WAYS[way])[0]
    jumped.set_epoch(3)
    assert list(jumped) == list(ranks[0])
    resumed = samplers(*sizes, carry_over=True, **WAYS[way])[0]
    resumed.load_state_dict(json.loads(json.dumps(ranks[0].state_dict(1))))
    assert list(resumed) == list(ranks[0])[1:]


def test_a_carried_index_survives_a_worker():
    from ds_bert.sampling import CarriedIndex

    index = pickle.loads(pickle.dumps(CarriedIndex(7, 2)))
    assert (index, index.epoch, "abcdefgh"[index]) == (7, 2, "h")
