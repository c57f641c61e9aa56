"""`random`: uniformly shuffled batches, the baseline."""

from ds_bert.sampling.plan import StepPlan, Strategy


class Random(Strategy):
    """Consecutive runs of the drawn order."""

    def step(self, step: int) -> StepPlan:
        sizes = self.sizes
        samples = self.order[step * sizes.global_batch_size : (step + 1) * sizes.global_batch_size]
        return StepPlan.of_equal_counts(samples.reshape(-1, sizes.world_size, sizes.micro_batch_size))
