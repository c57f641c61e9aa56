"""Masked samples put together to micro-batches, padded or packed."""

from typing import NamedTuple

import numpy as np
import torch

from ds_bert.data.batches.masking import MaskedSample


class MaskedBatch(NamedTuple):
    """A micro-batch. M = masked tokens."""

    model_inputs: dict[str, torch.Tensor | int]
    """Keyword arguments of a Hugging Face model's forward."""
    positions: torch.Tensor
    """(M,) int64, indices of the masked tokens into the flattened `input_ids`."""
    labels: torch.Tensor
    """(M,) int64, the original tokens there."""
    real_tokens: int
    """Tokens that are no padding."""

    @property
    def padded_tokens(self) -> int:
        """Tokens that are computed, padding included."""
        return self.model_inputs["input_ids"].numel()

    def to(self, device: torch.device) -> "MaskedBatch":
        def move(value: torch.Tensor | int) -> torch.Tensor | int:
            return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value

        inputs = {name: move(value) for name, value in self.model_inputs.items()}
        return MaskedBatch(inputs, move(self.positions), move(self.labels), self.real_tokens)


class PaddingCollator:
    """Pads samples to the longest of their micro-batch: rows of `input_ids` and `attention_mask`, (B, L) int64.

    Which positions are padding is told by lengths alone, so a tokenizer whose pad token doubles as another special
    token does no harm.

    Args:
        pad_token_id: written into the padding; attention never sees it.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, samples: list[MaskedSample]) -> MaskedBatch:
        lengths = _lengths(samples)
        longest = lengths.max()
        input_ids = np.full((len(samples), longest), self.pad_token_id, dtype=np.int64)
        for row, sample in zip(input_ids, samples, strict=True):
            row[: len(sample.input_ids)] = sample.input_ids
        attention_mask = (np.arange(longest) < lengths[:, None]).astype(np.int64)
        inputs = {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(attention_mask)}
        return _masked_batch(inputs, samples, np.arange(len(samples)) * longest)


class PackingCollator:
    """Puts samples one after the other into one row, without padding, for `modeling.packed_attention`.

    `input_ids` are (1, T) int64, T = tokens; `packed_row` has the rest. Samples are sorted by length, so that those of
    one length can be attended together.

    Args:
        first_position: of each sample (`modeling.first_position`).
    """

    def __init__(self, first_position: int = 0) -> None:
        self.first_position = first_position

    def __call__(self, samples: list[MaskedSample]) -> MaskedBatch:
        samples = sorted(samples, key=lambda sample: len(sample.input_ids))
        input_ids = torch.from_numpy(np.concatenate([sample.input_ids for sample in samples])).unsqueeze(0)
        inputs = {"input_ids": input_ids, **packed_row(_lengths(samples), self.first_position)}
        return _masked_batch(inputs, samples, inputs["cu_seq_lens_q"][:-1].numpy())


Collator = PaddingCollator | PackingCollator


def packed_row(lengths: np.ndarray, first_position: int = 0) -> dict[str, torch.Tensor | int]:
    """What a model must know of the S sequences of a row of T tokens.

    Args:
        lengths: (S,) integers, tokens of each.
        first_position: number of the first position of each (`modeling.first_position`).

    Returns:
        `position_ids`: (1, T) int64, restarting with each sequence; and, under the names that transformers has for
        flash-attention, `cu_seq_lens_q` and `_k`: (S + 1,) int32, where each begins, and T; `max_length_q` and `_k`.
    """
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(boundaries[-1]) - np.repeat(boundaries[:-1], lengths) + first_position
    cumulative, longest = torch.from_numpy(boundaries.astype(np.int32)), int(max(lengths))
    return {
        "position_ids": torch.from_numpy(positions).unsqueeze(0),
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _lengths(samples: list[MaskedSample]) -> np.ndarray:
    return np.array([len(sample.input_ids) for sample in samples])


def _masked_batch(inputs: dict, samples: list[MaskedSample], starts: np.ndarray) -> MaskedBatch:
    positions = np.concatenate([sample.positions + start for sample, start in zip(samples, starts, strict=True)])
    labels = np.concatenate([sample.labels for sample in samples])
    return MaskedBatch(inputs, torch.from_numpy(positions), torch.from_numpy(labels), int(_lengths(samples).sum()))
