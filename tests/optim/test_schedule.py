"""The polynomial schedule against values computed by hand, on an optimizer, and what cannot be one."""

import re

import pytest
import torch

from ds_bert.config import ScheduleConfig, parse_section
from ds_bert.errors import UserError
from ds_bert.optim.schedule import polynomial_schedule, rate_at
from ds_bert.resolution import resolve

SAMSUNG = {"warmup_steps": 82, "start_step": -16, "total_steps": 179, "end_lr": 4.9455e-5}
NVIDIA_4096 = {"warmup_steps": 290, "start_step": -100, "total_steps": 470}


@pytest.mark.parametrize(
    ("schedule", "peak", "values"),
    [
        # Of the published runs, as shares of the peak: the first step, the last of the warm-up, the jump, the end.
        (
            {**SAMSUNG, "continuous": False},
            3.9299e-4,
            {1: 17 / 82, 65: 81 / 82, 66: 0.67762, 179: 0.125843, 250: 0.125843},
        ),
        ({**NVIDIA_4096, "continuous": False}, 3.3e-3, {1: 101 / 290, 189: 289 / 290, 190: 280 / 470, 470: 0, 500: 0}),
        # Continuous: the decay starts at the peak, where the warm-up ends.
        (SAMSUNG, 3.9299e-4, {1: 17 / 82, 65: 81 / 82, 66: 1, 179: 0.125843, 300: 0.125843}),
        ({"warmup_steps": 10, "total_steps": 110}, 1.0, {1: 0.1, 10: 1, 60: 0.5, 110: 0}),
        ({"total_steps": 100}, 1.0, {1: 0.99, 50: 0.5, 100: 0}),
        ({"total_steps": 100, "power": 2.0, "end_lr": 0.2}, 1.0, {50: 0.2 + 0.8 * 0.25, 100: 0.2}),
        # A warm-up that was over before the first step.
        ({"warmup_steps": 5, "start_step": -20, "total_steps": 10}, 1.0, {1: 0.9, 10: 0}),
    ],
)
def test_values_computed_by_hand(schedule, peak, values):
    for step, share in values.items():
        assert rate_at(step, peak, ScheduleConfig(**schedule)) == pytest.approx(share * peak, rel=1e-4, abs=1e-12), step


def test_the_optimizer_has_the_rate_of_the_step_to_come():
    schedule = ScheduleConfig(**SAMSUNG)
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 2e-3}], lr=1e-3)
    scheduler = polynomial_schedule(optimizer, schedule)
    for step in range(1, 200):
        for group, peak in zip(optimizer.param_groups, (1e-3, 2e-3), strict=True):
            assert group["lr"] == pytest.approx(rate_at(step, peak, schedule), rel=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"scheduler": {"type": "WarmupLR", "params": {}}},
            "two schedules: scheduler.type is WarmupLR and ds_bert.sch",
        ),
        (
            {"ds_bert": {"schedule": {"end_lr": 0.5}}},
            "ds_bert.schedule.end_lr: 0.5 is more than the learning rate 0.001",
        ),
        ({"ds_bert": {"schedule": {"warmup_steps": 100}}}, "schedule.total_steps: 70 ends before the warm-up does, at"),
        (
            {"ds_bert": {"schedule": {"start_step": 3}}},
            "ds_bert.schedule.start_step: Input should be less than or equal",
        ),
        ({"ds_bert": {"schedule": {"total_steps": 0}}}, "ds_bert.schedule.total_steps: must be at least 1, not 0"),
        ({"ds_bert": {"schedule": {"type": "cosine"}}}, "'cosine' is not valid (valid: polynomial)"),
        ({"optimizer": {"type": "AdamW", "params": {}}}, "no learning rate: write optimizer.params.lr"),
    ],
)
def test_a_schedule_that_cannot_be_is_named(change, message):
    given = {
        "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "ds_bert": {"schedule": {}},
    }  # fmt: skip
    with pytest.raises(UserError, match=re.escape(message)):
        resolve({**given, **change}, world_size=1, total_steps=70)


def test_the_length_is_that_of_the_run_or_a_number():
    given = {
        "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "ds_bert": {"schedule": {}},
    }  # fmt: skip
    assert parse_section(resolve(given, world_size=1, total_steps=70).ds_config).schedule.total_steps == 70
    with pytest.raises(UserError, match="is known to ds-bert pretrain only; write a number"):
        resolve(given, world_size=1)
