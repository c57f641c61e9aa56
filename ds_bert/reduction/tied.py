"""A tied word embedding whose gradient comes in two parts that can be sent apart.

The decoder's part is dense and ready at the very start of the backward pass; the lookup's part has only the rows of
this batch's tokens and is ready at its very end. Autograd would add both, and the largest tensor of the model would be
sent last, with nothing left to hide it. Here both modules keep their weight gradient from autograd and hand it over.

T = tokens, V = vocabulary, H = width of the embedding, U = rows of the tokens seen.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ds_bert.layers.vocabulary_projection import VocabularyProjection, WeightGradientSink, add_product


class TiedEmbedding(WeightGradientSink):
    """The two uses of a tied embedding: collects their gradients over the micro-steps of an optimizer step.

    Args:
        name: of the weight in the model.
        embedding: looks rows of the weight up.
        decoder: multiplies with the same weight.
    """

    def __init__(self, name: str, embedding: nn.Embedding, decoder: nn.Linear) -> None:
        self.name, self.embedding, self.decoder = name, embedding, decoder
        self.weight = embedding.weight
        self.on_dense: Callable[[], None] = lambda: None
        """Called in the backward pass when the decoder's gradient is complete, before its input's is computed."""
        self.dense_VH: torch.Tensor | None = None
        self.buffer_VH: torch.Tensor | None = None
        """Memory for `dense_VH`, in the weight's dtype; None to allocate it."""
        self._lookups: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rows_held = 0
        self._ids: list[torch.Tensor] = []
        self._decodes_without_gradient = 0

    @classmethod
    def find(cls, module: nn.Module) -> "tuple[TiedEmbedding | None, str | None]":
        """Recognise the tied embedding of a Hugging Face model.

        Args:
            module: a model, with `get_input_embeddings` and `get_output_embeddings` as Hugging Face's have them.

        Returns:
            the embedding or None, and why a tied one cannot be split (None if there is none, or it can).
        """
        try:
            embedding, decoder = module.get_input_embeddings(), module.get_output_embeddings()
        except (AttributeError, NotImplementedError):
            return None, None
        weight = getattr(embedding, "weight", None)
        if weight is None or weight is not getattr(decoder, "weight", None) or not weight.requires_grad:
            return None, None
        name = next(name for name, parameter in module.named_parameters() if parameter is weight)
        # By identity: a tensor's == compares its elements.
        owners = [owner for owner in module.modules() if any(p is weight for p in owner._parameters.values())]
        if len(owners) != 2:
            return None, f"{len(owners)} modules share {name}"
        for owner, plain in ((embedding, [nn.Embedding]), (decoder, [nn.Linear, VocabularyProjection])):
            if type(owner).forward not in [kind.forward for kind in plain] or "forward" in vars(owner):
                return None, f"{type(owner).__name__}, which uses {name}, computes in a way of its own"
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            return None, f"the embedding {name} has max_norm, scale_grad_by_freq or sparse set"
        return cls(name, embedding, decoder), None

    def split(self) -> None:
        """From now on autograd computes no gradient of the weight; `dense_VH` and `lookup_rows` have it."""

        def look_up(ids: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                self._ids.append(ids.reshape(-1))
            return _Lookup.apply(ids, self.weight, self)

        self.embedding.forward = look_up
        VocabularyProjection.replace(self.decoder).sink = self

    def unsplit(self) -> None:
        """Give the weight back to autograd, with the gradient collected so far."""
        del self.embedding.forward
        self.decoder.sink = None
        self.buffer_VH = None
        parts = [self.dense_VH] if self.dense_VH is not None else []
        if self._lookups:
            parts.append(self._sum_lookups_densely())
        if parts:
            gradient = sum(parts[1:], start=parts[0])
            self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient
        self.clear()

    def clear(self) -> None:
        """Forget what was collected: an optimizer step is over."""
        self.dense_VH, self._lookups, self._rows_held, self._ids = None, [], 0, []
        self._decodes_without_gradient = 0

    @property
    def has_lookups(self) -> bool:
        return bool(self._lookups)

    @property
    def has_third_use(self) -> bool:
        """Whether autograd gave the weight a gradient all the same."""
        return self.weight.grad is not None and self.weight.grad is not self.buffer_VH

    def seen_rows(self) -> torch.Tensor:
        """Which rows were looked up since `clear`, in forward passes: (V,) uint8, 0 or 1."""
        seen_V = torch.zeros(self.weight.shape[0], dtype=torch.uint8, device=self.weight.device)
        for ids in self._ids:
            seen_V[ids] = 1
        return seen_V

    def lookup_rows(self, position_V: torch.Tensor, rows: int) -> torch.Tensor:
        """The lookup's gradient: (rows, H) fp32.

        Args:
            position_V: (V,) int64, where the row of each token goes.
            rows: number of rows.
        """
        rows_UH = torch.zeros(rows, self.weight.shape[1], dtype=torch.float32, device=self.weight.device)
        for ids, gradient_TH in self._lookups:
            rows_UH.index_add_(0, position_V[ids], gradient_TH.float())
        return rows_UH

    def begin_projection(self) -> None:
        self._decodes_without_gradient += 1

    def add_product(self, gradient_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
        is_first = self.dense_VH is None
        if is_first:
            if self.weight.grad is self.buffer_VH:
                self.weight.grad = None  # zeroed, not dropped: a third use would be added to it unseen
            self.dense_VH = torch.empty_like(self.weight) if self.buffer_VH is None else self.buffer_VH
        add_product(self.dense_VH, gradient_CV, hidden_CH, is_first=is_first)

    def end_projection(self) -> None:
        # A head may decode in several pieces.
        self._decodes_without_gradient -= 1
        if self._decodes_without_gradient <= 0:
            self.on_dense()

    def add_lookup(self, ids: torch.Tensor, gradient_TH: torch.Tensor) -> None:
        ids = ids.reshape(-1)
        gradient_TH = gradient_TH.reshape(len(ids), -1)
        if self.embedding.padding_idx is not None:
            kept = ids != self.embedding.padding_idx
            gradient_TH = gradient_TH * kept.unsqueeze(1)
        self._lookups.append((ids, gradient_TH))
        self._rows_held += len(ids)
        # With much accumulation the rows of all tokens would be more than the embedding itself.
        if self._rows_held > self.weight.shape[0]:
            self._merge_lookups()

    def _merge_lookups(self) -> None:
        unique = torch.cat([ids for ids, _ in self._lookups]).unique()
        position_V = torch.zeros(self.weight.shape[0], dtype=torch.int64, device=self.weight.device)
        position_V[unique] = torch.arange(len(unique), device=self.weight.device)
        self._lookups = [(unique, self.lookup_rows(position_V, len(unique)))]
        self._rows_held = len(unique)

    def _sum_lookups_densely(self) -> torch.Tensor:
        everywhere = torch.arange(self.weight.shape[0], device=self.weight.device)
        return self.lookup_rows(everywhere, len(everywhere)).to(self.weight.dtype)


class _Lookup(torch.autograd.Function):
    """`F.embedding` that hands its weight gradient to the `TiedEmbedding` as rows."""

    @staticmethod
    def forward(ctx, ids, weight_VH, tied):
        ctx.save_for_backward(ids)
        ctx.tied = tied
        return F.embedding(ids, weight_VH)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (ids,) = ctx.saved_tensors
        ctx.tied.add_lookup(ids, gradient)
        return None, None, None
