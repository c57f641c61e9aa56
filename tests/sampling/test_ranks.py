"""Real ranks: the sampler compares them once, before the first batch."""

import pytest

from ds_bert.errors import UserError
from ds_bert.sampling import LengthBalancedBatchSampler


def first_batch(per_rank: list[dict]) -> list[int] | str:
    import torch.distributed as dist

    options = {"lengths": [5, 3, 9, 1], "micro_batch_size": 1, "gradient_accumulation_steps": 1, "world_size": 2}
    sampler = LengthBalancedBatchSampler(**{**options, "rank": dist.get_rank(), **per_rank[dist.get_rank()]})
    try:
        return next(iter(sampler))
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    ("per_rank", "message"),
    [
        ([{}, {"lengths": [5, 3, 9, 2]}], "differ in lengths"),
        ([{}, {"lengths": [5, 3, 9, 1, 1]}], "differ in num_samples: 4 on rank 0, 5 on rank 1"),
        ([{}, {"seed": 1}], "differ in seed: 0 on rank 0, 1 on rank 1; give every rank the same lengths and settings"),
        ([{}, {"strategy": "random"}], "differ in strategy: 'balanced' on rank 0, 'random' on rank 1"),
        ([{}, {"gradient_accumulation_steps": 2}], "differ in gradient_accumulation_steps: 1 on rank 0, 2 on rank 1"),
        ([{}, {"cost_model": "tokens"}], "differ in costs"),
        ([{"rank": 1}, {"rank": 1}], r"made for the ranks \[1, 1\]"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_ranks_that_differ_stop_with_the_same_message(rank_pool, per_rank, message):
    first, second = rank_pool(2).run(first_batch, per_rank)
    assert first == second
    assert message.replace("\\", "") in first


def load_on_rank_1_only() -> str:
    import torch.distributed as dist

    sizes = {"micro_batch_size": 1, "gradient_accumulation_steps": 1}
    before = LengthBalancedBatchSampler(range(1, 9), **sizes, world_size=4, rank=0).state_dict(1)
    sampler = LengthBalancedBatchSampler(range(1, 9), **sizes, world_size=2, rank=dist.get_rank())
    if dist.get_rank() == 1:
        sampler.load_state_dict(before)
    with pytest.raises(UserError) as caught:
        next(iter(sampler))
    return str(caught.value)


def test_a_position_loaded_on_one_rank_only_is_found(rank_pool):
    assert "differ in segments" in rank_pool(2).run(load_on_rank_1_only)[0]


def test_equal_ranks_go_on_and_a_sampler_for_other_sizes_compares_nothing(rank_pool):
    first, second = rank_pool(2).run(first_batch, [{}, {}])
    assert len(first) == len(second) == 1
    assert first != second
    # World size 3 in a group of two: simulated ranks, of which each process may hold any.
    alone = rank_pool(2).run(first_batch, [{"world_size": 3, "rank": 0}, {"world_size": 3, "rank": 0, "seed": 1}])
    assert all(len(batch) == 1 for batch in alone)
