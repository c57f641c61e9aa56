"""`random`: uniformly shuffled batches, the baseline."""

from ds_bert.sampling.plan import StepPlan, Strategy


class Random(Strategy):
    """Consecutive runs of the drawn order."""

    def step(self, step: int) -> StepPlan:
        sizes = self.sizes
        samples = self.next_in_order(step)
        return StepPlan.of_equal_counts(samples.reshape(-1, sizes.world_size, sizes.micro_batch_size))
