"""Masked-language modelling in one process without DeepSpeed: what benchmarks of learning share."""

from collections.abc import Sequence

import torch

from ds_bert.data import PreparedData
from ds_bert.data.batches.collators import PaddingCollator
from ds_bert.data.batches.masked_dataset import MaskedLMDataset
from ds_bert.data.batches.masking import TokenMasker
from ds_bert.modeling import MaskedPositionHead, build_model, load_config, masked_lm_loss
from ds_bert.training.evaluator import Evaluator

PROBABILITY = 0.15


class MaskedLM:
    """A fresh model, prepared data with its masks, and the loss on the held-out part.

    Args:
        folder: prepared data.
        model: name of the model.
        seed: of weights and masks.
    """

    def __init__(self, folder: str, model: str, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.data = PreparedData(folder)
        self.lengths = self.data.train.lengths
        self.tokenizer = self.data.load_tokenizer()
        self.model = build_model(model, load_config(model, self.tokenizer, int(self.lengths.max()))).train()
        self.head, self._collate = MaskedPositionHead(self.model), PaddingCollator(self.tokenizer.pad_token_id)
        self.dataset = MaskedLMDataset(self.data.train, TokenMasker(self.tokenizer, probability=PROBABILITY, seed=seed))

    def loss_sum(self, samples: Sequence[int]) -> torch.Tensor:
        """The loss of these samples, summed over their masked tokens."""
        batch = self._collate([self.dataset[int(index)] for index in samples])
        logits = self.head(self.model, batch.model_inputs, batch.positions)
        return masked_lm_loss(logits, batch.labels)

    def held_out_loss(self) -> float:
        """The mean over the held-out part; the model stays in evaluation mode."""
        self.model.eval()
        evaluator = Evaluator(
            self.data.validation, self.tokenizer, probability=PROBABILITY, micro_batch_size=32, collate=self._collate
        )
        return evaluator(self.model, self.head, torch.device("cpu"))["eval_loss"]
