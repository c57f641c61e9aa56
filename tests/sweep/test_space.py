"""What `--param PATH=SPEC` means, and what is no SPEC."""

import re

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from ds_bert.errors import UsageError, UserError
from ds_bert.sweep import parse_parameter
from ds_bert.sweep.space import combinations
from ds_bert.sweep.trial_config import check_path, trial_config


@pytest.mark.parametrize(
    ("text", "path", "distribution"),
    [
        ("train_batch_size=64,128", "train_batch_size", CategoricalDistribution((64, 128))),
        ("optimizer.params.lr=1e-4,0.1", "optimizer.params.lr", CategoricalDistribution((1e-4, 0.1))),
        ("bf16.enabled=true,false", "bf16.enabled", CategoricalDistribution((True, False))),
        ("optimizer.type=Adam,Lamb", "optimizer.type", CategoricalDistribution(("Adam", "Lamb"))),
        ("gradient_clipping=1.0", "gradient_clipping", CategoricalDistribution((1.0,))),
        ("optimizer.params.lr=log:1e-4..1e-2", "optimizer.params.lr", FloatDistribution(1e-4, 1e-2, log=True)),
        ("optimizer.params.weight_decay=0..0.1", "optimizer.params.weight_decay", FloatDistribution(0, 0.1)),
        ("a=0.25..0.75", "a", FloatDistribution(0.25, 0.75)),
        ("a.b=1..8", "a.b", IntDistribution(1, 8)),
        ("a.b=log:1..8", "a.b", IntDistribution(1, 8, log=True)),
    ],
)
def test_a_specification_is_read(text, path, distribution):
    found = parse_parameter(text)
    assert (found.path, found.distribution) == (path, distribution)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr", "--param lr: write PATH=a,b,c"),
        ("lr=", "write PATH=a,b,c"),
        ("a..b=1", "write PATH=a,b,c"),
        ("a=1,,2", "write PATH=a,b,c"),
        ("a=1,2,1", "1 stands twice"),
        ("a=1..x", "the ends of a range are numbers"),
        ("a=2..1", "a range needs the lower end first"),
        ("a=log:0..1", "a range needs a positive lower end"),
        ("a=true..3", "the ends of a range are numbers"),
    ],
)
def test_what_is_no_specification_is_named(text, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_parameter(text)


def test_every_combination_comes_once():
    parameters = [parse_parameter("a=1,2"), parse_parameter("b=x,y,z")]
    found = combinations(parameters)
    assert len(found) == 6
    assert found[:3] == [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 1, "b": "z"}]


BASE = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 5}},
}  # fmt: skip


def make(values: dict, limit: int | None = None) -> dict:
    return trial_config(BASE, values, world_size=2, micro_batch_limit=limit)


def test_a_swept_rate_is_the_peak_wherever_one_is_kept():
    found = make({"optimizer.params.lr": 0.5})
    assert found["optimizer"]["params"]["lr"] == 0.5
    assert "warmup_max_lr" not in found["scheduler"]["params"]
    assert BASE["scheduler"]["params"]["warmup_max_lr"] == 1e-3


@pytest.mark.parametrize(("batch", "limit", "micro"), [(64, 4, 4), (64, None, 32), (24, 5, 4), (2, 8, 1), (14, 4, 1)])
def test_a_swept_batch_frees_micro_batch_and_accumulation(batch, limit, micro):
    found = make({"train_batch_size": batch}, limit)
    assert found["train_micro_batch_size_per_gpu"] == micro
    assert "gradient_accumulation_steps" not in found


def test_a_swept_micro_batch_stays():
    found = make({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2})
    assert (found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == (2, 1)


def test_new_keys_and_wrong_ones():
    assert make({"ds_bert.lr_scaling.rule": "sqrt"})["ds_bert"] == {"lr_scaling": {"rule": "sqrt"}}
    with pytest.raises(UserError, match="train_batch_size is 8, which holds no keys"):
        make({"train_batch_size.x": 1})
    with pytest.raises(UserError, match="train_batch_size: 7 is no positive multiple of the 2 ranks"):
        make({"train_batch_size": 7})
    with pytest.raises(UserError, match="'optimiser' is no key of the configuration; did you mean 'optimizer'"):
        check_path("optimiser.params.lr", BASE)
    check_path("gradient_clipping", BASE)
