"""The gradient and the loss are those of the mean over all masked tokens of the global batch, however it is split."""

import pytest
import torch

from tests.runs import metrics_lines, relative_difference, train

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_allow_untested_optimizer": True}
# Sums of fp32 products in another order differ by about 1e-7.
TOLERANCE = 1e-6


def first_gradient(args) -> dict:
    """The reduced gradient of the first step (stage 0), and what the run logged."""
    from ds_bert.engine import gradient_guard as gradients

    seen = {}
    original = gradients.GradientGuard.before_step

    def watched(guard) -> None:
        if not seen:
            seen.update({name: p.grad.clone() for name, p in guard.engine.module.named_parameters()})
        original(guard)

    gradients.GradientGuard.before_step = watched
    try:
        assert train(args)["error"] is None
    finally:
        gradients.GradientGuard.before_step = original
    lines = metrics_lines(args)
    return {"gradient": seen, "lines": lines}


def reference_gradient(args) -> dict:
    """The same in plain transformers: one padded batch, every position's logits, mean over masked tokens."""
    import numpy as np
    from transformers import AutoConfig, AutoModelForMaskedLM

    from ds_bert.data.batches.masking import TokenMasker
    from ds_bert.data.prepared import PreparedData

    data = PreparedData(args.data)
    order = np.random.default_rng([args.seed, 0, 1]).permutation(len(data.train))
    masker = TokenMasker(data.load_tokenizer(), probability=0.15, seed=args.seed)
    samples = [masker(data.train[int(i)], epoch=0, sample=int(i)) for i in order[:8]]
    longest = max(len(sample.input_ids) for sample in samples)
    ids, mask = torch.zeros(8, longest, dtype=torch.long), torch.zeros(8, longest, dtype=torch.long)
    labels = torch.full((8, longest), -100)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.input_ids)] = torch.from_numpy(sample.input_ids)
        mask[row, : len(sample.input_ids)] = 1
        labels[row, torch.from_numpy(sample.positions)] = torch.from_numpy(sample.labels)
    torch.manual_seed(args.seed)
    model = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(args.model))
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    gradient = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.cat([g.double().flatten() for g in gradient.values()]).norm()
    return {"gradient": gradient, "loss": loss.item(), "norm": norm.item()}


def config(micro: int, **more) -> dict:
    return {"train_batch_size": 8, "train_micro_batch_size_per_gpu": micro, **SGD, **more}


@pytest.fixture(scope="module")
def runs(rank_pool, run_args, small_model) -> dict:
    """First gradient and log of the same global batch of 8, split three ways, with accumulation 4, and padded."""
    model = small_model(0.0)

    def run(world_size: int, micro: int, **execution) -> dict:
        args = run_args(model, config(micro, ds_bert={"execution": execution}), max_steps=2)
        answers = rank_pool(world_size).run(first_gradient, args)
        for other in answers[1:]:
            assert relative_difference(other["gradient"], answers[0]["gradient"]) == 0
        return answers[0]

    reference = rank_pool(1).run(reference_gradient, run_args(model, config(1)))[0]
    splits = {"1x8": run(1, 1), "2x4": run(2, 1), "4x2": run(4, 1), "2x2": run(2, 2)}
    return {"reference": reference, **splits, "2x2 padded": run(2, 2, packed=False)}


@pytest.mark.parametrize("split", ["1x8", "2x4", "4x2", "2x2", "2x2 padded"])
def test_gradient_equals_plain_pytorch_however_the_batch_is_split(runs, split):
    assert relative_difference(runs[split]["gradient"], runs["reference"]["gradient"]) <= TOLERANCE


@pytest.mark.parametrize("split", ["1x8", "2x4", "4x2", "2x2", "2x2 padded"])
def test_logged_loss_and_norm_equal_plain_pytorch_however_the_batch_is_split(runs, split):
    line = runs[split]["lines"][0]
    assert line["loss"] == pytest.approx(runs["reference"]["loss"], rel=TOLERANCE)
    assert line["grad_norm_before_clip"] == pytest.approx(runs["reference"]["norm"], rel=TOLERANCE)
    assert line["samples"] == 8


def weights_after(args) -> dict:
    result = train(args)
    assert result["error"] is None
    return result["weights"]


@pytest.mark.parametrize("clipping", [0.0, 0.05], ids=["unclipped", "clipped"])
def test_zero_stages_0_1_2_agree(rank_pool, run_args, small_model, clipping):
    model = small_model(0.0)
    after, norms = {}, {}
    for stage in (0, 1, 2):
        ds_config = config(2, gradient_clipping=clipping, zero_optimization={"stage": stage})
        args = run_args(model, ds_config, max_steps=5)
        after[stage] = rank_pool(2).run(weights_after, args)[0]
        lines = metrics_lines(args)
        norms[stage] = [(line["grad_norm_before_clip"], line["grad_norm_after_clip"]) for line in lines[:5]]
    for stage in (1, 2):
        assert relative_difference(after[stage], after[0]) <= TOLERANCE
        for ours, theirs in zip(norms[stage], norms[0], strict=True):
            assert ours == pytest.approx(theirs, rel=TOLERANCE)
    before, clipped = norms[0][0]
    assert clipped == (pytest.approx(before) if clipping == 0 else clipping)
