"""Do the sampling strategies change what a model learns? Held-out loss on the same data and seeds.

For an exact loss (docs/loss.md) a step's gradient depends on which samples its global batch holds, not on which rank
gets which. So one process trains on the global batches that a cluster of `--world-size` ranks would, without DeepSpeed.
Beside the held-out loss: the variance of the mean length of the global batches, against that of `random`.

    python launch/docstring_corpus.py --output corpus.txt --max-mb 4
    ds-bert prepare --input corpus.txt --output data --vocab-size 4096 --max-length 128 --sample-unit paragraph
    python benchmarks/sampling_bias.py --data data --json
"""

import argparse
import json
import multiprocessing

import numpy as np
import torch
from one_process import MaskedLM
from record import setting, setting_lines, write

from ds_bert.sampling import STRATEGIES, LengthBalancedBatchSampler

PIECE = 16  # samples run together, of neighbouring lengths
OPTIONS = {"stratified": {"strata": 4}}  # one of each in a micro-batch of 4; the default edges are for longer samples


def train(args: argparse.Namespace, strategy: str, seed: int) -> dict:
    """One run; the held-out loss and the mean length of each global batch."""
    lm = MaskedLM(args.data, args.model, seed)
    sampler = LengthBalancedBatchSampler(
        lm.lengths,
        micro_batch_size=args.micro_batch_size,
        gradient_accumulation_steps=1,
        world_size=args.world_size,
        rank=0,
        seed=seed,
        strategy=strategy,
        **OPTIONS.get(strategy, {}),
    )
    optimizer = torch.optim.AdamW(lm.model.parameters(), lr=args.lr, betas=(0.9, 0.98))
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    mean_lengths = []
    for step in range(args.steps):
        epoch, step_of_epoch = divmod(step, sampler.steps_per_epoch)
        sampler.set_epoch(epoch)
        lm.dataset.set_epoch(epoch)
        batch = sampler.global_batch(step_of_epoch)
        mean_lengths.append(float(lm.lengths[batch].mean()))
        masked = int(lm.dataset.num_masked(batch).sum())
        by_length = batch[np.argsort(lm.lengths[batch], kind="stable")]
        for first in range(0, len(batch), PIECE):
            (lm.loss_sum(by_length[first : first + PIECE]) / masked).backward()
        torch.nn.utils.clip_grad_norm_(lm.model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
    eval_loss = lm.held_out_loss()
    print(f"{strategy}, seed {seed}: held-out loss {eval_loss:.4f}", flush=True)
    return {"strategy": strategy, "seed": seed, "eval_loss": eval_loss, "mean_lengths": mean_lengths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--world-size", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/sampling_bias.json and .md")
    args = parser.parse_args()
    where = setting("torch", "transformers", "numpy")
    cases = [(args, strategy, seed) for seed in range(args.seeds) for strategy in STRATEGIES]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        runs = pool.starmap(train, cases, chunksize=1)
    results = {}
    for strategy in STRATEGIES:
        mine = [run for run in runs if run["strategy"] == strategy]
        losses = [run["eval_loss"] for run in mine]
        variance = float(np.mean([np.var(run["mean_lengths"]) for run in mine]))
        results[strategy] = {"eval_loss": losses, "mean_length_variance": variance}
    report = {**where, "settings": vars(args), "results": results}
    print(json.dumps(report, indent=1))
    if args.json:
        write("sampling_bias", report, _as_lines(args, report))


def _as_lines(args: argparse.Namespace, report: dict) -> list[str]:
    results = report["results"]
    drawn = np.array(results["random"]["eval_loss"])
    rows = []
    for strategy, result in results.items():
        losses = np.array(result["eval_loss"])
        ratio = result["mean_length_variance"] / results["random"]["mean_length_variance"]
        rows.append(
            f"| `{strategy}` | {losses.mean():.4f} | {losses.min():.4f} to {losses.max():.4f} | "
            f"{(losses - drawn).mean():+.4f} | {ratio:.2f} |"
        )
    return [
        "# Do the sampling strategies change what a model learns?",
        "",
        f"Held-out loss after {args.steps} steps of {args.micro_batch_size * args.world_size} samples, model "
        f"{args.model}, {args.seeds} seeds; the spread over seeds is the yardstick.",
        "",
        "| strategy | held-out loss | smallest to largest | against `random`, same seeds | variance of the global "
        "batches' mean length / `random` |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        *setting_lines(report),
    ]


if __name__ == "__main__":
    main()
