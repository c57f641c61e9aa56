"""A run that dies and goes on gives what an uninterrupted run gives."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.runs import metrics_lines, relative_difference, train

# 206 samples and a global batch of 40 make epochs of 5 steps, so that step 5 is an epoch's last and step 6 the next's
# first.
STEPS = 8
COMPARED = ("step", "loss", "grad_norm_before_clip", "grad_norm_after_clip", "learning_rate", "samples")


def config(stage: int, micro: int = 10, optimizer: str = "AdamW", **more) -> dict:
    return {
        "train_batch_size": 40,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": 1.0,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, "total_num_steps": "auto"}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def metrics(args) -> list[tuple]:
    lines = metrics_lines(args)
    return [tuple(line[key] for key in COMPARED) for line in lines if "loss" in line]


def copy_of(args, run_args, model, ds_config, **options):
    """Options of a run that finds the run folder of `args` in the state it is in."""
    again = run_args(model, ds_config, **options)
    shutil.copytree(args.output, again.output)
    return again


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("saved_at", [3, 5], ids=["within an epoch", "at an epoch's last step"])
def test_resuming_with_dropout_is_bit_for_bit(rank_pool, run_args, small_model, stage, saved_at):
    model, pool = small_model(0.1), rank_pool(2)
    options = {"max_steps": STEPS, "save_interval": saved_at, "eval_interval": 2}
    whole = run_args(model, config(stage), **options)
    expected = pool.run(train, whole)
    crashed = run_args(model, config(stage), **options)
    pool.run(train, crashed, saved_at + 2)
    assert len(metrics(crashed)) == saved_at + 2
    resumed = pool.run(train, crashed)
    assert f"resumed from {crashed.output}/global_step{saved_at} at step {saved_at}" in resumed[0]["log"]
    assert metrics(crashed) == metrics(whole)
    assert [line[0] for line in metrics(crashed)] == list(range(1, STEPS + 1))
    for ours, theirs in zip(resumed, expected, strict=True):
        assert relative_difference(ours["weights"], theirs["weights"]) == 0
        assert all(torch.equal(a, b) for a, b in zip(ours["optimizer"], theirs["optimizer"], strict=True))
        assert ours["optimizer"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"strategy": "local_sort", "window": 3, "carry_over": True},
        {"strategy": "stratified", "strata": 3, "carry_over": True},
        {"max_tokens_per_micro_batch": 300, "carry_over": True},
        {"equal_counts": False},
    ],
    ids=["local_sort", "stratified", "token budget", "free counts"],
)
def test_resuming_is_bit_for_bit_with_every_way_to_fill_batches(rank_pool, run_args, small_model, sampling):
    model, pool = small_model(0.1), rank_pool(2)
    ds_config = config(0, ds_bert={"sampling": sampling})
    whole = run_args(model, ds_config, max_steps=STEPS, save_interval=3)
    expected = pool.run(train, whole)
    crashed = run_args(model, ds_config, max_steps=STEPS, save_interval=3)
    pool.run(train, crashed, 7)
    resumed = pool.run(train, crashed)
    assert "at step 6" in resumed[0]["log"]
    assert metrics(crashed) == metrics(whole)
    assert relative_difference(resumed[1]["weights"], expected[1]["weights"]) == 0


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("saved_at", [1, 3])
def test_resuming_with_bucket_clipping_that_bites_is_bit_for_bit(rank_pool, run_args, small_model, stage, saved_at):
    clipping = {"enabled": True, "bucket_size_mb": 0.01}
    model, pool = small_model(0.1), rank_pool(2)
    ds_config = config(stage, gradient_clipping=0.02, ds_bert={"bucket_clipping": clipping})
    whole = run_args(model, ds_config, max_steps=5, save_interval=saved_at)
    expected = pool.run(train, whole)
    crashed = run_args(model, ds_config, max_steps=5, save_interval=saved_at)
    pool.run(train, crashed, saved_at + 1)
    resumed = pool.run(train, crashed)
    assert f"at step {saved_at}" in resumed[0]["log"]
    assert metrics(crashed) == metrics(whole)
    assert all(line["clipped_share"] > 0.5 for line in metrics_lines(crashed) if "loss" in line)
    for ours, theirs in zip(resumed, expected, strict=True):
        assert relative_difference(ours["weights"], theirs["weights"]) == 0
        assert all(torch.equal(a, b) for a, b in zip(ours["optimizer"], theirs["optimizer"], strict=True))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_resuming_on_2_then_1_then_4_ranks_follows_the_same_samples(rank_pool, run_args, small_model, stage):
    model = small_model(0.0)
    options = {"max_steps": STEPS, "save_interval": 3}
    whole = run_args(model, config(stage), **options)
    rank_pool(2).run(train, whole)
    part = run_args(model, config(stage), **options)
    rank_pool(2).run(train, part, 4)
    on_one = rank_pool(1).run(train, part, 7)
    on_four = rank_pool(4).run(train, part)
    logs = on_one[0]["log"], on_four[0]["log"]
    assert all(("universal checkpoint" in log) == (stage > 0) for log in logs)
    assert "at step 3" in logs[0]
    assert "at step 6" in logs[1]
    assert not list(Path(part.output).glob("*universal*"))
    ours, theirs = metrics(part), metrics(whole)
    assert [line[0] for line in ours] == list(range(1, STEPS + 1))
    for line, expected in zip(ours, theirs, strict=True):
        assert line == pytest.approx(expected, rel=1e-5)


def test_another_split_of_the_global_batch_follows_the_same_samples(rank_pool, run_args, small_model):
    model = small_model(0.0)
    options = {"max_steps": STEPS, "save_interval": 3}
    whole = run_args(model, config(0), **options)
    rank_pool(1).run(train, whole)
    crashed = run_args(model, config(0), **options)
    rank_pool(1).run(train, crashed, 4)
    again = copy_of(crashed, run_args, model, config(0, micro=5), **options)
    rank_pool(1).run(train, again)
    for line, expected in zip(metrics(again), metrics(whole), strict=True):
        assert line == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (0, {"bf16": {"enabled": True}}),
        (1, {"bf16": {"enabled": True}}),
        (0, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
        (2, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    ],
    ids=["bf16 stage 0", "bf16 stage 1", "fp16 stage 0", "fp16 stage 2"],
)
def test_resuming_in_half_precision_is_bit_for_bit(rank_pool, run_args, small_model, stage, precision):
    model, pool = small_model(0.1), rank_pool(2)
    ds_config = config(stage, **precision)
    whole = run_args(model, ds_config, max_steps=5, save_interval=3)
    expected = pool.run(train, whole)
    crashed = run_args(model, ds_config, max_steps=5, save_interval=3)
    pool.run(train, crashed, 4)
    resumed = pool.run(train, crashed)
    assert metrics(crashed) == metrics(whole)
    for ours, theirs in zip(resumed, expected, strict=True):
        assert relative_difference(ours["weights"], theirs["weights"]) == 0
