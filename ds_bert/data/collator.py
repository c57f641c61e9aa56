"""Masked samples as a torch data set, and their batches."""

from typing import NamedTuple

import numpy as np
import torch

from ds_bert.data.masking import MaskedSample, TokenMasker
from ds_bert.data.prepared import PreparedSplit


class MaskedLMDataset(torch.utils.data.Dataset):
    """Samples of a prepared split, masked for the current epoch.

    Args:
        split: the samples.
        masker: chooses and replaces the masked tokens.
    """

    def __init__(self, split: PreparedSplit, masker: TokenMasker) -> None:
        self.split = split
        self.masker = masker
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Mask for `epoch` from now on; call it before the DataLoader's workers start."""
        self.epoch = epoch

    def num_masked(self, samples: np.ndarray) -> np.ndarray:
        """Masked tokens of each of these samples, in every epoch: (len(samples),) int64."""
        return self.masker.num_masked(self.split.maskable[samples])

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> MaskedSample:
        # An index carried over from the epoch before keeps that epoch's masks (sampling.CarriedIndex).
        return self.masker(self.split[index], epoch=getattr(index, "epoch", self.epoch), sample=int(index))


class MaskedBatch(NamedTuple):
    """A micro-batch. B = samples, L = length of the longest, M = masked tokens."""

    input_ids: torch.Tensor
    """(B, L) int64, padded at the end."""
    attention_mask: torch.Tensor
    """(B, L) int64: 1 for a token, 0 for padding."""
    positions: torch.Tensor
    """(M,) int64, indices of the masked tokens into the B x L tokens."""
    labels: torch.Tensor
    """(M,) int64, the original tokens there."""
    real_tokens: int
    """Tokens that are no padding."""

    def to(self, device: torch.device) -> "MaskedBatch":
        return MaskedBatch(*(part.to(device, non_blocking=True) for part in self[:4]), self.real_tokens)


class PaddingCollator:
    """Pads samples to the longest of their micro-batch.

    Which positions are padding is told by lengths alone, so a tokenizer whose pad token doubles as another special
    token does no harm.

    Args:
        pad_token_id: written into the padding; attention never sees it.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, samples: list[MaskedSample]) -> MaskedBatch:
        lengths = np.array([len(sample.input_ids) for sample in samples])
        longest = lengths.max()
        input_ids = np.full((len(samples), longest), self.pad_token_id, dtype=np.int64)
        for row, sample in zip(input_ids, samples, strict=True):
            row[: len(sample.input_ids)] = sample.input_ids
        attention_mask = (np.arange(longest) < lengths[:, None]).astype(np.int64)
        positions = np.concatenate([sample.positions + row * longest for row, sample in enumerate(samples)])
        labels = np.concatenate([sample.labels for sample in samples])
        return MaskedBatch(
            *map(torch.from_numpy, (input_ids, attention_mask, positions, labels)),
            real_tokens=int(lengths.sum()),
        )
