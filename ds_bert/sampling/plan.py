"""What a strategy is given and what it returns."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_bert.config import SamplingConfig


@dataclass(frozen=True)
class BatchSizes:
    """How a global batch is split."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    world_size: int

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an optimizer step, over all ranks."""
        return self.gradient_accumulation_steps * self.world_size

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.micro_batches


class StepPlan(NamedTuple):
    """One optimizer step, dealt: micro-batch g x world_size + r is micro-step g of rank r."""

    samples: np.ndarray
    """(N,) integers, the samples of one micro-batch after the other."""
    bounds: np.ndarray
    """(micro-batches + 1,) integers: micro-batch m is samples[bounds[m]:bounds[m + 1]]; none is empty."""

    @classmethod
    def of_equal_counts(cls, samples_GWB: np.ndarray) -> "StepPlan":
        """From an array of micro-steps x ranks x samples."""
        count = samples_GWB.shape[-1]
        return cls(samples_GWB.reshape(-1), np.arange(0, samples_GWB.size + 1, count))

    def micro_batch(self, number: int) -> np.ndarray:
        return self.samples[self.bounds[number] : self.bounds[number + 1]]


@dataclass(frozen=True)
class Lengths:
    """The samples' lengths and what they cost."""

    of_sample: np.ndarray
    """(n,) unsigned integers, tokens of each sample."""
    cost_units: np.ndarray
    """(longest + 1,) int64, cost by length, see `cost.cost_units`."""

    def longest_first(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The samples by falling length, equal ones in the order they come in, and their lengths."""
        lengths = self.of_sample[samples]
        # Unsigned 16-bit numbers are sorted by numpy's radix sort, ten times as fast as others.
        order = np.argsort(np.iinfo(lengths.dtype).max - lengths, kind="stable")
        return samples[order], lengths[order]


class Strategy(ABC):
    """Cuts an epoch, or what is left of one, into optimizer steps.

    Every strategy uses a prefix of the samples in their drawn order, so what it leaves out is a random choice, never
    one by length. It is a pure function of its arguments.

    Args:
        order: (n,) int32, the samples in the order drawn for the epoch; strategies do not change it.
        lengths: of all samples of the data set.
        sizes: of a batch.
        options: the section "sampling".
        packed: whether micro-batches run without padding.
        key: seed and epoch, for random numbers of the strategy's own.
    """

    takes_the_order_as_it_is = True
    """Whether step s always uses the samples that come next in `order`, so that a resumed run can go on with any
    sizes without knowing the sizes before."""

    def __init__(
        self,
        order: np.ndarray,
        *,
        lengths: Lengths,
        sizes: BatchSizes,
        options: SamplingConfig,
        packed: bool,
        key: tuple[int, int],
    ) -> None:
        self.order, self.lengths, self.sizes, self.key = order, lengths, sizes, key
        self.options, self.packed = options, packed

    @property
    def num_steps(self) -> int:
        """Optimizer steps, the same on every rank."""
        return len(self.order) // self.sizes.global_batch_size

    @property
    def num_used(self) -> int:
        """Samples of `order`, from its start, that the steps use."""
        return self.samples_before(self.num_steps)

    def has_step(self, step: int) -> bool:
        """Whether there is such a step; cheaper than `num_steps` where that needs the whole plan."""
        return step < self.num_steps

    def samples_before(self, step: int) -> int:
        """Samples that the steps before `step` use."""
        return step * self.sizes.global_batch_size

    def next_in_order(self, step: int) -> np.ndarray:
        """What step `step` uses, if the strategy takes the order as it is."""
        return self.order[self.samples_before(step) : self.samples_before(step + 1)]

    def order_after(self, steps: int, samples: int) -> np.ndarray:
        """The part of `order` that the first `steps` steps, with so many samples, leave, in the same order."""
        if self.takes_the_order_as_it_is:
            return self.order[samples:]
        used = np.zeros(len(self.lengths.of_sample), dtype=bool)
        for step in range(steps):
            used[self.step(step).samples] = True
        return self.order[~used[self.order]]

    @abstractmethod
    def step(self, step: int) -> StepPlan:
        """Optimizer step `step` of all ranks."""
