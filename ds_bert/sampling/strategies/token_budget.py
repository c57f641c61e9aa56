"""`balanced` with `max_tokens_per_micro_batch`: micro-batches filled up to a number of tokens."""

import numpy as np

from ds_bert.errors import UserError
from ds_bert.sampling.deal import deal_free_counts
from ds_bert.sampling.strategies.balanced import Balanced


class TokenBudget(Balanced):
    """A step is the longest run of the drawn order, found by bisection, that the deal with free counts fits into its
    micro-batches. So steps hold different numbers of samples, and where a step starts follows from all before it.
    """

    equal_counts = False

    def __init__(self, order: np.ndarray, **kwargs) -> None:
        super().__init__(order, **kwargs)
        self._starts = [0]  # where in the order each step starts, and the last one ends, as far as planned
        self._complete = False
        self.budget = self.options.max_tokens_per_micro_batch
        longest = int(self.lengths.of_sample.max())
        if self.budget < longest:
            raise UserError(
                f"ds_bert.sampling.max_tokens_per_micro_batch: {self.budget} is less than the longest sample, which "
                f"has {longest} tokens; write {longest} or more, or prepare with a smaller --max-length"
            )

    @property
    def num_steps(self) -> int:
        while not self._complete:
            self._plan_start()
        return len(self._starts) - 1

    def samples_before(self, step: int) -> int:
        self.has_step(step - 1)
        return self._starts[step]

    def has_step(self, step: int) -> bool:
        while len(self._starts) <= step + 1 and not self._complete:
            self._plan_start()
        return step + 1 < len(self._starts)

    def _plan_start(self) -> None:
        """Find where the step after the last planned one starts, if there is one."""
        start, bins = self._starts[-1], self.sizes.micro_batches
        lengths = self._lengths_within(start, bins * self.budget)
        # Down from what the micro-batches could hold if they were filled to the last token, in doubling strides.
        too_many, fits, stride = len(lengths) + 1, len(lengths), 1
        while fits > bins and not self._deal_fits(lengths[:fits]):
            too_many, fits, stride = fits, max(bins, fits - stride), 2 * stride
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._deal_fits(lengths[:middle]):
                fits = middle
            else:
                too_many = middle
        if fits < bins or start + fits >= len(self.order):
            self._complete = True  # what is left does not fill a step
        else:
            self._starts.append(start + fits)

    def _lengths_within(self, start: int, tokens: int) -> np.ndarray:
        """The lengths of the samples from `start` on that hold no more than so many tokens together."""
        count = tokens // int(self.lengths.of_sample.max())
        while True:
            lengths = self.lengths.of_sample[self.order[start : start + count]]
            sums = np.cumsum(lengths, dtype=np.int64)
            if len(lengths) < count or sums[-1] > tokens:
                return lengths[: np.searchsorted(sums, tokens, side="right")]
            count *= 2

    def _deal_fits(self, lengths: np.ndarray) -> bool:
        falling = np.sort(lengths)[::-1]
        bins = deal_free_counts(self.lengths.cost_units[falling], self.sizes.micro_batches)
        return np.bincount(bins, weights=falling).max() <= self.budget
