"""Which tokens of a sample are masked, as a pure function of (seed, epoch, sample)."""

from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from ds_bert.data.tokenizer import special_token_ids

# Streams of random numbers that share a seed (see sampling.epoch.ORDER_STREAM).
TRAINING_MASKS = 2
EVALUATION_MASKS = 3

# Devlin et al. 2018 (arXiv 1810.04805), section 3.1: of the chosen tokens 80% become [MASK], 10% a random token,
# 10% stay as they are.
SHARE_MASKED = 0.8
SHARE_RANDOM = 0.1


class MaskedSample(NamedTuple):
    """One sample, masked. T = its tokens, M = its masked tokens."""

    input_ids: np.ndarray
    """(T,) int64, with the masked tokens replaced."""
    positions: np.ndarray
    """(M,) int64, ascending indices into input_ids."""
    labels: np.ndarray
    """(M,) int64, the original tokens there."""


class TokenMasker:
    """Masks single tokens.

    The number of masks depends on the sample alone, max(1, round(probability x maskable)) with halves rounded to even,
    so that the loss's denominator is known before training. Which tokens, and what replaces them, is drawn from a
    generator keyed by (seed, stream, epoch, sample): the same on every rank, in every worker, after every resume.

    Args:
        tokenizer: its special tokens (unknown token included) are never masked and never drawn as replacement.
        probability: share of the maskable tokens.
        seed: of the run.
        stream: `TRAINING_MASKS` or `EVALUATION_MASKS`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        probability: float,
        seed: int,
        stream: int = TRAINING_MASKS,
    ) -> None:
        self.probability = probability
        self.seed = seed
        self.stream = stream
        self.mask_token_id = tokenizer.mask_token_id
        self._is_maskable = np.ones(len(tokenizer), dtype=bool)
        self._is_maskable[special_token_ids(tokenizer)] = False
        self._replacement_ids = np.flatnonzero(self._is_maskable)

    def num_masked(self, maskable: np.ndarray) -> np.ndarray:
        """Masked tokens of samples with so many maskable tokens: int64, of the shape of `maskable`."""
        return np.maximum(1, np.rint(self.probability * np.asarray(maskable))).astype(np.int64)

    def __call__(self, input_ids: np.ndarray, *, epoch: int, sample: int) -> MaskedSample:
        """Mask one sample.

        Args:
            input_ids: (T,) integers with at least one maskable token; not changed.
            epoch: a sample is masked anew in each epoch.
            sample: its index in the data set.
        """
        rng = np.random.default_rng([self.seed, self.stream, epoch, sample])
        candidates = np.flatnonzero(self._is_maskable[input_ids])
        count = int(self.num_masked(len(candidates)))
        positions = np.sort(rng.choice(candidates, size=count, replace=False))
        masked_ids = input_ids.astype(np.int64)
        labels = masked_ids[positions]
        fate = rng.random(count)
        replacements = rng.choice(self._replacement_ids, size=count)
        replacements[fate < SHARE_MASKED] = self.mask_token_id
        kept = fate >= SHARE_MASKED + SHARE_RANDOM
        replacements[kept] = labels[kept]
        masked_ids[positions] = replacements
        return MaskedSample(masked_ids, positions, labels)
