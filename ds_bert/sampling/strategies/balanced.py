"""`balanced`: the global batches of `random`, dealt so that all ranks get the same work."""

import numpy as np

from ds_bert.sampling.deal import deal_equal_counts, deal_free_counts
from ds_bert.sampling.plan import StepPlan, Strategy


class Balanced(Strategy):
    """The samples of a step are sorted by length and dealt by cost.

    - Packed, or without accumulation: each micro-batch takes one sample of every run of neighbouring lengths, the
      longest of a run going to the micro-batch with the least work. All micro-batches cost the same.
    - Padded with accumulation: a micro-batch is a run of neighbouring lengths, which needs nearly no padding; all ranks
      run the runs of like length at the same micro-step, the dearest going to the rank with the least work.
    - With free counts each sample, longest first, goes to the micro-batch with the least work.

    The deal gives its first bin the longest sample; the bins change ranks from step to step, so that no rank always has
    it (padded execution waits for that rank).
    """

    @property
    def equal_counts(self) -> bool:
        """Whether all micro-batches hold the same number of samples."""
        return self.options.equal_counts

    def step(self, step: int) -> StepPlan:
        samples, lengths = self.lengths.longest_first(self.next_in_order(step))
        sizes = self.sizes
        if not self.equal_counts:
            bins = deal_free_counts(self.lengths.cost_units[lengths], sizes.micro_batches)
            bins = (bins + step) % sizes.micro_batches
            dealt = np.argsort(bins, kind="stable")
            counts = np.bincount(bins, minlength=sizes.micro_batches)
        else:
            dealt = np.arange(len(samples))
            counts = np.full(sizes.micro_batches, sizes.micro_batch_size)
            if self.packed or sizes.gradient_accumulation_steps == 1:
                bins = deal_equal_counts(self.lengths.cost_units[lengths], sizes.micro_batches)
                dealt = np.roll(bins, step, axis=0).reshape(-1)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        if sizes.gradient_accumulation_steps == 1:
            return StepPlan(samples[dealt], bounds)
        costs = np.add.reduceat(self.lengths.cost_units[lengths[dealt]], bounds[:-1])
        return _deal_micro_batches(StepPlan(samples[dealt], bounds), costs, sizes.world_size, step)


def _deal_micro_batches(plan: StepPlan, costs: np.ndarray, world_size: int, first_rank: int) -> StepPlan:
    """Give each rank one micro-batch of every micro-step: like costs at the same time, equal sums."""
    dearest_first = np.argsort(-costs, kind="stable")
    dealt_RG = np.roll(deal_equal_counts(costs[dearest_first], world_size), first_rank, axis=0)
    numbers = dearest_first[dealt_RG.T.reshape(-1)]
    counts = np.diff(plan.bounds)[numbers]
    ends = np.cumsum(counts)
    within = np.arange(len(plan.samples)) - np.repeat(ends - counts, counts)
    return StepPlan(plan.samples[np.repeat(plan.bounds[numbers], counts) + within], np.concatenate([[0], ends]))
