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
    2. The first t micro-steps together take from each stratum its share of their samples, in whole numbers: row j of a
       stratum of m rows has its turn at (j + phase) / m of the epoch. So the rounding is carried from step to step, a
       seat once given is never taken back (as largest remainders do), and every stratum runs dry at the epoch's end.
       The phases are such that a micro-batch of fewer samples than strata takes short and long ones in pairs.
    3. Inside a stratum the samples keep their random order and are dealt to the ranks in turn.
    """

    takes_the_order_as_it_is = False

    def __init__(self, order: np.ndarray, **kwargs) -> None:
        super().__init__(order, **kwargs)
        ranks = self.sizes.world_size
        strata = self._divide(self.order[: self.num_used])
        self._strata = [stratum.reshape(-1, ranks) for stratum in strata if len(stratum)]
        self._rows = np.array([len(stratum) for stratum in self._strata], dtype=np.int64)
        self._phases = 2 * _spread_out(len(self._strata)) + 1  # in units of 1 / (2 strata)

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
        """Rows that the first `micro_steps` micro-steps take from each stratum: those whose turn comes first."""
        seats = micro_steps * self.sizes.micro_batch_size
        total = self.num_steps * self.sizes.gradient_accumulation_steps
        unit = 2 * len(self._rows)
        # Whose turn comes up to the share micro_steps / total; some too few or too many.
        taken = (unit * self._rows * micro_steps + (unit - self._phases) * total) // (unit * total)
        while (missing := seats - taken.sum()) > 0:
            taken[np.argmin((unit * taken + self._phases) / self._rows)] += 1
        while missing < 0:
            latest = (unit * (taken - 1) + self._phases) / self._rows
            taken[len(latest) - 1 - np.argmax(latest[::-1])] -= 1
            missing += 1
        return taken


def _spread_out(count: int) -> np.ndarray:
    """A place for each of the numbers below `count`: every number next to its mirror image, the pairs by bit reversal,
    so that the numbers of every beginning with whole pairs have the same mean as all and are spread out.
    """
    half = (count + 1) // 2
    bits = max(1, (half - 1).bit_length())
    order = sorted(range(half), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))
    places = np.empty(count, dtype=np.int64)
    pairs = [number for low in order for number in dict.fromkeys((low, count - 1 - low))]
    places[pairs] = np.arange(count)
    return places
