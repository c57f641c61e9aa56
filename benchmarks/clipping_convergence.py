"""Does clipping by bucket change what a model learns? Held-out loss of five ways to clip, same data and seeds.

One process computes the gradient of every simulated rank in turn. The bucket arms clip it with the product's own
reducer and average; `global` averages and then clips by the norm of the whole, as DeepSpeed does; `none` never clips.

    python launch/docstring_corpus.py --output corpus.txt --max-mb 4
    ds-bert prepare --input corpus.txt --output data --vocab-size 4096 --max-length 64 --sample-unit paragraph
    python benchmarks/clipping_convergence.py --data data --json
"""

import argparse
import json
import multiprocessing
from pathlib import Path

import numpy as np
import torch
from one_process import MaskedLM
from record import setting, setting_lines, write

from ds_bert.reduction import attach
from ds_bert.sampling import LengthBalancedBatchSampler

ARMS = ("none", "global", "proportional", "equal", "uniform")
LABELS = {"none": "no clipping", "global": "whole norm, after the all-reduce"}
BUCKET_SIZE_MB, WARM_UP_SHARE = 0.5, 0.1


def train(args: argparse.Namespace, arm: str, size: tuple[int, int, float], seed: int) -> dict:
    """One run: its held-out loss, its training losses and how often it clipped."""
    micro_batch_size, steps, lr = size
    lm = MaskedLM(args.data, args.model, seed)
    parameters = list(lm.model.parameters())
    sampler = LengthBalancedBatchSampler(
        lm.lengths, micro_batch_size=micro_batch_size, gradient_accumulation_steps=1, world_size=args.world_size,
        rank=0, seed=seed,
    )  # fmt: skip
    reducer = None
    if arm not in ("none", "global"):
        reducer = attach(lm.model, max_norm=args.max_norm, threshold=arm, bucket_size_mb=BUCKET_SIZE_MB)
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), fused=True)
    warm_up = max(1, round(WARM_UP_SHARE * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
    losses, clipped_shares = [], []
    for step in range(steps):
        epoch, step_of_epoch = divmod(step, sampler.steps_per_epoch)
        sampler.set_epoch(epoch)
        lm.dataset.set_epoch(epoch)
        plan = sampler.step_plan(step_of_epoch)
        masked = int(lm.dataset.num_masked(sampler.global_batch(step_of_epoch)).sum())
        mean = [torch.zeros_like(parameter) for parameter in parameters]
        loss_sum = clipped = 0.0
        for rank in range(args.world_size):
            loss = lm.loss_sum(plan.micro_batch(rank))
            # Weighted so that the mean over ranks is the mean over all masked tokens (docs/loss.md).
            (loss * args.world_size / masked).backward()
            loss_sum += loss.item()
            if reducer:
                clipped += reducer.finish().clipped_share
            for total, parameter in zip(mean, parameters, strict=True):
                total += parameter.grad / args.world_size
            optimizer.zero_grad()
        for parameter, gradient in zip(parameters, mean, strict=True):
            parameter.grad = gradient
        if arm == "global":
            norm = torch.nn.utils.clip_grad_norm_(parameters, args.max_norm)
            clipped = args.world_size * float(norm > args.max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss_sum / masked)
        clipped_shares.append(clipped / args.world_size)
    if reducer:
        reducer.detach()
    eval_loss = lm.held_out_loss()
    samples_a_step = micro_batch_size * args.world_size
    print(f"{samples_a_step} samples a step, {arm}, seed {seed}: held-out loss {eval_loss:.4f}", flush=True)
    return {
        "samples_a_step": samples_a_step, "steps": steps, "lr": lr, "arm": arm, "seed": seed, "eval_loss": eval_loss,
        "clipped_share": float(np.mean(clipped_shares)), "losses": losses,
    }  # fmt: skip


def draw(runs: list[dict], file: Path) -> None:
    """Training loss of every arm, smoothed, the mean over seeds; one panel a batch size."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    sizes = sorted({run["samples_a_step"] for run in runs})
    figure = Figure(figsize=(5.5 * len(sizes), 3.8), layout="constrained")
    axes = figure.subplots(1, len(sizes), squeeze=False)
    for axis, samples in zip(axes[0], sizes, strict=True):
        for arm in ARMS:
            losses = np.mean([r["losses"] for r in runs if r["samples_a_step"] == samples and r["arm"] == arm], axis=0)
            width = max(1, len(losses) // 25)
            smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
            axis.plot(np.arange(width, len(losses) + 1), smooth, label=LABELS.get(arm, f"by bucket, {arm}"), lw=1.2)
        axis.set(title=f"{samples} samples a step", xlabel="step", ylabel="training loss")
        axis.grid(alpha=0.3)
    axes[0][0].legend(frameon=False)
    figure.savefig(file, dpi=110)


def table(runs: list[dict]) -> list[str]:
    lines = [
        "| samples a step | clipping | held-out loss | smallest to largest | against `global`, same seeds | clipped |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for samples in sorted({run["samples_a_step"] for run in runs}):
        of_arm = {a: [r for r in runs if r["samples_a_step"] == samples and r["arm"] == a] for a in ARMS}
        reference = np.array([run["eval_loss"] for run in of_arm["global"]])
        for arm, mine in of_arm.items():
            losses = np.array([run["eval_loss"] for run in mine])
            share = np.mean([run["clipped_share"] for run in mine])
            lines.append(
                f"| {samples} | `{arm}` | {losses.mean():.4f} | {losses.min():.4f} to {losses.max():.4f} | "
                f"{(losses - reference).mean():+.4f} | {share:.0%} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--world-size", type=int, default=8, help="simulated ranks")
    parser.add_argument("--small", nargs=3, type=float, default=[4, 400, 1e-3], metavar=("MICRO_BATCH", "STEPS", "LR"))
    parser.add_argument("--large", nargs=3, type=float, default=[32, 60, 3e-3], metavar=("MICRO_BATCH", "STEPS", "LR"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--plot", metavar="FILE.png", help="draw the training losses")
    parser.add_argument(
        "--json", action="store_true", help="write benchmarks/results/clipping_convergence.json and .md"
    )
    args = parser.parse_args()
    where = setting("torch", "transformers", "numpy")
    sizes = [(int(micro_batch), int(steps), lr) for micro_batch, steps, lr in (args.small, args.large)]
    cases = [(args, arm, size, seed) for size in sizes for seed in range(args.seeds) for arm in ARMS]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        runs = pool.starmap(train, cases, chunksize=1)
    if args.plot:
        draw(runs, Path(args.plot))
    lines = table(runs)
    print("\n".join(lines))
    if args.json:
        title = [
            "# Does clipping by bucket change what a model learns?",
            "",
            f"Held-out loss, model {args.model}, {args.world_size} ranks, maximum norm {args.max_norm}, {args.seeds} "
            "seeds; the spread over seeds is the yardstick. "
            + "; ".join(
                f"{micro_batch * args.world_size} samples a step: {steps} steps at {lr:g}"
                for micro_batch, steps, lr in sizes
            )
            + ".",
            "",
        ]
        report = {**where, "settings": vars(args), "runs": runs}
        write("clipping_convergence", report, [*title, *lines, *setting_lines(where)])
        print(json.dumps({"written": "benchmarks/results/clipping_convergence.json"}))


if __name__ == "__main__":
    main()
