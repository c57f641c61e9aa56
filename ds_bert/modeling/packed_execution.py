"""Whether a model computes the same for packed sequences as for padded ones."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel, PreTrainedTokenizerBase

from ds_bert.data.batches.collators import Collator, PackingCollator, PaddingCollator
from ds_bert.data.batches.masking import MaskedSample
from ds_bert.errors import UserError, first_line
from ds_bert.layers.cpu_dropout import use_cpu_dropout
from ds_bert.modeling.build import first_position, usable_positions
from ds_bert.modeling.masked_head import MaskedPositionHead
from ds_bert.modeling.packed_attention import PACKED_ATTENTION, packed_attention

KEY = "ds_bert.execution.packed"

# Of logits in fp32, of the largest where that is less than 1. Between kernels it is some 1e-6; a leak between
# sequences at a usual initialisation is 6e-4 and more.
MAX_DIFFERENCE = 1e-4

# One shorter than any window, one that is cut by windows such as ModernBERT's of 128 tokens.
CHECKED_LENGTHS = (3, 40, 200)


def collator_for(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, packed: bool) -> Collator:
    """What makes this model's batches; with `packed` the model's attention is switched to packed rows.

    Padded batches work then as before.
    """
    if not packed:
        return PaddingCollator(tokenizer.pad_token_id or 0)
    model.set_attn_implementation(PACKED_ATTENTION)
    return PackingCollator(first_position(model))


def use_packed_execution(model: PreTrainedModel) -> None:
    """Prepare a model for the rows of `ds_bert.data.PackedMaskedLMCollator`, in Hugging Face's Trainer or any loop.

    Attention stays within sequences (padded batches work as before), and where `labels` are given the head is computed
    on the positions whose label is not -100 only: `logits` are (1, M, V) then, M = those positions, V = vocabulary.

    Args:
        model: a Hugging Face model `...ForMaskedLM` in fp32, before it is wrapped.

    Raises:
        UserError: see `check_packed_execution`.
    """
    check_packed_execution(model, advice="train it with padded batches")
    model.set_attn_implementation(PACKED_ATTENTION)
    use_cpu_dropout(model)
    MaskedPositionHead(model).follow_labels(model)


def check_packed_execution(model: PreTrainedModel, *, advice: str = f'set "{KEY}": false') -> None:
    """Compare the logits of some random sequences, packed against padded as the model came; it stays as it is.

    Args:
        model: in fp32.
        advice: what to do with a model that is refused.

    Raises:
        UserError: the model is not in fp32, or does not use transformers' attention interface, or not alone.
    """
    if model.dtype != torch.float32:
        raise UserError(f"{type(model).__name__} is in {model.dtype}; load it in torch.float32, the check needs that")
    was_training, before = model.training, model.config._attn_implementation
    model.eval()
    try:
        problem = _packed_problem(model)
    except Exception as error:  # whatever a model does with inputs it does not know
        problem = f"{type(error).__name__}: {first_line(error)}"
    finally:
        model.train(was_training)
        model.set_attn_implementation(before)
    if problem:
        raise UserError(
            f"{type(model).__name__} cannot compute packed sequences as it computes padded ones ({problem}); {advice}"
        )


def _packed_problem(model: PreTrainedModel) -> str | None:
    samples = _random_samples(model)
    padded = PaddingCollator(model.config.pad_token_id or 0)(samples)
    packed = PackingCollator(first_position(model))(samples)
    with torch.no_grad():
        expected = model(**padded.model_inputs).logits.flatten(0, 1)[padded.positions]
        model.set_attn_implementation(PACKED_ATTENTION)
        with _counted_calls() as calls:
            found = model(**packed.model_inputs).logits.flatten(0, 1)[packed.positions]
    if not calls:
        # With small weights its logits might hardly differ.
        return "it has an attention of its own"
    difference = (found - expected).abs().max().item()
    limit = MAX_DIFFERENCE * min(1.0, expected.abs().max().item())
    return None if difference <= limit else f"its logits differ by {difference:.1g}"


@contextlib.contextmanager
def _counted_calls() -> Iterator[list]:
    """Calls of the packed attention, as they come."""
    calls: list = []

    def counted(module, *args, **kwargs):
        calls.append(module)
        return packed_attention(module, *args, **kwargs)

    AttentionInterface.register(PACKED_ATTENTION, counted)
    try:
        yield calls
    finally:
        AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _random_samples(model: PreTrainedModel) -> list[MaskedSample]:
    rng = np.random.default_rng(0)
    # RoBERTa gives the padding token no position of its own, wherever it stands.
    usable = np.setdiff1d(np.arange(model.get_input_embeddings().num_embeddings), [model.config.pad_token_id or 0])
    lengths = sorted(min(length, usable_positions(model)) for length in CHECKED_LENGTHS)
    ids = [rng.choice(usable, length) for length in lengths]
    return [MaskedSample(sample, np.arange(len(sample)), sample) for sample in ids]
