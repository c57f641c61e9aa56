"""Held-out loss, perplexity and masked accuracy: the same figures for every number of ranks and every batch size."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedTokenizerBase

from ds_bert.agreement import rank_and_world
from ds_bert.data.batches.collators import Collator, MaskedBatch
from ds_bert.data.batches.masked_dataset import MaskedLMDataset
from ds_bert.data.batches.masking import EVALUATION_MASKS, TokenMasker
from ds_bert.data.prepared import PreparedSplit
from ds_bert.modeling import MaskedPositionHead, masked_lm_loss, num_correct
from ds_bert.training.progress import progress_bar

# Not the run's seed: a model is compared with others on the same masks.
EVALUATION_SEED = 0


class Evaluator:
    """Evaluates models on one held-out split.

    Each sample counts once, with masks that never change. Samples are batched by length, batches dealt to ranks in
    turn, sums kept in double precision.

    Args:
        split: the held-out samples.
        tokenizer: of the prepared data.
        probability: of masking.
        micro_batch_size: samples a rank works on at a time.
        collate: makes its batches.
    """

    def __init__(
        self,
        split: PreparedSplit,
        tokenizer: PreTrainedTokenizerBase,
        *,
        probability: float,
        micro_batch_size: int,
        collate: Collator,
    ) -> None:
        masker = TokenMasker(tokenizer, probability=probability, seed=EVALUATION_SEED, stream=EVALUATION_MASKS)
        self.dataset = MaskedLMDataset(split, masker)
        self.micro_batch_size = micro_batch_size
        self.collate = collate

    def batches(self, rank: int, world_size: int) -> Iterator[MaskedBatch]:
        order = np.argsort(self.dataset.split.lengths, kind="stable")
        starts = range(0, len(order), self.micro_batch_size)[rank::world_size]
        for start in progress_bar(starts, desc="evaluate", leave=False, disable=rank != 0, unit="batch"):
            yield self.collate([self.dataset[int(i)] for i in order[start : start + self.micro_batch_size]])

    def __call__(self, model: nn.Module, head: MaskedPositionHead, device: torch.device) -> dict[str, float]:
        """Evaluate. A collective call.

        Args:
            model: a Hugging Face model, or an engine around it.
            head: attached to that model.
            device: of its weights.

        Returns:
            eval_loss (nats per masked token), eval_perplexity (its exponential), eval_accuracy (share of masked tokens
            whose most likely token is the right one), eval_masked_tokens.
        """
        rank, world_size = rank_and_world()
        totals = torch.zeros(3, dtype=torch.float64, device=device)
        with torch.no_grad(), _evaluation_mode(model):
            for batch in self.batches(rank, world_size):
                batch = batch.to(device)
                logits_MV = head(model, batch.model_inputs, batch.positions)
                loss, correct = masked_lm_loss(logits_MV, batch.labels), num_correct(logits_MV, batch.labels)
                totals += torch.stack([loss.double(), correct.double(), totals.new_tensor(len(batch.labels))])
        if world_size > 1:
            dist.all_reduce(totals)
        loss, correct, masked_tokens = totals.tolist()
        loss /= masked_tokens
        return {
            "eval_loss": loss,
            "eval_perplexity": math.exp(min(loss, 700.0)),
            "eval_accuracy": correct / masked_tokens,
            "eval_masked_tokens": int(masked_tokens),
        }


def most_frequent_token_accuracy(evaluator: Evaluator) -> float:
    """Masked accuracy of always guessing the token that is most frequent among the masked ones: the bar to beat."""
    labels = np.concatenate([evaluator.dataset[i].labels for i in range(len(evaluator.dataset))])
    return float(np.bincount(labels).max() / len(labels))


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
