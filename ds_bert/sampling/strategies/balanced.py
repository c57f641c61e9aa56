"""`balanced`: the global batches of `random`, dealt so that all ranks get the same work."""

import numpy as np

from ds_bert.errors import UserError
from ds_bert.sampling.deal import deal_equal_counts, deal_free_counts
from ds_bert.sampling.plan import StepPlan, Strategy


class Balanced(Strategy):
    """The samples of a step are sorted by length and dealt by cost.

    - Packed, or without accumulation: each micro-batch takes one sample of every run of neighbouring lengths, the
      longest of a run going to the micro-batch with the least work. All micro-batches cost the same.
    - Padded with accumulation: a micro-batch is a run of neighbouring lengths, which needs nearly no padding; all ranks
      run the runs of like length at the same micro-step, the dearest going to the rank with the least work.
    - With free counts each sample, longest first, goes to the micro-batch with the least work.
    - With a token budget a step is the longest run of the drawn order, found by bisection, that the deal with free
      counts fits into its micro-batches.
    """

    def __init__(self, order: np.ndarray, **kwargs) -> None:
        super().__init__(order, **kwargs)
        # With a token budget: where in the order each step starts, and the last one ends, as far as planned.
        self._starts, self._complete = [0], False
        budget = self.options.max_tokens_per_micro_batch
        longest = int(self.lengths.of_sample.max())
        if budget is not None and budget < longest:
            raise UserError(
                f"ds_bert.sampling.max_tokens_per_micro_batch: {budget} is less than the longest sample, which has "
                f"{longest} tokens; write {longest} or more, or prepare with a smaller --max-length"
            )

    @property
    def num_steps(self) -> int:
        if self.options.max_tokens_per_micro_batch is None:
            return super().num_steps
        while self.has_step(len(self._starts) - 1):
            pass
        return len(self._starts) - 1

    @property
    def num_used(self) -> int:
        return self.samples_before(self.num_steps)

    def samples_before(self, step: int) -> int:
        if self.options.max_tokens_per_micro_batch is None:
            return super().samples_before(step)
        self.has_step(step - 1)
        return self._starts[step]

    def has_step(self, step: int) -> bool:
        if self.options.max_tokens_per_micro_batch is None:
            return super().has_step(step)
        while len(self._starts) <= step + 1 and not self._complete:
            self._plan_start()
        return step + 1 < len(self._starts)

    def step(self, step: int) -> StepPlan:
        here = self.order[self.samples_before(step) : self.samples_before(step + 1)]
        samples, lengths = self.lengths.longest_first(here)
        sizes = self.sizes
        if self.options.max_tokens_per_micro_batch or not self.options.equal_counts:
            bins = deal_free_counts(self.lengths.cost_units[lengths], sizes.micro_batches)
            dealt = np.argsort(bins, kind="stable")
            counts = np.bincount(bins, minlength=sizes.micro_batches)
        else:
            dealt = np.arange(len(here))
            counts = np.full(sizes.micro_batches, sizes.micro_batch_size)
            if self.packed or sizes.gradient_accumulation_steps == 1:
                dealt = deal_equal_counts(self.lengths.cost_units[lengths], sizes.micro_batches).reshape(-1)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        if sizes.gradient_accumulation_steps == 1:
            return StepPlan(samples[dealt], bounds)
        costs = np.add.reduceat(self.lengths.cost_units[lengths[dealt]], bounds[:-1])
        return _deal_micro_batches(StepPlan(samples[dealt], bounds), costs, sizes.world_size)

    def _plan_start(self) -> None:
        """Find where the step after the last planned one starts, if there is one."""
        start, bins = self._starts[-1], self.sizes.micro_batches
        lengths = self._lengths_within(start, bins * self.options.max_tokens_per_micro_batch)
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
        return np.bincount(bins, weights=falling).max() <= self.options.max_tokens_per_micro_batch


def _deal_micro_batches(plan: StepPlan, costs: np.ndarray, world_size: int) -> StepPlan:
    """Give each rank one micro-batch of every micro-step: like costs at the same time, equal sums."""
    dearest_first = np.argsort(-costs, kind="stable")
    dealt_RG = deal_equal_counts(costs[dearest_first], world_size)
    numbers = dearest_first[dealt_RG.T.reshape(-1)]
    counts = np.diff(plan.bounds)[numbers]
    ends = np.cumsum(counts)
    within = np.arange(len(plan.samples)) - np.repeat(ends - counts, counts)
    return StepPlan(plan.samples[np.repeat(plan.bounds[numbers], counts) + within], np.concatenate([[0], ends]))
