"""What does planning the batches cost? Time a step, time to start an epoch, and memory, with 16 million samples.

Every rank plans every step for all ranks, on one core; at 1,024 ranks a step of the record run took 125 ms.

    python benchmarks/sampling_plan.py --json
    python benchmarks/sampling_plan.py --lengths lengths.json --json
"""

import argparse
import statistics
import time
import tracemalloc

import numpy as np
from record import setting, setting_lines, write

from ds_bert.planning import read_lengths
from ds_bert.sampling import STRATEGIES, LengthBalancedBatchSampler

SAMPLES = 16_000_000
CLUSTERS = ((1024, 16), (16384, 16))
STEPS = 64
STEP_MS = 125


def made_up_lengths() -> np.ndarray:
    """Lengths like those of Wikipedia cut to 512 tokens: mean about 250, a quarter of them the maximum."""
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(5.3, 0.95, SAMPLES), 5, 512).astype(np.uint16)


def measure(lengths: np.ndarray, strategy: str, world_size: int, micro_batch_size: int) -> dict:
    def start() -> LengthBalancedBatchSampler:
        sampler = LengthBalancedBatchSampler(
            lengths,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=1,
            world_size=world_size,
            rank=0,
            strategy=strategy,
        )
        sampler.step_plan(0)
        return sampler

    tracemalloc.start()
    start()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    started = time.perf_counter()
    sampler = start()
    start_s = time.perf_counter() - started
    times = []
    for step in range(1, min(STEPS + 1, sampler.steps_per_epoch)):
        started = time.perf_counter()
        sampler.step_plan(step)
        times.append(1e3 * (time.perf_counter() - started))
    return {
        "strategy": strategy,
        "world_size": world_size,
        "micro_batch_size": micro_batch_size,
        "step_ms": statistics.mean(times),
        "step_ms_median": statistics.median(times),
        "step_ms_worst": max(times),
        "start_s": start_s,
        "peak_mb": peak / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", metavar="FILE", help="as for `ds-bert balance` (default: made up)")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/sampling_plan.json and .md")
    args = parser.parse_args()
    where = setting("numpy")
    lengths = read_lengths(args.lengths) if args.lengths else made_up_lengths()
    runs = []
    for world_size, micro_batch_size in CLUSTERS:
        for strategy in STRATEGIES:
            runs.append(measure(lengths, strategy, world_size, micro_batch_size))
            print(runs[-1], flush=True)
    if args.json:
        lines = [
            "# What does planning the batches cost?",
            "",
            f"{len(lengths):,} samples, mean length {lengths.mean():.1f}; one core; {STEPS} steps.",
            "",
            "| ranks × samples | strategy | ms a step (mean) | median | worst | share of a 125 ms step | start of an "
            "epoch | peak memory |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for run in runs:
            lines.append(
                f"| {run['world_size']:,} × {run['micro_batch_size']} | `{run['strategy']}` | {run['step_ms']:.3f} | "
                f"{run['step_ms_median']:.3f} | {run['step_ms_worst']:.2f} | {run['step_ms'] / STEP_MS:.2%} | "
                f"{run['start_s']:.1f} s | {run['peak_mb']:.0f} MB |"
            )
        lines.append("\nThe worst step of `local_sort` is one that sorts a window, every 32nd.")
        write("sampling_plan", {**where, "runs": runs}, [*lines, *setting_lines(where)])


if __name__ == "__main__":
    main()
