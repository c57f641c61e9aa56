"""The samples of one epoch in their drawn order, those carried over from the epoch before included."""

import numpy as np

from ds_bert.sampling.plan import Lengths

# Streams of random numbers that share a seed are told apart by a number of their own: seed + epoch would make
# epoch 1 of seed 0 the same order as epoch 0 of seed 1.
ORDER_STREAM = 1


class CarriedIndex(int):
    """The index of a sample that was drawn in the epoch before, for which there was no room then.

    Attributes:
        epoch: the epoch it was drawn in; a data set that masks by (epoch, sample) masks it for that one.
    """

    epoch: int

    def __new__(cls, index: int, epoch: int) -> "CarriedIndex":
        carried = super().__new__(cls, index)
        carried.epoch = epoch
        return carried

    def __getnewargs__(self) -> tuple[int, int]:
        return int(self), self.epoch


class DrawnEpoch:
    """The order of an epoch: first what was carried over, then all samples, shuffled.

    A carried sample can come again as itself in the same epoch, so inside an epoch the carried ones have numbers of
    their own, from `num_samples` on.

    Args:
        number: of the epoch.
        lengths: of all samples of the data set.
        seed: of the order.
        carried: samples left over from the epoch before.
    """

    def __init__(self, number: int, lengths: Lengths, seed: int, carried: np.ndarray) -> None:
        self.number, self.carried = number, carried
        self.num_samples = len(lengths.of_sample)
        drawn = np.arange(self.num_samples, dtype=np.int32)
        np.random.default_rng([seed, number, ORDER_STREAM]).shuffle(drawn)
        self.order, self.lengths = drawn, lengths
        if len(carried):
            numbers = np.arange(self.num_samples, self.num_samples + len(carried), dtype=np.int32)
            self.order = np.concatenate([numbers, drawn])
            of_sample = np.concatenate([lengths.of_sample, lengths.of_sample[carried]])
            self.lengths = Lengths(of_sample, lengths.cost_units)

    def samples(self, numbers: np.ndarray) -> np.ndarray:
        """The samples of the data set behind the epoch's numbers."""
        if not len(self.carried):
            return numbers
        samples = numbers.copy()
        is_carried = numbers >= self.num_samples
        samples[is_carried] = self.carried[numbers[is_carried] - self.num_samples]
        return samples

    def indices(self, numbers: np.ndarray) -> list[int]:
        """The same as plain integers for a data set, the carried ones as `CarriedIndex`."""
        if not len(self.carried):
            return numbers.tolist()
        pairs = zip(numbers.tolist(), self.samples(numbers).tolist(), strict=True)
        return [s if number < self.num_samples else CarriedIndex(s, self.number - 1) for number, s in pairs]
