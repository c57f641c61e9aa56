"""Bucket clipping on DeepSpeed engines: configuration, what is refused, the bound, memory."""

import json
import re
from collections.abc import Callable

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_bert.config import parse_section
from ds_bert.errors import UserError
from ds_bert.resolution.bucket_clipping import resolve_bucket_clipping
from tests.reduction import reference


def base(stage: int = 0, **more) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def resolve(config: dict, **section) -> tuple:
    config = {**config, "ds_bert": {"bucket_clipping": {"enabled": True, **section}}}
    return resolve_bucket_clipping(config, parse_section(config).bucket_clipping)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"zero_optimization": {"stage": 3}}, '"zero_optimization.stage": 3 (0, 1 and 2 do)'),
        ({"zero_optimization": {"stage": 2, "contiguous_gradients": False}}, "zero_optimization.contiguous_gradients"),
        ({"zero_optimization": {"stage": 1, "compute_grad_norm": False}}, "zero_optimization.compute_grad_norm"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "data_types.grad_accum_dtype"),
        ({"sparse_gradients": True}, "sparse_gradients"),
        ({"prescale_gradients": True}, "prescale_gradients"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"optimizer": {"type": "OneBitAdam", "params": {}}}, "optimizer.type"),
        ({"optimizer": {"type": "OneBitLamb", "params": {}}}, "optimizer.type"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel"),
    ],
)
def test_what_reduces_gradients_another_way_is_refused_by_its_key(change, named):
    with pytest.raises(UserError, match=re.escape(named)) as caught:
        resolve({**base(), **change})
    assert "ds_bert.bucket_clipping" in str(caught.value)


@pytest.mark.parametrize("value", [None, 0, -1, True, "auto", float("inf")])
def test_without_a_maximum_norm_both_keys_are_named(value):
    config = base()
    config["gradient_clipping"] = value
    with pytest.raises(UserError, match=r"ds_bert.bucket_clipping.enabled is true and gradient_clipping"):
        resolve(config)
    del config["gradient_clipping"]
    with pytest.raises(UserError, match="gradient_clipping is missing"):
        resolve(config)


def test_a_default_of_ours_gives_way_to_a_key_of_deepspeed_that_is_given():
    zero = {"stage": 2, "reduce_bucket_size": 1000, "overlap_comm": False}
    config, section = resolve(base(zero_optimization=zero, communication_data_type="bf16"))
    assert config["zero_optimization"] == zero
    assert (section.overlap, section.communication_dtype) == (False, "bf16")
    assert section.bucket_size_mb == pytest.approx(2000 / 2**20)


def test_our_keys_set_those_of_deepspeed():
    config, _ = resolve(base(2), bucket_size_mb=2.0, communication_dtype="bf16")
    assert config["communication_data_type"] == "bf16"
    assert config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 2**20, "overlap_comm": True}
    assert resolve(base(2))[0]["zero_optimization"]["reduce_bucket_size"] == 25 * 2**20 // 4
    assert resolve(base(2, bf16={"enabled": True}))[0]["zero_optimization"]["reduce_bucket_size"] == 25 * 2**20 // 2
    config, _ = resolve(base(0), bucket_size_mb=2.0)
    assert config["zero_optimization"] == {"stage": 0}


@pytest.mark.parametrize(
    ("change", "section", "named"),
    [
        (
            {"zero_optimization": {"stage": 1, "reduce_bucket_size": 5}},
            {"bucket_size_mb": 1},
            "reduce_bucket_size is 5",
        ),
        ({"zero_optimization": {"stage": 1, "overlap_comm": False}}, {"overlap": True}, "overlap_comm is False"),
        ({"communication_data_type": "fp16"}, {"communication_dtype": "bf16"}, "communication_data_type is 'fp16'"),
    ],
)
def test_two_given_values_that_differ_are_an_error_that_names_both(change, section, named):
    with pytest.raises(UserError, match=re.escape(named)) as caught:
        resolve({**base(), **change}, **section)
    assert f"ds_bert.bucket_clipping.{next(iter(section))}" in str(caught.value)


def test_not_enabled_changes_nothing():
    config = {**base(3), "ds_bert": {"bucket_clipping": {"threshold": "equal"}}}
    section = parse_section(config).bucket_clipping
    assert resolve_bucket_clipping(config, section) == (config, section)


def initialize(config: dict, seed: int = 0):
    import ds_bert

    model = reference.tiny_bert(seed=seed)
    config = {
        **config,
        "ds_bert": {"bucket_clipping": {"enabled": True, "bucket_size_mb": 0.004, **config.pop("ours", {})}},
    }
    return ds_bert.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def refusal(build_module: Callable[[], nn.Module], config: dict | str, attach: int = 1) -> str:
    """What `attach_to_engine` says, the last of some times, to an engine that `deepspeed.initialize` built."""
    import deepspeed

    from ds_bert.engine import attach_to_engine

    module = build_module()
    engine = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]
    for _ in range(attach - 1):
        attach_to_engine(engine)
    with pytest.raises(UserError) as caught:
        attach_to_engine(engine)
    return str(caught.value)


def experts() -> nn.Module:
    from deepspeed.moe.layer import MoE

    return MoE(8, nn.Linear(8, 8), num_experts=1)


def pipeline() -> nn.Module:
    from deepspeed.pipe import PipelineModule

    return PipelineModule([nn.Linear(4, 4), nn.Linear(4, 1)], num_stages=1, loss_fn=nn.MSELoss())


@pytest.mark.parametrize(
    ("build_module", "config", "named"),
    [
        (experts, base(), "experts (MoE)"),
        (pipeline, base(), "a pipeline module"),
        (reference.tiny_bert, base(prescale_gradients=True), "prescale_gradients"),
    ],
)
def test_engines_whose_gradients_take_another_way_are_refused(rank_pool, build_module, config, named):
    message = rank_pool(2).run(refusal, build_module, config)[0]
    assert named in message
    assert "ds_bert.bucket_clipping.enabled to false" in message


def test_an_engine_from_a_file_is_checked_too(rank_pool, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(base(prescale_gradients=True)))
    assert "prescale_gradients" in rank_pool(1).run(refusal, reference.tiny_bert, str(path))[0]


def test_an_engine_takes_one_bucket_clipping_only(rank_pool):
    assert "attach one only" in rank_pool(1).run(refusal, reference.tiny_bert, base(), 2)[0]


def longest_average(config: dict, scale_of_rank: list[float]) -> float:
    """The largest norm an optimizer gets in two steps of gradients of any size, all ranks in one direction."""
    engine = initialize(config)
    norms = []
    for step in range(2):
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(**reference.batch(step, 0, 0)).loss
            engine.backward(loss * scale_of_rank[dist.get_rank()])
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return max(norms)


@given(
    scale_of_rank=st.lists(st.floats(1e-3, 1e4), min_size=2, max_size=2),
    threshold=st.sampled_from(["proportional", "equal"]),
    accumulation=st.sampled_from([1, 3]),
    stage=st.sampled_from([0, 1, 2]),
)
@settings(max_examples=25)
def test_the_average_is_never_longer_than_the_maximum_norm(rank_pool, scale_of_rank, threshold, accumulation, stage):
    config = base(stage, gradient_accumulation_steps=accumulation, ours={"threshold": threshold})
    for norm in rank_pool(2).run(longest_average, config, scale_of_rank):
        assert norm <= 0.5 * (1 + 1e-5)


def norm_without_clipping(stage: int, with_ours: bool) -> float:
    """`get_global_grad_norm()` of a step that nobody clips."""
    import deepspeed

    config = base(stage, bf16={"enabled": True})
    config["gradient_clipping"] = 1e6
    if with_ours:
        engine = initialize(config)
    else:
        model = reference.tiny_bert()
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    engine.backward(engine(**reference.batch(0, 0, dist.get_rank())).loss)
    engine.step()
    return float(engine.get_global_grad_norm())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_norm_is_deepspeeds_own_where_nothing_is_clipped(rank_pool, stage):
    ours = rank_pool(2).run(norm_without_clipping, stage, True)[0]
    assert ours == pytest.approx(rank_pool(2).run(norm_without_clipping, stage, False)[0], rel=5e-3)


def deepspeed_no_sync() -> list[float]:
    """Two micro-batches, the first inside engine.no_sync(), against both in one."""
    engine = initialize(base())
    norms = []
    for inside in (True, False):
        batches = [reference.batch(0, micro, dist.get_rank()) for micro in range(2)]
        if inside:
            with engine.no_sync():
                engine.backward(engine(**batches[0]).loss)
            engine.backward(engine(**batches[1]).loss)
        else:
            engine.backward(engine(**batches[0]).loss + engine(**batches[1]).loss)
        norms.append(engine.bucket_clipping.statistics.grad_norm_before_clip)
        engine.zero_grad()
    return norms


def test_deepspeeds_no_sync_is_respected(rank_pool):
    inside, together = rank_pool(2).run(deepspeed_no_sync)[0]
    # The reference for both parts of the embedding is a sum of norms, so the tolerance is that of addition in fp32.
    assert inside == pytest.approx(together, rel=1e-5)


def open_files_and_memory(steps: int) -> dict:
    import os

    import psutil

    engine, process = initialize(base()), psutil.Process()
    threads = files = memory = None
    for step in range(steps):
        if step == steps // 4:
            threads, files, memory = process.num_threads(), len(os.listdir("/proc/self/fd")), process.memory_info().rss
        engine.backward(engine(**reference.batch(step % 7, 0, dist.get_rank())).loss)
        engine.step()
    return {
        "threads": process.num_threads() - threads,
        "files": len(os.listdir("/proc/self/fd")) - files,
        "mb": (process.memory_info().rss - memory) / 2**20,
    }


def test_2000_steps_grow_neither_memory_nor_files_nor_threads(rank_pool):
    for growth in rank_pool(2).run(open_files_and_memory, 2000):
        assert growth["threads"] == 0
        assert growth["files"] == 0
        assert growth["mb"] < 8


def plan_after_loading(folder: str) -> tuple[dict, dict]:
    """The plan of an engine that made a step, and that of a new one that loads its checkpoint."""
    first = initialize(base())
    first.backward(first(**reference.batch(0, 0, dist.get_rank())).loss)
    first.step()
    first.save_checkpoint(folder)
    second = initialize(base(), seed=1)
    second.load_checkpoint(folder)
    return first.bucket_clipping.state_dict(), second.bucket_clipping.state_dict()


def test_a_checkpoint_brings_the_plan(rank_pool, tmp_path):
    for saved, loaded in rank_pool(2).run(plan_after_loading, str(tmp_path)):
        assert loaded == saved
        assert len(saved["plan"]["buckets"]) > 1


def clipped_after_loading(stage: int, folder: str) -> float:
    """What DeepSpeed itself clips to after it loaded a checkpoint of an engine that left all clipping to DeepSpeed."""
    import deepspeed

    config, model = base(stage, bf16={"enabled": True}), reference.tiny_bert()
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0].save_checkpoint(folder)
    engine = initialize(config)
    engine.load_checkpoint(folder)
    return max(engine.gradient_clipping(), engine.optimizer.clip_grad)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_checkpoint_does_not_bring_deepspeeds_own_clipping(rank_pool, tmp_path, stage):
    assert rank_pool(2).run(clipped_after_loading, stage, str(tmp_path)) == [0, 0]
