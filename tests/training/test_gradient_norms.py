"""The norms in the metrics: accurate, unscaled, the same at every stage and precision."""

import pytest
import torch

from ds_bert.reduction.norms import global_norm
from tests.runs import metrics_lines, relative_difference, train

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
}
FP16 = {"fp16": {"enabled": True, "loss_scale": 256}}
BF16 = {"bf16": {"enabled": True}}


def test_a_norm_over_millions_of_elements_is_right_to_1e_6():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in (7_800_000, 4096, 1, 5000)]
    exact = torch.cat([tensor.double() for tensor in tensors]).norm().item()
    assert global_norm(tensors).item() == pytest.approx(exact, rel=1e-6)
    assert global_norm([]).item() == 0


def test_a_norm_of_half_precision_is_computed_in_fp32():
    assert global_norm([torch.full((100,), 300.0, dtype=torch.float16)]).item() == pytest.approx(3000)


@pytest.fixture(scope="module")
def norms(rank_pool, run_args, small_model):
    model = small_model(0.0)

    def first_norms(stage: int, **precision) -> tuple[float, float]:
        config = {**CONFIG, "zero_optimization": {"stage": stage}, **precision}
        args = run_args(model, config, max_steps=1)
        assert rank_pool(2).run(train, args)[0]["error"] is None
        line = metrics_lines(args)[0]
        return line["grad_norm_before_clip"], line["grad_norm_after_clip"]

    return first_norms


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("precision", "tolerance"), [(FP16, 2e-3), (BF16, 1e-2), ({}, 1e-6)], ids=["fp16", "bf16", "fp32"]
)
def test_the_logged_norm_is_that_of_the_unscaled_gradient(norms, stage, precision, tolerance):
    before, after = norms(stage, **precision)
    expected, _ = norms(0)
    assert before == pytest.approx(expected, rel=tolerance)
    assert after == 0.1 < before


def test_bf16_with_fp32_accumulation_has_a_norm_too(norms):
    before, _ = norms(1, **BF16, data_types={"grad_accum_dtype": "fp32"})
    assert before == pytest.approx(norms(0)[0], rel=1e-2)


@pytest.mark.parametrize("stage", [0, 1])
def test_fp16_with_sgd_moves_the_weights_as_fp32_does(rank_pool, run_args, small_model, stage):
    """Adam would hide a gradient that is too small by the loss scale; SGD does not."""
    model, weights = small_model(0.0), {}
    for name, precision in (("fp32", {}), ("fp16", FP16)):
        config = {
            **CONFIG,
            **precision,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        }
        args = run_args(model, config, max_steps=3)
        weights[name] = rank_pool(2).run(train, args)[0]["weights"]
    start = rank_pool(1).run(fresh_weights, str(model))[0]
    moved = {name: {key: values[key] - start[key] for key in start} for name, values in weights.items()}
    assert relative_difference(moved["fp16"], moved["fp32"]) < 0.02


def fresh_weights(model: str) -> dict:
    from transformers import AutoConfig, AutoModelForMaskedLM

    torch.manual_seed(0)
    built = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(model))
    return {name: p.detach() for name, p in built.named_parameters()}
