"""What the sampler refuses, and how it says so."""

import itertools
import json

import numpy as np
import pytest
import torch

from ds_bert.errors import UserError
from ds_bert.sampling import LengthBalancedBatchSampler, cost_table
from tests.sampling.samplers import samplers

SIZES = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "world_size": 1, "rank": 0}


@pytest.mark.parametrize(
    "lengths",
    [
        [5, 3, 9], (5, 3, 9), np.array([5, 3, 9], dtype=np.int16), torch.tensor([5, 3, 9]), np.array([5, 3, 70000]),
    ],
    ids=["list", "tuple", "array", "tensor", "long"],
)  # fmt: skip
def test_lengths_may_come_as(lengths):
    sampler = LengthBalancedBatchSampler(lengths, **SIZES)
    assert sorted(itertools.chain(*sampler)) == [0, 1, 2]


def test_lengths_may_be_a_memory_map(tmp_path):
    np.save(tmp_path / "lengths.npy", np.arange(1, 8, dtype=np.int32))
    lengths = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    assert len(LengthBalancedBatchSampler(lengths, **SIZES)) == 7


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (np.ones((3, 2), dtype=int), r"one-dimensional row of whole numbers, not shape \(3, 2\) of int64"),
        ([[1, 2], [3]], "not rows of different lengths"),
        ([], r"not shape \(0,\)"),
        ([1.5, 2.0], "of float64"),
        (["a"], r"of <U1"),
        (7, r"not shape \(\) of int64"),
        ([3, 0, 2], "sample 1 has 0 tokens; must be at least 1"),
        (torch.ones(2, 2, dtype=torch.int64), r"not shape \(2, 2\)"),
        (torch.ones(2, dtype=torch.bfloat16), "of float32"),
        ([3, 2**32 + 4], "sample 1 has 4294967300 tokens; at most 16777216 are supported"),
        ([3, 2**80], "lengths: must be"),
    ],
    ids=str,
)
def test_other_lengths_are_refused_with_their_shape(lengths, message):
    with pytest.raises(UserError, match=message):
        LengthBalancedBatchSampler(lengths, **SIZES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "balancd"}, r"ds_bert.sampling.strategy: 'balancd' is not valid; did you mean 'balanced'\?"),
        ({"windw": 3}, r"ds_bert.sampling.windw: unknown key; did you mean 'window'\?"),
        ({"window": 0}, "ds_bert.sampling.window: Input should be greater than or equal to 1"),
        ({"edges": [256, 128]}, r"ds_bert.sampling.edges: must be rising, not \[256, 128\]"),
        ({"edges": [128], "strata": 4}, "edges and strata: give one of them"),
        ({"strategy": "random", "equal_counts": False}, "equal_counts: false: only the strategy 'balanced' can"),
        ({"strategy": "stratified", "max_tokens_per_micro_batch": 9}, "max_tokens_per_micro_batch: only the strategy"),
        ({"max_tokens_per_micro_batch": 8}, "8 is less than the longest sample, which has 9 tokens; write 9 or more"),
        ({"cost_model": "no/such/file"}, "cost_model: no/such/file: No such file or directory; write tokens, flops"),
        ({"micro_batch_size": 0}, "micro_batch_size: must be a whole number of at least 1, not 0"),
        ({"world_size": 2.0}, "world_size: must be a whole number"),
        ({"rank": 1}, "rank: must be below the world size of 1, not 1"),
        ({"seed": -1}, "seed: must be a whole number of at least 0"),
        ({"micro_batch_size": 4}, r"hold 3 samples, less than one global batch of 4 \(micro-batch 4 x accumulation 1"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_bad_options_are_named(options, message):
    with pytest.raises(UserError, match=message):
        LengthBalancedBatchSampler([5, 3, 9], **{**SIZES, **options})


def test_a_budget_that_the_data_cannot_fill_is_refused():
    with pytest.raises(UserError, match="hold 17 tokens, too few for one step of 1 micro-batches of up to 100 tokens"):
        LengthBalancedBatchSampler([5, 3, 9], **SIZES, max_tokens_per_micro_batch=100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 31}, "num_samples: 30 there, 31 now; lengths:"),
        ({"seed": 4}, "seed: 0 there, 4 now"),
        ({"strategy": "stratified"}, "strategy: 'balanced' there, 'stratified' now"),
        ({"cost_model": "tokens"}, "costs:"),
    ],
    ids=str,
)
def test_a_state_of_other_data_or_settings_is_refused(change, message):
    state = samplers(30, 2, 1, 1)[0].state_dict(2)
    with pytest.raises(UserError, match="^the saved data position belongs to other data or settings: .*" + message):
        samplers(**{"n": 30, "micro": 2, "accumulation": 1, "world_size": 1, **change})[0].load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"version": 1, "epoch": 0}, None], ids=str)
def test_a_foreign_state_is_refused(state):
    with pytest.raises(UserError, match="not of version 2"):
        samplers(30, 2, 1, 1)[0].load_state_dict(state)


@pytest.mark.parametrize("damage", [{"identity": 3}, {"segments": []}, {"segments": [{}]}, {"carried": "x"}], ids=str)
def test_a_damaged_state_is_refused(damage):
    sampler = samplers(30, 2, 1, 1)[0]
    with pytest.raises(UserError, match="the saved data position is damaged"):
        sampler.load_state_dict({**sampler.state_dict(2), **damage})


def test_a_state_survives_json_whatever_integers_the_sampler_was_given():
    sizes = {name: np.int64(value) for name, value in SIZES.items()}
    sampler = LengthBalancedBatchSampler([5, 3, 9], **sizes, seed=np.int64(1), packed=np.bool_(False))
    sampler.set_epoch(np.int64(2))
    assert json.loads(json.dumps(sampler.state_dict(np.int64(2))))["segments"][0]["samples_consumed"] == 2
    with pytest.raises(UserError, match="micro_steps_consumed: must be a whole number"):
        sampler.state_dict(1.5)


def test_a_count_beyond_the_epoch_is_refused():
    sampler = samplers(30, 2, 1, 1)[0]
    with pytest.raises(UserError, match="from 0 to the 15 that were left, not 16"):
        sampler.state_dict(16)


@pytest.mark.parametrize(
    "content", ["{}", "no json", '{"seconds_per_token": "a", "seconds_per_token_squared": 1}', "3"]
)
def test_a_cost_table_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "cost.json").write_text(content)
    with pytest.raises(UserError, match=r"cost.json is no cost table; make one with `ds-bert balance --measure FILE`"):
        cost_table(str(tmp_path / "cost.json"), 10, hidden_size=768)


def test_cost_models_by_hand(tmp_path):
    assert cost_table("tokens", 3, hidden_size=768).tolist() == [0, 1, 2, 3]
    assert cost_table("flops", 2, hidden_size=2).tolist() == [0, 1 + 1 / 12, 2 + 4 / 12]
    (tmp_path / "cost.json").write_text('{"seconds_per_token": 0.5, "seconds_per_token_squared": 0.25}')
    assert cost_table(str(tmp_path / "cost.json"), 2, hidden_size=768).tolist() == [0, 0.75, 2]
    (tmp_path / "cost.json").write_text('{"seconds_per_token": -1, "seconds_per_token_squared": 0.25}')
    with pytest.raises(UserError, match="must be finite, at least 0"):
        cost_table(str(tmp_path / "cost.json"), 2, hidden_size=768)
    (tmp_path / "cost.json").write_text('{"seconds_per_token": 1e308, "seconds_per_token_squared": 0}')
    with pytest.raises(UserError, match="a sample of 2 tokens costs too much"):
        cost_table(str(tmp_path / "cost.json"), 2, hidden_size=768)
