"""Learning rates scaled with the batch size: the rules, and every place where a configuration keeps a value."""

import copy
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bert.config import LrScalingConfig
from ds_bert.errors import UserError
from ds_bert.optim.lr_scaling import scaled_rate
from ds_bert.resolution import resolve


def config(scaling: dict, *, batch: int = 1024, params: dict | None = None, **more) -> dict:
    optimizer = {"type": "AdamW", "params": params or {}}
    return {"train_batch_size": batch, "optimizer": optimizer, "ds_bert": {"lr_scaling": scaling}, **more}


BASE = {"base_batch_size": 256, "base_lr": 1e-4}


@pytest.mark.parametrize(("rule", "rate"), [("linear", 4e-4), ("sqrt", 2e-4), ("none", 1e-4)])
@pytest.mark.parametrize("scheduler", [None, ("WarmupDecayLR", "warmup_max_lr"), ("OneCycle", "cycle_max_lr")])
def test_the_rate_is_written_wherever_one_is_kept(rule, rate, scheduler):
    given = config({"rule": rule, **BASE})
    if scheduler:
        params = {"total_num_steps": 10, "warmup_num_steps": 2} if scheduler[0] == "WarmupDecayLR" else {}
        given["scheduler"] = {"type": scheduler[0], "params": params}
    before = copy.deepcopy(given)
    resolved = resolve(given, world_size=2).ds_config
    assert given == before
    assert resolved["optimizer"]["params"]["lr"] == pytest.approx(rate, rel=1e-12)
    if scheduler:
        assert resolved["scheduler"]["params"][scheduler[1]] == pytest.approx(rate, rel=1e-12)
    # What is resolved can be given again: nothing is scaled twice.
    assert resolve(resolved, world_size=2).ds_config == resolved


@given(base=st.integers(1, 10**6), batch=st.integers(1, 10**6), rate=st.floats(1e-6, 1.0), steps=st.integers(1, 10**6))
def test_scaling_there_and_back_is_nothing(base, batch, rate, steps):
    for rule in ("linear", "sqrt"):
        there = scaled_rate(LrScalingConfig(rule=rule, base_batch_size=base, base_lr=rate), batch)
        back = scaled_rate(LrScalingConfig(rule=rule, base_batch_size=batch, base_lr=there), base)
        assert back == pytest.approx(rate, rel=1e-9)


def test_the_warm_up_keeps_its_samples():
    scaling = {"rule": "linear", **BASE, "scale_warmup": True}
    params = {"warmup_num_steps": 1000, "total_num_steps": 5000}
    resolved = resolve(config(scaling, scheduler={"type": "WarmupDecayLR", "params": params}), world_size=1).ds_config
    assert resolved["scheduler"]["params"]["warmup_num_steps"] == 250
    given = config(scaling)
    given["ds_bert"]["schedule"] = {"warmup_steps": 1000, "total_steps": 5000}
    assert resolve(given, world_size=1).ds_config["ds_bert"]["schedule"]["warmup_steps"] == 250


def test_adams_constants_follow_the_square_root_rule():
    scaling = {"rule": "sqrt", **BASE, "scale_adam": True}
    params = {"betas": [0.9, 0.98], "eps": 1e-6}
    found = resolve(config(scaling, batch=4 * 256, params=params), world_size=1).ds_config["optimizer"]["params"]
    assert found["betas"] == pytest.approx([0.6, 0.92])
    assert found["eps"] == pytest.approx(5e-7)
    found = resolve(config(scaling, batch=2 * 256), world_size=1).ds_config["optimizer"]["params"]
    assert found["betas"] == pytest.approx([0.8, 0.998])
    assert found["eps"] == pytest.approx(1e-8 / 2**0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            config({"rule": "linear", **BASE}, params={"lr": 1e-3}),
            "two learning rates: optimizer.params.lr is 0.001 and ds_bert.lr_scaling.base_lr is 0.0001",
        ),
        (
            config(
                {"rule": "linear", **BASE},
                scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.002, "warmup_num_steps": 1}},
            ),
            "two learning rates: scheduler.params.warmup_max_lr is 0.002 and ds_bert.lr_scaling.base_lr",
        ),
        (config({"rule": "linear", "base_lr": 1e-4}), "ds_bert.lr_scaling.base_batch_size: the rule 'linear' needs"),
        (config({"rule": "sqrt", "base_batch_size": 4}), "ds_bert.lr_scaling.base_lr: is missing"),
        (config({"base_lr": 1e-4}), "ds_bert.lr_scaling.rule: is missing"),
        (config({"rule": "square", **BASE}), "'square' is not valid; did you mean 'sqrt'? (valid: linear, sqrt, none)"),
        (
            config({"rule": "linear", **BASE, "base": 1}),
            "ds_bert.lr_scaling.base: unknown key; did you mean 'base_lr'?",
        ),
        (config({"rule": "linear", **BASE, "scale_adam": True}), "scale_adam: belongs to the rule 'sqrt'"),
        (config({"rule": "linear", **BASE, "scale_warmup": True}), "scale_warmup: the configuration has no warm-up"),
        (
            config({"rule": "sqrt", **BASE, "scale_adam": True}, batch=256 * 20),
            "scale_adam: betas [0.9, 0.999] at 20 times the batch would be [-1.0, 0.98]; they scale up to 10 times",
        ),
    ],
)
def test_what_cannot_be_scaled_is_named(given, message):
    with pytest.raises(UserError, match=re.escape(message)):
        resolve(given, world_size=1)
