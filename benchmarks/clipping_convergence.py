"""Does clipping by bucket change what a model learns? Held-out loss of five ways to clip, same data and seeds.

One process computes the gradient of every simulated rank in turn. The bucket arms clip it with the product's own
reducer and average; `global` averages and then clips by the norm of the whole, as DeepSpeed does; `none` never clips.

    python launch/docstring_corpus.py --output corpus.txt --max-mb 4
    ds-bert prepare --input corpus.txt --output data --vocab-size 4096 --max-length 64 --sample-unit paragraph
    python benchmarks/clipping_convergence.py --data data --json
"""

import argparse
import json
import math
import multiprocessing
from pathlib import Path

import numpy as np
import torch
from record import setting, setting_lines, write

from ds_bert.data import PreparedData
from ds_bert.data.collator import MaskedLMDataset, PaddingCollator
from ds_bert.data.masking import TokenMasker
from ds_bert.modeling import MaskedPositionHead, build_model, load_config, masked_lm_loss
from ds_bert.reduction import attach
from ds_bert.sampling import LengthBalancedBatchSampler
from ds_bert.training.evaluation import Evaluator

ARMS = ("none", "global", "proportional", "equal", "uniform")
LABELS = {"none": "no clipping", "global": "whole norm, after the all-reduce"}
PROBABILITY, BUCKET_SIZE_MB, WARM_UP_SHARE = 0.15, 0.5, 0.1


def train(args: argparse.Namespace, arm: str, size: tuple[int, int, float], seed: int) -> dict:
    """One run: its held-out loss, its training losses and how often it clipped."""
    micro_batch_size, steps, lr = size
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = PreparedData(args.data)
    tokenizer = data.load_tokenizer()
    model = build_model(args.model, load_config(args.model, tokenizer, int(data.train.lengths.max())))
    head, collate = MaskedPositionHead(model), PaddingCollator(tokenizer.pad_token_id)
    dataset = MaskedLMDataset(data.train, TokenMasker(tokenizer, probability=PROBABILITY, seed=seed))
    samplers = [
        LengthBalancedBatchSampler(
            data.train.lengths, micro_batch_size=micro_batch_size, gradient_accumulation_steps=1,
            world_size=args.world_size, rank=rank, seed=seed,
        )
        for rank in range(args.world_size)
    ]  # fmt: skip
    reducer = None
    if arm not in ("none", "global"):
        reducer = attach(model, max_norm=args.max_norm, threshold=arm, bucket_size_mb=BUCKET_SIZE_MB)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), fused=True)
    warm_up = max(1, round(WARM_UP_SHARE * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
    model.train()
    losses, clipped_shares, step = [], [], 0
    for epoch in range(math.ceil(steps / samplers[0].steps_per_epoch)):
        dataset.set_epoch(epoch)
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for batches in zip(*samplers, strict=True):
            if step == steps:
                break
            step += 1
            masked = sum(int(dataset.num_masked(batch).sum()) for batch in batches)
            mean: list[torch.Tensor | None] = [None] * len(list(model.parameters()))
            loss_sum, clipped = 0.0, 0.0
            for batch in batches:
                samples = collate([dataset[int(index)] for index in batch])
                logits = head(model, samples.input_ids, samples.attention_mask, samples.positions)
                loss = masked_lm_loss(logits, samples.labels)[0]
                # Weighted so that the mean over ranks is the mean over all masked tokens (docs/loss.md).
                (loss * args.world_size / masked).backward()
                loss_sum += loss.item()
                if reducer:
                    clipped += reducer.finish().clipped_share
                for number, parameter in enumerate(model.parameters()):
                    part = parameter.grad / args.world_size
                    mean[number] = part if mean[number] is None else mean[number] + part
                optimizer.zero_grad()
            for parameter, gradient in zip(model.parameters(), mean, strict=True):
                parameter.grad = gradient
            if arm == "global":
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
                clipped = args.world_size * float(norm > args.max_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss_sum / masked)
            clipped_shares.append(clipped / args.world_size)
    model.eval()
    if reducer:
        reducer.detach()
    evaluator = Evaluator(data.validation, tokenizer, probability=PROBABILITY, micro_batch_size=32)
    eval_loss = evaluator(model, head, torch.device("cpu"))["eval_loss"]
    samples_a_step = micro_batch_size * args.world_size
    print(f"{samples_a_step} samples a step, {arm}, seed {seed}: held-out loss {eval_loss:.4f}", flush=True)
    return {
        "samples_a_step": samples_a_step, "steps": steps, "lr": lr, "arm": arm, "seed": seed, "eval_loss": eval_loss,
        "clipped_share": float(np.mean(clipped_shares)), "losses": losses,
    }  # fmt: skip


def draw(runs: list[dict], file: Path) -> None:
    """Training loss of every arm, smoothed, the mean over seeds; one panel a batch size."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    sizes = sorted({run["samples_a_step"] for run in runs})
    figure, axes = plt.subplots(1, len(sizes), figsize=(5.5 * len(sizes), 3.8), squeeze=False, layout="constrained")
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
