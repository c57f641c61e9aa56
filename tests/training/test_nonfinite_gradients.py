"""A gradient that is not finite on one rank: all ranks skip that step, and ten in a row end the run."""

import pytest
import torch
import torch.distributed as dist

from tests.runs import metrics_lines, optimizer_tensors, train

PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16 static scale": {"fp16": {"enabled": True, "loss_scale": 128}},
    "fp16 dynamic scale": {"fp16": {"enabled": True, "initial_scale_power": 7, "hysteresis": 1}},
}


def train_with_bad_steps(args, bad_steps: set[int], value: float) -> dict:
    """Run with one gradient of rank 1 spoilt in these steps (counted from 1); the states after each step."""
    from ds_bert.engine import gradient_guard as gradients
    from ds_bert.training import loop

    states = []
    original_init = gradients.GradientGuard.__init__
    original_after = loop.Trainer._evaluate_and_save

    def init(guard, engine) -> None:
        original_init(guard, engine)
        parameter = next(p for name, p in engine.module.named_parameters() if "layer.1" in name)

        def spoil(grad):
            bad = dist.get_rank() == 1 and engine.global_steps + 1 in bad_steps
            return torch.full_like(grad, value) if bad else grad

        parameter.register_hook(spoil)

    def after(trainer, micro_steps_consumed: int) -> None:
        engine = trainer.engine
        weights = torch.cat([p.detach().float().flatten() for p in engine.module.parameters()])
        scaler = getattr(engine.optimizer, "loss_scale_config", None) or getattr(engine.optimizer, "loss_scaler", None)
        states.append((weights, optimizer_tensors(engine), engine.get_lr()[0], getattr(scaler, "cur_scale", 1)))
        original_after(trainer, micro_steps_consumed)

    gradients.GradientGuard.__init__ = init
    loop.Trainer._evaluate_and_save = after
    try:
        result = train(args)
    finally:
        gradients.GradientGuard.__init__ = original_init
        loop.Trainer._evaluate_and_save = original_after
    lines = metrics_lines(args)
    return {
        "states": states,
        "error": result["error"],
        "log": result["log"],
        "lines": [line for line in lines if "loss" in line],
    }


CLIPPING = {"ds_bert": {"bucket_clipping": {"enabled": True, "bucket_size_mb": 0.02}}}


def config(stage: int, **precision) -> dict:
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
        "zero_optimization": {"stage": stage},
        **precision,
    }


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("clipping", [{}, CLIPPING], ids=["plain", "bucket clipping"])
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(rank_pool, run_args, small_model, stage, precision, clipping):
    args = run_args(small_model(0.0), config(stage, **PRECISIONS[precision], **clipping), max_steps=5)
    answers = rank_pool(2).run(train_with_bad_steps, args, {3}, float("nan"))
    for answer in answers:
        assert answer["error"] is None
        before, skipped, after = answer["states"][1:4]
        assert torch.equal(skipped[0], before[0])
        assert all(torch.equal(a, b) for a, b in zip(skipped[1], before[1], strict=True))
        assert skipped[2] == before[2]
        assert not torch.equal(after[0], skipped[0])
        assert torch.isfinite(answer["states"][-1][0]).all()
        assert skipped[3] == before[3] / (2 if "dynamic" in precision else 1)
    lines = answers[0]["lines"]
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1, 1]
    assert lines[2]["grad_norm_before_clip"] is None
    assert all(line["grad_norm_before_clip"] > 0 for line in lines if line["step"] != 3)
    if clipping:
        told = "step 3: the gradient is not finite (rank 1, parameter bert.encoder.layer.1."
        assert told in answers[0]["log"]


@pytest.mark.parametrize(("stage", "clipping"), [(0, {}), (1, {}), (0, CLIPPING), (2, CLIPPING)])
def test_ten_skipped_steps_in_a_row_end_the_run_on_all_ranks(rank_pool, run_args, small_model, stage, clipping):
    args = run_args(small_model(0.0), config(stage, **clipping), max_steps=20, save_interval=1)
    answers = rank_pool(2).run(train_with_bad_steps, args, set(range(3, 20)), float("inf"))
    for answer in answers:
        assert "step 12: 10 steps in a row had a gradient that is not finite" in answer["error"]
        assert len(answer["states"]) == 11
        assert torch.isfinite(answer["states"][-1][0]).all()
    # The step that ends the run is told in the error, not in the metrics.
    assert answers[0]["lines"][-1]["skipped_steps"] == 9


@pytest.mark.parametrize(("stage", "clipping"), [(0, {}), (1, {}), (0, CLIPPING), (1, CLIPPING)])
def test_a_dynamic_scale_at_its_minimum_ends_the_run(rank_pool, run_args, small_model, stage, clipping):
    fp16 = {"enabled": True, "initial_scale_power": 3, "hysteresis": 1, "min_loss_scale": 1}
    args = run_args(small_model(0.0), config(stage, fp16=fp16, **clipping), max_steps=20)
    answers = rank_pool(2).run(train_with_bad_steps, args, set(range(1, 20)), float("inf"))
    for answer in answers:
        # 8, 4, 2 and 1 are tried in steps 1 to 4.
        assert (
            "step 4: the gradient is not finite although the dynamic loss scale is at its minimum of 1"
            in (answer["error"])
        )


def test_skips_that_bring_a_dynamic_scale_down_at_the_start_do_not_count(rank_pool, run_args, small_model):
    fp16 = {"enabled": True, "initial_scale_power": 16, "hysteresis": 1}
    args = run_args(small_model(0.0), config(1, fp16=fp16), max_steps=14)
    answers = rank_pool(2).run(train_with_bad_steps, args, set(range(1, 12)), float("inf"))
    assert all(answer["error"] is None for answer in answers)
    assert answers[0]["lines"][-1]["skipped_steps"] == 11
