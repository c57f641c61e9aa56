"""Averaged gradients equal a plain reference at every stage, precision and accumulation, clipped or not."""

import pytest
import torch
import torch.distributed as dist

from tests.reduction import reference
from tests.runs import relative_difference

STEPS = 5
# Tiny buckets, so that a tiny model has many.
BUCKET_SIZE_MB = 0.004
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "fp16 static scale": {"fp16": {"enabled": True, "loss_scale": 128}},
    "fp16 dynamic scale": {"fp16": {"enabled": True, "initial_scale_power": 7}},
}
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-2, "autocast": 1e-2, "fp16 static scale": 2e-3, "fp16 dynamic scale": 2e-3}


def ds_config(
    stage: int,
    accumulation: int,
    *,
    max_norm: float = 0.3,
    precision: str = "fp32",
    optimizer: dict | None = None,
    **bucket_clipping,
) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": max_norm,
        "optimizer": optimizer or {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "ds_bert": {"bucket_clipping": {"enabled": True, "bucket_size_mb": BUCKET_SIZE_MB, **bucket_clipping}},
        **PRECISIONS[precision],
    }


def gradients_for_optimizer(engine) -> dict[str, torch.Tensor]:
    """The averaged gradient as the optimizer is about to get it, unscaled; at ZeRO 1 and 2 only this rank's part."""
    scale = engine.gradient_guard.loss_scale()
    if engine.zero_optimization():
        mine = [g for g in engine.optimizer.averaged_gradients[0] if not getattr(g, "_zero_padding", False)]
        return {"mine": torch.cat([g.flatten() for g in mine]).double() / scale}
    return {name: p.grad.double() / scale for name, p in engine.module.named_parameters() if p.grad is not None}


def partition(engine, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's part of a whole gradient, as ZeRO cuts it."""
    if not engine.zero_optimization():
        return gradients
    name_of = {p: name for name, p in engine.module.named_parameters()}
    flat = torch.cat([gradients[name_of[p]].flatten() for p in engine.optimizer.bit16_groups[0]])
    size = engine.optimizer.partition_size[0]
    return {"mine": flat[dist.get_rank() * size : (dist.get_rank() + 1) * size]}


def compare(config: dict, autocast: bool, tied: bool = True) -> list[dict]:
    """Train some steps; for each, the distance between our averaged gradient and the reference's, and all norms."""
    import ds_bert

    model = reference.tiny_bert(tied)
    engine = ds_bert.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    clipping, section = engine.bucket_clipping, config["ds_bert"]["bucket_clipping"]
    rule, max_norm = section.get("threshold", "proportional"), config["gradient_clipping"]
    stage, accumulation = engine.zero_optimization_stage(), engine.gradient_accumulation_steps()
    found: list[dict] = []
    take_step = engine._take_model_step

    def watched(*args, **kwargs):
        ours = gradients_for_optimizer(engine)
        scale = engine.gradient_guard.loss_scale()
        plain = reference.untied_copy(reference_model)
        plain.load_state_dict(
            {
                **engine.module.state_dict(),
                reference.DECODER: engine.module.state_dict()[reference.EMBEDDING if tied else reference.DECODER],
            }
        )
        step = engine.global_steps
        micro_batches = [reference.batch(step, micro, dist.get_rank()) for micro in range(accumulation)]
        if stage:
            split, buckets = False, [list(bucket) for bucket in clipping.buckets]
            sizes = {n: p.numel() for n, p in engine.module.named_parameters()}
            if stage == 2:
                # Each micro-gradient is clipped by itself, at the threshold over the accumulation steps.
                per_micro = len(buckets) // accumulation
                buckets = buckets[:per_micro]
        else:
            split, buckets = clipping.plan.split is not None, [list(bucket) for bucket in clipping.plan.buckets]
            sizes = {n: p.numel() for n, p in engine.module.named_parameters()}
        limits = reference.thresholds(rule, max_norm, [sum(sizes[n] for n in names) for names in buckets])
        parts = [[one] for one in micro_batches] if stage == 2 else [micro_batches]
        expected, before = None, 0.0
        for part in parts:
            gradients = reference.local_gradients(plain, part, scale, autocast)
            if stage == 2:
                gradients = {name: gradient / accumulation for name, gradient in gradients.items()}
            averaged, norm = reference.clipped_average(
                gradients, buckets, [limit / len(parts) for limit in limits], split
            )
            before += norm
            expected = averaged if expected is None else {n: expected[n] + averaged[n] for n in averaged}
        statistics = clipping.statistics
        take_step(*args, **kwargs)
        found.append(
            {
                "distance": relative_difference(ours, partition(engine, expected)),
                "buckets": len(buckets),
                "before": (statistics.grad_norm_before_clip, before),
                "after": (engine.get_global_grad_norm(), reference.norm_of(expected)),
                "clipped_share": statistics.clipped_share,
            }
        )

    reference_model = reference.tiny_bert(tied).to(next(engine.module.parameters()).dtype)
    engine._take_model_step = watched
    for step in range(STEPS):
        for micro in range(accumulation):
            loss = engine(**reference.batch(step, micro, dist.get_rank())).loss
            engine.backward(loss)
            engine.step()
    return found


def check(answers: list[list[dict]], tolerance: float, *, clipped: bool = True, sums_of_norms: bool = False) -> None:
    for steps in answers:
        assert len(steps) == STEPS
        for step in steps:
            assert step["distance"] <= tolerance
            assert step["buckets"] >= 3
            ours, expected = step["after"]
            assert ours == pytest.approx(expected, rel=tolerance)
            ours, expected = step["before"]
            # The reference adds roots of mean squares over the micro-steps, we take the root of the mean of sums.
            assert ours == pytest.approx(expected, rel=0.1 if sums_of_norms else 2 * tolerance)
            assert (step["clipped_share"] > 0) == clipped


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_stage_and_precision(rank_pool, stage, precision, accumulation):
    config = ds_config(stage, accumulation, precision=precision)
    answers = rank_pool(2).run(compare, config, precision == "autocast")
    check(answers, TOLERANCE[precision], sums_of_norms=stage == 2 and accumulation > 1)


@pytest.mark.parametrize("stage", [0, 2])
def test_four_ranks(rank_pool, stage):
    answers = rank_pool(4).run(compare, ds_config(stage, 4), False)
    check(answers, 1e-6, sums_of_norms=stage == 2)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("rule", ["equal", "uniform"])
def test_the_other_rules(rank_pool, stage, rule):
    max_norm = 0.3 if rule == "equal" else 0.1
    answers = rank_pool(2).run(compare, ds_config(stage, 1, threshold=rule, max_norm=max_norm), False)
    check(answers, 1e-6)


def test_a_model_without_a_tied_embedding(rank_pool):
    check(rank_pool(2).run(compare, ds_config(0, 4), False, False), 1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_without_overlap(rank_pool, stage):
    answers = rank_pool(2).run(compare, ds_config(stage, 4, overlap=False), False)
    check(answers, 1e-6, sums_of_norms=stage == 2)


@pytest.mark.parametrize("bucket_size_mb", [0.001, 0.004, 0.008])
def test_the_bucket_size_changes_nothing_while_nothing_is_clipped(rank_pool, bucket_size_mb):
    config = ds_config(0, 1, max_norm=1e4, bucket_size_mb=bucket_size_mb)
    check(rank_pool(2).run(compare, config, False), 1e-6, clipped=False)


@pytest.fixture(scope="module")
def fused_adam() -> None:
    """DeepSpeed compiles it at its first use, which takes longer than ranks wait for each other."""
    from deepspeed.ops.op_builder.cpu import FusedAdamBuilder

    FusedAdamBuilder().load(verbose=False)


@pytest.mark.parametrize("torch_adam", [True, False], ids=["torch AdamW", "FusedAdam"])
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16 dynamic scale"])
def test_adam(rank_pool, fused_adam, stage, precision, torch_adam):
    # At stage 0 DeepSpeed wraps its own optimizers in another way than torch's.
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": torch_adam}}
    config = ds_config(stage, 1, precision=precision, optimizer=optimizer)
    check(rank_pool(2).run(compare, config, False), TOLERANCE[precision])
