"""The last layer of a language model's head: from hidden states to logits, or straight to the loss.

M = masked positions, V = vocabulary, H = width of the layer's input, C = rows of a chunk.
"""

from typing import Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# Elements, 256 MiB in fp32. Where there would be more logits, they are computed in chunks, and again for the gradient.
MAX_LOGITS = 1 << 26


class WeightGradientSink(Protocol):
    """Takes the weight's gradient in autograd's stead."""

    def begin_projection(self) -> None:
        """A forward pass, whose backward pass will follow."""

    def add_product(self, gradient_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
        """Add gradient_CV.t() @ hidden_CH; both of one dtype."""

    def end_projection(self) -> None:
        """The gradient of one forward pass is complete, before its input's is computed."""


class VocabularyProjection(nn.Linear):
    """`nn.Linear` that, given labels, computes the loss and never holds the logits of a large batch.

    A model's own decoder becomes one by `replace`; what is saved of the model stays the same.
    """

    labels: torch.Tensor | None = None
    """(M,) int64. While set, `forward` takes the rows they belong to and returns the summed cross-entropy, 0-d fp32."""
    sink: WeightGradientSink | None = None
    """None leaves the weight's gradient to autograd."""

    @classmethod
    def replace(cls, linear: nn.Linear) -> "VocabularyProjection":
        """Turn a layer into one, in place."""
        linear.__class__ = cls
        return linear

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.sink is not None and torch.is_grad_enabled():
            self.sink.begin_projection()
        if self.labels is not None:
            hidden_MH = hidden.reshape(-1, self.in_features)
            return _SummedCrossEntropy.apply(hidden_MH, self.weight, self.bias, self.labels, self.sink)
        if self.sink is not None:
            return _Project.apply(hidden, self.weight, self.bias, self.sink)
        return super().forward(hidden)


def add_product(total_VH: torch.Tensor, gradient_CV: torch.Tensor, hidden_CH: torch.Tensor, *, is_first: bool) -> None:
    """total_VH += gradient_CV.t() @ hidden_CH, or = with `is_first`; in its place.

    Other 4 VH bytes of new memory would cost as much as clipping them.
    """
    if gradient_CV.dtype == total_VH.dtype:
        total_VH.addmm_(gradient_CV.t(), hidden_CH, beta=0 if is_first else 1)
        return
    product_VH = torch.mm(gradient_CV.t(), hidden_CH)
    total_VH.copy_(product_VH) if is_first else total_VH.add_(product_VH)


class _Project(torch.autograd.Function):
    """`F.linear` that computes its weight gradient before its input gradient, and hands it to a sink."""

    @staticmethod
    def forward(ctx, hidden, weight_VH, bias_V, sink):
        logits = F.linear(hidden, weight_VH, bias_V)
        # Under autocast the product is taken in the lower precision, and so must its gradients be.
        ctx.save_for_backward(hidden.to(logits.dtype), weight_VH)
        ctx.sink, ctx.dtypes = sink, (hidden.dtype, bias_V.dtype if bias_V is not None else None)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        hidden, weight_VH = ctx.saved_tensors
        hidden_dtype, bias_dtype = ctx.dtypes
        gradient_TV = gradient.reshape(-1, gradient.shape[-1])
        ctx.sink.add_product(gradient_TV, hidden.reshape(-1, hidden.shape[-1]))
        ctx.sink.end_projection()
        hidden_gradient = bias_gradient = None
        if ctx.needs_input_grad[0]:
            hidden_gradient = torch.matmul(gradient, weight_VH.to(gradient.dtype)).to(hidden_dtype)
        if ctx.needs_input_grad[2]:
            bias_gradient = gradient_TV.sum(0).to(bias_dtype)
        return hidden_gradient, None, bias_gradient, None


class _SummedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of a linear layer's logits.

    The logits are turned, where they lie, into the loss's gradient. One chunk keeps it for the backward pass; several
    compute it there again, so that the weight's gradient can be added up in its final place.
    """

    @staticmethod
    def forward(ctx, hidden_MH, weight_VH, bias_V, labels_M, sink):
        rows = max(1, MAX_LOGITS // weight_VH.shape[0])
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, labels_M)
        ctx.sink, ctx.rows, ctx.kept_MV = sink, rows, None
        loss = torch.zeros((), dtype=torch.float32, device=hidden_MH.device)
        for hidden_CH, labels_C in zip(hidden_MH.split(rows), labels_M.split(rows), strict=True):
            logits_CV = F.linear(hidden_CH, weight_VH, bias_V)
            # What autocast made of them.
            ctx.dtype = logits_CV.dtype
            gradient_CV, chunk_loss = _gradient_and_loss(logits_CV, labels_C)
            loss += chunk_loss
            if len(labels_M) <= rows and any(ctx.needs_input_grad):
                ctx.kept_MV = gradient_CV
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_gradient):
        hidden_MH, weight_VH, bias_V, labels_M = ctx.saved_tensors
        weight_VH, cast_MH = weight_VH.to(ctx.dtype), hidden_MH.to(ctx.dtype)
        bias_cast_V = bias_V.to(ctx.dtype) if bias_V is not None else None
        total = None
        sink = ctx.sink
        if sink is None and ctx.needs_input_grad[1]:
            sink = total = _Sum(ctx.saved_tensors[1])
        hidden_gradients = []
        bias_gradient = torch.zeros_like(bias_V, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        chunks = list(zip(cast_MH.split(ctx.rows), labels_M.split(ctx.rows), strict=True))
        for number, (hidden_CH, labels_C) in enumerate(chunks, start=1):
            gradient_CV, ctx.kept_MV = ctx.kept_MV, None
            if gradient_CV is None:
                gradient_CV, _ = _gradient_and_loss(F.linear(hidden_CH, weight_VH, bias_cast_V), labels_C)
            # Before it is rounded: fp16 needs the loss scale in it.
            gradient_CV = gradient_CV.mul_(loss_gradient).to(ctx.dtype)
            if sink is not None:
                sink.add_product(gradient_CV, hidden_CH)
                if number == len(chunks):
                    sink.end_projection()
            if bias_gradient is not None:
                bias_gradient += gradient_CV.sum(0)
            if ctx.needs_input_grad[0]:
                hidden_gradients.append(torch.mm(gradient_CV, weight_VH))
        hidden_gradient = torch.cat(hidden_gradients).to(hidden_MH.dtype) if hidden_gradients else None
        return (
            hidden_gradient,
            total.weight_gradient_VH if total else None,
            bias_gradient.to(bias_V.dtype) if bias_gradient is not None else None,
            None,
            None,
        )


class _Sum(WeightGradientSink):
    """The sink that gives autograd the weight's gradient."""

    def __init__(self, weight_VH: torch.Tensor) -> None:
        self.weight_gradient_VH = torch.empty_like(weight_VH)
        self._is_first = True

    def add_product(self, gradient_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
        add_product(self.weight_gradient_VH, gradient_CV, hidden_CH, is_first=self._is_first)
        self._is_first = False


def _gradient_and_loss(logits_CV: torch.Tensor, labels_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the summed loss, (C, V) fp32, in the logits' memory if they are fp32; and the loss."""
    probability_CV = logits_CV.float()
    label_logits_C = probability_CV.gather(1, labels_C.unsqueeze(1)).squeeze(1)
    highest_C = probability_CV.amax(1)
    torch.softmax(probability_CV, dim=1, out=probability_CV)
    # At the highest logit exp(x - max) is 1: the probability there is one over the sum, whatever else underflows.
    loss = (highest_C - label_logits_C - probability_CV.amax(1).log()).sum()
    probability_CV[torch.arange(len(labels_C), device=labels_C.device), labels_C] -= 1
    return probability_CV, loss
