"""How evenly a sampling strategy loads the ranks, computed from lengths alone for any number of ranks."""

import itertools
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from ds_bert.sampling import LengthBalancedBatchSampler, StepPlan


@dataclass(frozen=True)
class Execution:
    """What a strategy gives when micro-batches run packed, or padded to their longest sample.

    Every figure of a step compares the ranks' work over all micro-steps of the step, in the cost model's unit. One
    is the best that can be had.
    """

    max_over_mean: np.ndarray
    """(steps,) work of the rank with the most work / mean over ranks."""
    time_over_ideal: np.ndarray
    """(steps,) work of the rank with the most work, padding included / mean over ranks without padding."""
    ideal: np.ndarray
    """(steps,) mean work of a rank without padding."""
    padding_share: float
    """Share of the tokens that are padding."""
    peak_tokens: int
    """Tokens, padding included, of the largest micro-batch: what a rank's memory must hold."""
    one_step: np.ndarray
    """(ranks,) work of each rank in the first step / mean over ranks without padding."""


@dataclass(frozen=True)
class StrategyReport:
    """A strategy on one cluster."""

    packed: Execution
    padded: Execution
    steps: int
    """Steps planned: as many as asked for, or an epoch's."""
    plan_ms_per_step: float
    """Time to plan a step on one core, for all ranks: what each rank spends."""
    plan_memory_mb: float
    """Peak memory of planning, in 10^6 bytes, besides the lengths themselves."""

    def as_dict(self) -> dict:
        """Plain numbers; of a figure that differs from step to step the mean, `..._p99` and `..._worst`.

        The mean of `time_over_ideal` is weighted by the steps' ideal times, so that it is the time of the whole run
        over the ideal one.
        """
        result = {key: value for key, value in asdict(self).items() if key not in ("packed", "padded")}
        for name, execution in (("packed", self.packed), ("padded", self.padded)):
            result[name] = {"padding_share": execution.padding_share, "peak_tokens": execution.peak_tokens}
            for key in ("max_over_mean", "time_over_ideal"):
                values = getattr(execution, key)
                weights = execution.ideal if key == "time_over_ideal" else None
                result[name][key] = float(np.average(values, weights=weights))
                result[name][f"{key}_p99"] = float(np.quantile(values, 0.99))
                result[name][f"{key}_worst"] = float(values.max())
        return result


def simulate(lengths: np.ndarray, table: np.ndarray, *, steps: int, **sampler_options) -> StrategyReport:
    """Plan the first steps of an epoch and compare the ranks.

    Args:
        lengths: (n,) tokens of each sample.
        table: (longest + 1,) cost by length, from `cost_table`.
        steps: optimizer steps, at most an epoch's.
        sampler_options: of `LengthBalancedBatchSampler`, but `rank` and `packed`.

    Raises:
        UserError: from the sampler.
    """
    executions = {}
    for packed in (True, False):
        tracemalloc.start()
        sampler = LengthBalancedBatchSampler(lengths, rank=0, packed=packed, **sampler_options)
        sampler.step_plan(0)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        started = time.perf_counter()
        plans = list(itertools.islice(_step_plans(sampler), steps))
        seconds = time.perf_counter() - started
        executions[packed] = _measure(plans, sampler, table, packed)
    return StrategyReport(
        packed=executions[True],
        padded=executions[False],
        steps=len(plans),
        plan_ms_per_step=1e3 * seconds / max(1, len(plans) - 1),  # the first was planned above
        plan_memory_mb=peak / 1e6,
    )


def _step_plans(sampler: LengthBalancedBatchSampler) -> Iterator[StepPlan]:
    for step in itertools.count():
        try:
            yield sampler.step_plan(step)
        except IndexError:
            return


def _measure(plans: list[StepPlan], sampler: LengthBalancedBatchSampler, table: np.ndarray, packed: bool) -> Execution:
    of_sample, ranks = sampler.lengths.of_sample, sampler.sizes.world_size
    max_over_mean, ideals, slowest, first = [], [], [], None
    real = padded = peak = 0
    for plan in plans:
        lengths = of_sample[plan.samples].astype(np.int64)
        starts, counts = plan.bounds[:-1], np.diff(plan.bounds)
        longest = np.maximum.reduceat(lengths, starts)
        work = np.add.reduceat(table[lengths], starts)
        tokens = np.add.reduceat(lengths, starts)
        ideals.append(work.sum() / ranks)
        real += tokens.sum()
        if not packed:
            work, tokens = counts * table[longest], counts * longest
        padded, peak = padded + tokens.sum(), max(peak, int(tokens.max()))
        work_R = work.reshape(-1, ranks).sum(axis=0)
        max_over_mean.append(work_R.max() / work_R.mean())
        slowest.append(work_R.max())
        first = work_R / ideals[0] if first is None else first
    return Execution(
        max_over_mean=np.array(max_over_mean),
        time_over_ideal=np.array(slowest) / np.array(ideals),
        ideal=np.array(ideals),
        padding_share=float(1 - real / padded),
        peak_tokens=peak,
        one_step=first,
    )


def recommend(reports: dict[str, StrategyReport]) -> str:
    """One sentence: which strategy, and what it saves against `random`."""
    packed, padded = (
        {name: report.as_dict()[kind]["time_over_ideal"] for name, report in reports.items()}
        for kind in ("packed", "padded")
    )
    # A step at most half a percent slower is not worth the bias that sorting or strata bring.
    best_packed, best_padded = (
        "balanced" if times.get("balanced", np.inf) <= 1.005 * min(times.values()) else min(times, key=times.get)
        for times in (packed, padded)
    )
    sentence = f"With packed execution take {best_packed}: a step takes {packed[best_packed]:.3f} of the ideal time"
    if "random" in packed:
        sentence += f", with random batches {packed['random']:.2f}"
    sentence += f"; with padding take {best_padded}: {padded[best_padded]:.3f}"
    if "random" in padded:
        sentence += f" instead of {padded['random']:.2f}"
    return sentence + "."
