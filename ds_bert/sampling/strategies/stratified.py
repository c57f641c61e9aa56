"""`stratified`: every micro-batch takes the same quota from each stratum of length; the paper's method."""

import itertools

import numpy as np

from ds_bert.sampling.plan import StepPlan, Strategy

# Samples looked at together: what is needed beside the order stays small with millions of them.
PART = 1 << 20


class Stratified(Strategy):
    """Strata are bounded by lengths (`edges`) or hold equally many samples (`strata`). Source: arXiv 2402.02447, where
    a micro-batch of 16 takes 6 : 3 : 2 : 5 from (0, 128], (128, 256], (256, 384], (384, 512].

    1. A stratum's size is rounded to a multiple of the number of ranks; the samples next to the bound change sides.
    2. The first t micro-steps together take from each stratum its share of their samples, in whole numbers by
       Webster's method, which never takes a seat back when there are more (largest remainders do). So the rounding is
       carried from step to step, and every stratum runs dry exactly at the epoch's end.
    3. Inside a stratum the samples keep their random order and are dealt to the ranks in turn.
    """

    takes_the_order_as_it_is = False

    def __init__(self, order: np.ndarray, **kwargs) -> None:
        super().__init__(order, **kwargs)
        ranks = self.sizes.world_size
        strata = self._divide(self.order[: self.num_used])
        self._strata = [stratum.reshape(-1, ranks) for stratum in strata if len(stratum)]
        self._rows = np.array([len(stratum) for stratum in self._strata], dtype=np.int64)

    def step(self, step: int) -> StepPlan:
        accumulation = self.sizes.gradient_accumulation_steps
        taken = [self._taken(t) for t in range(step * accumulation, (step + 1) * accumulation + 1)]
        micro_steps = [
            np.concatenate([s[a:b] for s, a, b in zip(self._strata, before, after, strict=True)]).T
            for before, after in itertools.pairwise(taken)
        ]
        return StepPlan.of_equal_counts(np.stack(micro_steps))

    def _divide(self, samples: np.ndarray) -> list[np.ndarray]:
        """The samples of each stratum, in their drawn order, a multiple of the number of ranks in each."""
        of_sample = self.lengths.of_sample
        parts = [slice(start, start + PART) for start in range(0, len(samples), PART)]
        counts = np.zeros(int(of_sample.max()) + 1, dtype=np.int64)
        for part in parts:
            counts += np.bincount(of_sample[samples[part]], minlength=len(counts))
        up_to = np.cumsum(counts)  # samples of at most each length
        cuts = self._cuts(up_to)
        # Where a length's first sample lies among all, sorted, tells its stratum; a cut inside a length moves the rest.
        stratum_of_length = np.searchsorted(cuts, up_to - counts, side="right")
        cut_lengths = np.searchsorted(up_to, cuts)
        left_below = cuts - (up_to - counts)[cut_lengths]  # samples of that length, in their order, below the cut
        stratum = np.empty(len(samples), dtype=np.min_scalar_type(len(cuts)))
        for part in parts:
            lengths = of_sample[samples[part]]
            stratum[part] = stratum_of_length[lengths]
            for cut, length in enumerate(cut_lengths):
                same = np.flatnonzero(lengths == length)
                stratum[part][same[left_below[cut] :]] += 1
                left_below[cut] = max(0, left_below[cut] - len(same))
        return [samples[stratum == number] for number in range(len(cuts) + 1)]

    def _cuts(self, up_to: np.ndarray) -> np.ndarray:
        """Where strata end in the samples sorted by length, but for the last: rising multiples of the ranks."""
        total, ranks = int(up_to[-1]), self.sizes.world_size
        if self.options.strata:
            exact = np.arange(1, self.options.strata) * (total / self.options.strata)
        else:
            edges = np.array(self.options.edges)
            exact = up_to[np.minimum(edges, len(up_to) - 1)]
        cuts = np.unique(np.rint(exact / ranks).astype(np.int64) * ranks)
        return cuts[(cuts > 0) & (cuts < total)]

    def _taken(self, micro_steps: int) -> np.ndarray:
        """Rows that the first `micro_steps` micro-steps take from each stratum: Webster's apportionment.

        Row j of a stratum with m rows stands at (j + 1/2) / m of the epoch; the rows that stand first are taken.
        """
        seats = micro_steps * self.sizes.micro_batch_size
        total = self.num_steps * self.sizes.gradient_accumulation_steps
        taken = (2 * self._rows * micro_steps + total) // (2 * total)  # all up to the share micro_steps / total
        while (missing := seats - taken.sum()) > 0:
            taken[np.argmin((2 * taken + 1) / (2 * self._rows))] += 1
        while missing < 0:
            latest = (2 * taken - 1) / (2 * self._rows)
            taken[len(latest) - 1 - np.argmax(latest[::-1])] -= 1
            missing += 1
        return taken
