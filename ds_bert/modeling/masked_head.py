"""The vocabulary projection on masked positions only.

T = tokens of a batch (padding included), H = hidden size, M = masked positions, V = vocabulary.
"""

import logging

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ds_bert.layers.vocabulary_projection import VocabularyProjection

log = logging.getLogger(__name__)

IGNORED = -100  # the label that Hugging Face's and torch's losses leave out


class MaskedPositionHead:
    """Lets a Hugging Face masked-language model compute its head on chosen positions only.

    A hook on the encoder replaces its last hidden states by those at the positions; the model's own forward then runs
    its own head on them. So every model whose head treats each token alone works, unchanged.

    Args:
        model: a Hugging Face model `...ForMaskedLM`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.positions: torch.Tensor | None = None
        self.projection: VocabularyProjection | None = None
        self.gathers_before_head = model.base_model is not model
        if self.gathers_before_head:
            model.base_model.register_forward_hook(self._gather)

    def _gather(self, module: nn.Module, inputs: tuple, output):
        if self.positions is not None:
            hidden_TH = output.last_hidden_state.flatten(0, 1)
            output.last_hidden_state = hidden_TH[self.positions].unsqueeze(0)
        return output

    def follow_labels(self, model: PreTrainedModel) -> None:
        """From now on a call of the model with `labels` computes the head where they are not -100 only.

        Args:
            model: the model given at construction; one whose head cannot be cut off stays as it is.
        """
        if not self.gathers_before_head:
            return

        # Methods, so that a copy of the model has a head of its own, and pickle can name them.
        model.register_forward_pre_hook(self._take_labels, with_kwargs=True)
        model.register_forward_hook(self._forget_positions, always_call=True)

    def _take_labels(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        labels = kwargs.get("labels")
        if labels is not None:
            self.positions = (labels.flatten() != IGNORED).nonzero().squeeze(1)
            kwargs["labels"] = labels.flatten()[self.positions].unsqueeze(0)
        return args, kwargs

    def _forget_positions(self, module: nn.Module, inputs: tuple, output) -> None:
        self.positions = None

    def use_fused_loss(self, model: PreTrainedModel) -> None:
        """From now on `loss` never holds the logits of a large batch, if the model's head ends with its projection.

        Args:
            model: the model given at construction, before it is wrapped; tried with one sequence of two tokens.
        """
        decoder = model.get_output_embeddings()
        if self.gathers_before_head and type(decoder) is nn.Linear and self._ends_with(decoder, model):
            self.projection = VocabularyProjection.replace(decoder)
        else:
            log.info(f"{type(model).__name__} keeps a head of its own: all logits of a micro-batch are held at once")

    @staticmethod
    def _ends_with(decoder: nn.Linear, model: PreTrainedModel) -> bool:
        outputs = []
        handle = decoder.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        try:
            with torch.no_grad():
                logits = model(input_ids=torch.ones((1, 2), dtype=torch.int64, device=decoder.weight.device)).logits
        finally:
            handle.remove()
        return len(outputs) == 1 and outputs[0] is logits

    def loss(
        self, model: nn.Module, model_inputs: dict, positions: torch.Tensor, labels_M: torch.Tensor
    ) -> torch.Tensor:
        """Run the model, to the summed cross-entropy over masked tokens.

        Args:
            model, model_inputs, positions: as for a call.
            labels_M: (M,) int64.

        Returns:
            0-d fp32, as `masked_lm_loss`.
        """
        if self.projection is None:
            return masked_lm_loss(self(model, model_inputs, positions), labels_M)
        self.positions, self.projection.labels = positions, labels_M
        try:
            return model(**model_inputs).logits
        finally:
            self.positions = self.projection.labels = None

    def __call__(self, model: nn.Module, model_inputs: dict, positions: torch.Tensor) -> torch.Tensor:
        """Run the model.

        Args:
            model: the model given at construction, or an engine around it.
            model_inputs: keyword arguments of its forward.
            positions: (M,) int64, indices into the T tokens.

        Returns:
            logits of the masked positions: (M, V), in the model's dtype.
        """
        self.positions = positions
        try:
            logits = model(**model_inputs).logits.flatten(0, 1)
        finally:
            self.positions = None
        return logits if self.gathers_before_head else logits[positions]


def masked_lm_loss(logits_MV: torch.Tensor, labels_M: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy over masked tokens.

    Args:
        logits_MV: (M, V), any float dtype; the loss is computed in fp32.
        labels_M: (M,) int64.

    Returns:
        0-d fp32, the sum (not the mean: docs/loss.md says why).
    """
    return F.cross_entropy(logits_MV.float(), labels_M, reduction="sum")


def num_correct(logits_MV: torch.Tensor, labels_M: torch.Tensor) -> torch.Tensor:
    """How many of the masked tokens are the most likely ones: 0-d int64."""
    return (logits_MV.argmax(dim=-1) == labels_M).sum()
