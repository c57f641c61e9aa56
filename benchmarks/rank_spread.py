"""How far apart are the ranks of a real run with random and with balanced batches? Tokens planned, seconds measured.

Two ranks on this machine, the same data and seed, the strategies in turn. Prepare data of natural lengths first:

    ds-bert prepare --input corpus.txt --output data --vocab-size 8000 --sample-unit paragraph
    python benchmarks/rank_spread.py --data data --json
"""

import argparse
import statistics
from pathlib import Path

from job import Job
from record import setting, setting_lines, write

STRATEGIES = ("random", "balanced")
RANKS, MICRO_BATCH_SIZE = 2, 8
KEYS = ("rank_tokens_max_over_mean", "rank_seconds_max_over_mean", "real_tokens_per_s")
WARM_UP = 5  # steps not counted


def run(args: argparse.Namespace, strategy: str, accumulation: int, packed: bool) -> dict[str, list[float]]:
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "ds_bert": {"sampling": {"strategy": strategy}, "execution": {"packed": packed}},
    }
    lines, _ = Job(args.data, args.model, config, ranks=RANKS, steps=args.steps).wait()
    steps = lines[WARM_UP:]
    return {key: [line[key] for line in steps] for key in KEYS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--repeats", type=int, default=2, help="of both strategies, in turn")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/rank_spread.json and .md")
    args = parser.parse_args()
    where = setting("torch", "deepspeed", "transformers")
    results: dict[str, dict[str, list[float]]] = {}
    for packed, accumulation in ((True, 1), (False, 1), (False, 4)):
        execution = "packed" if packed else "padded"
        for _ in range(args.repeats):
            for strategy in STRATEGIES:
                measured = run(args, strategy, accumulation, packed)
                so_far = results.setdefault(f"{execution}, {accumulation}, {strategy}", {key: [] for key in KEYS})
                for key, values in measured.items():
                    so_far[key] += values
                print(f"{execution}, accumulation {accumulation}, {strategy}: " + _row(measured), flush=True)
    if args.json:
        lines = [
            "# How far apart are two ranks with random and with balanced batches?",
            "",
            f"Micro-batches of {MICRO_BATCH_SIZE}, {args.model} model, {RANKS} ranks. Most loaded rank over the mean "
            "of both, medians over the steps (mean, largest): 1 is best, 2 the worst that two ranks can do.",
            "",
            "| execution, accumulation, strategy | tokens (planned) | seconds (measured) | real tokens/s |",
            "| --- | --- | --- | --- |",
            *(f"| {name} | {_row(values)} |" for name, values in results.items()),
            *setting_lines(where),
        ]
        write("rank_spread", {**where, "results": results}, lines)


def _row(values: dict[str, list[float]]) -> str:
    parts = [
        f"{statistics.median(values[key]):.3f} ({statistics.mean(values[key]):.3f}, {max(values[key]):.3f})"
        for key in KEYS[:2]
    ]
    return " | ".join([*parts, f"{statistics.median(values[KEYS[2]]):,.0f}"])


if __name__ == "__main__":
    main()
