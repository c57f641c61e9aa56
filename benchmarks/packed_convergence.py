"""Does packed execution change what a model learns? Training losses of packed and padded jobs in bf16, same seeds.

    ds-bert prepare --input corpus.txt --output data --vocab-size 30522 --sample-unit paragraph
    python benchmarks/packed_convergence.py --data data --json

The same seed means the same weights, batches and masked tokens; dropout draws differ. Windows of steps are compared:
how far the packed run of a seed lies from the padded one of that seed, against how far the padded seeds lie apart.
"""

import argparse
from pathlib import Path

import numpy as np
from job import PRECISIONS, Job
from record import setting, setting_lines, write

EXECUTIONS = ("padded", "packed")
RANKS, MICRO_BATCH_SIZE, WARM_UP_STEPS, LR = 2, 4, 30, 1e-3


def losses(args: argparse.Namespace, execution: str, seed: int) -> list[float]:
    """Of each step of one job."""
    schedule = {"warmup_num_steps": WARM_UP_STEPS, "total_num_steps": "auto", "warmup_type": "linear"}
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        "ds_bert": {"execution": {"packed": execution == "packed"}},
        **PRECISIONS["bf16"],
    }
    job = Job(args.data, args.model, config, ranks=RANKS, steps=args.steps, arguments=[f"--seed={seed}"])
    lines, _ = job.wait()
    print(f"{execution}, seed {seed}: {lines[0]['loss']:.3f} to {lines[-1]['loss']:.3f}", flush=True)
    return [line["loss"] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--window", type=int, default=30, help="steps; their mean loss is compared")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/packed_convergence.json and .md")
    args = parser.parse_args()
    where = setting("torch", "deepspeed", "transformers")
    results = {name: [] for name in EXECUTIONS}
    for seed in args.seeds:
        for execution in EXECUTIONS:
            results[execution].append(losses(args, execution, seed))
    # (seeds, windows)
    padded, packed = (
        np.array(results[name]).reshape(len(args.seeds), -1, args.window).mean(axis=-1) for name in EXECUTIONS
    )
    spread, apart = np.ptp(padded, axis=0), np.abs(packed - padded).max(axis=0)
    rows = [
        f"| {window * args.window + 1} to {(window + 1) * args.window} | {padded[:, window].mean():.4f} | "
        f"{packed[:, window].mean():.4f} | {spread[window]:.4f} | {apart[window]:.4f} |"
        for window in range(len(spread))
    ]
    lines = [
        "# Does packed execution change what a model learns?",
        "",
        f"Training loss, {args.model} model in bf16, {RANKS} ranks, {MICRO_BATCH_SIZE} samples a rank, {args.steps} "
        f"steps, seeds {', '.join(map(str, args.seeds))}. Means of {args.window} steps.",
        "",
        "| steps | padded | packed | padded: largest less smallest seed | packed against padded of a seed, at most |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        *setting_lines(where),
    ]
    print("\n".join(lines))
    if args.json:
        write("packed_convergence", {**where, "losses": results}, lines)


if __name__ == "__main__":
    main()
