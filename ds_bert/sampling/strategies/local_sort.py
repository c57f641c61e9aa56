"""`local_sort`: each rank sorts windows of its own shard by length; the least padding."""

import numpy as np

from ds_bert.sampling.plan import StepPlan, Strategy

# A stream of random numbers that shares the run's seed (see sampling.epoch.ORDER_STREAM).
WINDOW_STREAM = 5


class LocalSort(Strategy):
    """A window is a run of micro-steps. Inside it each rank sorts its own samples by length and cuts them into
    micro-batches (`window_scope` "rank"), or all ranks' samples are sorted together ("world"). The micro-steps of a
    window then come in a random order that is the same on all ranks, so that at each micro-step all ranks run their
    q-th shortest micro-batch. Windows need no shuffling of their own: the samples come in random order.
    """

    takes_the_order_as_it_is = False

    def __init__(self, order: np.ndarray, **kwargs) -> None:
        super().__init__(order, **kwargs)
        self._window: tuple[int, np.ndarray] | None = None

    def step(self, step: int) -> StepPlan:
        window, accumulation = self.options.window, self.sizes.gradient_accumulation_steps
        micro_steps = range(step * accumulation, (step + 1) * accumulation)
        return StepPlan.of_equal_counts(np.stack([self._sorted(t // window)[t % window] for t in micro_steps]))

    def _sorted(self, number: int) -> np.ndarray:
        """Window `number`: (micro-steps, ranks, micro-batch) samples."""
        if self._window is None or self._window[0] != number:
            self._window = (number, self._sort(number))
        return self._window[1]

    def _sort(self, number: int) -> np.ndarray:
        ranks, batch = self.sizes.world_size, self.sizes.micro_batch_size
        first = number * self.options.window * ranks * batch
        samples = self.order[first : min(first + self.options.window * ranks * batch, self.num_used)]
        if self.options.window_scope == "rank":
            shards_RN = samples.reshape(ranks, -1)
            shards_RN = np.stack([self.lengths.longest_first(shard)[0] for shard in shards_RN])
            sorted_TRB = shards_RN.reshape(ranks, -1, batch).swapaxes(0, 1)
        else:
            sorted_TRB = self.lengths.longest_first(samples)[0].reshape(-1, ranks, batch).copy()
            # Else rank 0 would always have the longest.
            sorted_TRB[1::2] = sorted_TRB[1::2, ::-1]
        seed, epoch = self.key
        return sorted_TRB[np.random.default_rng([seed, WINDOW_STREAM, epoch, number]).permutation(len(sorted_TRB))]
