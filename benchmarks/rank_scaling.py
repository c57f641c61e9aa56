"""What does training on two ranks cost against two jobs that know nothing of each other?

One rank on one core; two ranks on one core each; two one-rank jobs at the same time, a core each: the latter share the
machine's memory but neither gradients nor the wait for the slower batch. They take turns in one run.

    ds-bert prepare --input corpus.txt --output data --vocab-size 30522 --sample-unit paragraph
    python benchmarks/rank_scaling.py --data data --json
"""

import argparse
import os
import statistics
from pathlib import Path

from job import PRECISIONS, Job
from record import setting, setting_lines, write

WAYS = ("one rank", "two independent jobs", "two ranks")
VOCABULARY, MICRO_BATCH_SIZE = 30_522, 8
WARM_UP = 5  # steps not counted


def start(args: argparse.Namespace, way: str) -> list[Job]:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "ds_bert": {"sampling": {"strategy": "balanced"}},
        **PRECISIONS[args.precision],
    }
    if way == "two ranks":
        cores, ranks = [{first, second}], 2
        config["ds_bert"]["bucket_clipping"] = {"enabled": True}
        config["gradient_clipping"] = 1.0
    else:
        cores, ranks = ([{first}] if way == "one rank" else [{first}, {second}]), 1
    return [
        Job(
            args.data, args.model, config, ranks=ranks, steps=args.steps, vocabulary=VOCABULARY, cores=these,
            arguments=[f"--seed={seed}"],
        )
        for seed, these in enumerate(cores)
    ]  # fmt: skip


def tokens_per_second(lines: list[dict]) -> float:
    tokens = sum(line["real_tokens_per_s"] * line["step_s"] for line in lines)
    return tokens / sum(line["step_s"] for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--precision", default="fp32", choices=list(PRECISIONS))
    parser.add_argument("--steps", type=int, default=40, help=f"of each job, {WARM_UP} of them not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/rank_scaling.json and .md")
    args = parser.parse_args()
    where = setting("torch", "deepspeed", "transformers")
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            jobs = [job.wait()[0][WARM_UP:] for job in start(args, way)]
            # Tokens over seconds, not the median step: two ranks take turns in having the slower batch.
            rate = sum(map(tokens_per_second, jobs))
            rates[way].append(rate)
            print(f"{way}: {rate:,.0f} real tokens/s", flush=True)
    independent = statistics.median(rates["two independent jobs"])
    lines = [
        "# Two ranks against two independent jobs",
        "",
        f"{args.model} model in {args.precision}, packed, balanced batches, bucket clipping with overlap at two ranks, "
        f"{MICRO_BATCH_SIZE} samples a rank, one core a rank; medians of {args.rounds} rounds (smallest to largest).",
        "",
        "| | real tokens/s | over two independent jobs |",
        "| --- | --- | --- |",
        *(
            f"| {way} | {statistics.median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f}) | "
            f"{statistics.median(found) / independent:.3f} |"
            for way, found in rates.items()
        ),
        *setting_lines(where),
    ]
    print("\n".join(lines))
    if args.json:
        write("rank_scaling", {**where, "real_tokens_per_s": rates}, lines)


if __name__ == "__main__":
    main()
