"""Masked samples as a torch data set."""

import numpy as np
import torch

from ds_bert.data.batches.masking import MaskedSample, TokenMasker
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
