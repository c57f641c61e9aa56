"""Held-out figures do not depend on how they were computed."""

import pytest

from tests.runs import metrics_lines, train

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
}


@pytest.fixture(scope="module")
def run(rank_pool, run_args, small_model):
    args = run_args(small_model(0.1), CONFIG, max_steps=3)
    rank_pool(2).run(train, args)
    return args


def evaluate(args, micro_batch_size: int) -> dict:
    import argparse

    from ds_bert.training.evaluate_program import evaluate

    options = argparse.Namespace(
        checkpoint=args.output, data=args.data, micro_batch_size=micro_batch_size, trust_remote_code=False
    )
    return evaluate(options)


def reference(args) -> tuple[float, float]:
    """Loss and accuracy in plain transformers, a sample at a time, every position's logits."""
    import torch
    from torch.nn import functional as F
    from transformers import AutoModelForMaskedLM

    from ds_bert.data.batches.masking import EVALUATION_MASKS, TokenMasker
    from ds_bert.data.prepared import PreparedData
    from ds_bert.training.trained_model import find_trained_model

    data = PreparedData(args.data)
    masker = TokenMasker(data.load_tokenizer(), probability=0.15, seed=0, stream=EVALUATION_MASKS)
    trained = find_trained_model(args.output)
    states = torch.load(trained.checkpoint.folder / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    model = AutoModelForMaskedLM.from_config(trained._config())
    model.load_state_dict(states)
    model.eval()
    loss, correct, count = 0.0, 0, 0
    for i in range(len(data.validation)):
        sample = masker(data.validation[i], epoch=0, sample=i)
        logits = model(input_ids=torch.from_numpy(sample.input_ids)[None]).logits[0, torch.from_numpy(sample.positions)]
        labels = torch.from_numpy(sample.labels)
        loss += F.cross_entropy(logits.double(), labels, reduction="sum").item()
        correct += (logits.argmax(-1) == labels).sum().item()
        count += len(labels)
    return loss / count, correct / count


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 32), (1, 1), (2, 3), (4, 2)])
def test_figures_are_the_same_for_every_number_of_ranks_and_batch_size(rank_pool, run, world_size, micro_batch_size):
    loss, accuracy = rank_pool(1).run(reference, run)[0]
    for figures in rank_pool(world_size).run(evaluate, run, micro_batch_size):
        assert figures["eval_loss"] == pytest.approx(loss, rel=1e-6)
        assert figures["eval_accuracy"] == accuracy


@pytest.mark.parametrize(
    "precision",
    [
        {},
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"fp16": {"enabled": True, "initial_scale_power": 8}},
    ],
    ids=["fp32", "bf16", "autocast", "fp16"],
)
def test_figures_equal_those_logged_in_training(rank_pool, run_args, small_model, precision):
    run = run_args(small_model(0.1), {**CONFIG, **precision}, max_steps=2)
    assert rank_pool(2).run(train, run)[0]["error"] is None

    logged = next(line for line in metrics_lines(run) if "eval_loss" in line)
    figures = rank_pool(2).run(evaluate, run, 4)[0]
    assert figures["eval_loss"] == pytest.approx(logged["eval_loss"], rel=1e-6)
    assert figures["eval_accuracy"] == logged["eval_accuracy"]
