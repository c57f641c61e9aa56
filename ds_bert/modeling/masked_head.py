"""The vocabulary projection on masked positions only.

B = samples, L = padded length, H = hidden size, M = masked positions, V = vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel


class MaskedPositionHead:
    """Lets a Hugging Face masked-language model compute its head on chosen positions only.

    A hook on the encoder replaces its last hidden states by those at the positions; the model's own forward then runs
    its own head on them. So every model whose head treats each token alone works, unchanged.

    Args:
        model: a Hugging Face model `...ForMaskedLM`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.positions: torch.Tensor | None = None
        self.gathers_before_head = model.base_model is not model
        if self.gathers_before_head:
            model.base_model.register_forward_hook(self._gather)

    def _gather(self, module: nn.Module, inputs: tuple, output):
        if self.positions is not None:
            hidden_BLH = output.last_hidden_state
            output.last_hidden_state = hidden_BLH.flatten(0, 1)[self.positions].unsqueeze(0)
        return output

    def __call__(
        self, model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Run the model.

        Args:
            model: the model given at construction, or an engine around it.
            input_ids: (B, L) int64.
            attention_mask: (B, L) int64.
            positions: (M,) int64, indices into the B x L tokens.

        Returns:
            logits of the masked positions: (M, V), in the model's dtype.
        """
        self.positions = positions
        try:
            logits = model(input_ids=input_ids, attention_mask=attention_mask).logits.flatten(0, 1)
        finally:
            self.positions = None
        return logits if self.gathers_before_head else logits[positions]


def masked_lm_loss(logits_MV: torch.Tensor, labels_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy over masked tokens, and how many the model got right.

    Args:
        logits_MV: (M, V), any float dtype; the loss is computed in fp32.
        labels_M: (M,) int64.

    Returns:
        loss: 0-d fp32, the sum (not the mean: docs/loss.md says why).
        correct: 0-d int64.
    """
    loss = F.cross_entropy(logits_MV.float(), labels_M, reduction="sum")
    return loss, (logits_MV.detach().argmax(dim=-1) == labels_M).sum()
