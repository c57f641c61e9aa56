"""Draw what each strategy gives eight ranks in one step: python docs/examples/draw_strategies.py DATA PICTURE.png"""

import sys

import numpy as np
from matplotlib.figure import Figure

from ds_bert.data import PreparedData
from ds_bert.sampling import STRATEGIES, LengthBalancedBatchSampler

RANKS, SAMPLES = 8, 8

lengths = PreparedData(sys.argv[1]).train.lengths
figure = Figure(figsize=(11, 6.4), layout="constrained")
for axes, strategy in zip(figure.subplots(2, 2, sharex=True, sharey=True).flat, STRATEGIES, strict=True):
    options = {"strata": SAMPLES} if strategy == "stratified" else {}
    sampler = LengthBalancedBatchSampler(
        lengths,
        micro_batch_size=SAMPLES,
        gradient_accumulation_steps=1,
        world_size=RANKS,
        rank=0,
        strategy=strategy,
        **options,
    )
    plan = sampler.step_plan(sampler.steps_per_epoch // 2)
    for rank in range(RANKS):
        tokens = np.sort(lengths[plan.micro_batch(rank)])[::-1]
        left = np.concatenate([[0], np.cumsum(tokens)[:-1]])
        axes.barh(rank, tokens, left=left, color="tab:blue", edgecolor="white")
        axes.barh(rank, len(tokens) * tokens[0], color="none", edgecolor="tab:red", linestyle=":")
    work = np.add.reduceat(lengths[plan.samples], plan.bounds[:-1])
    axes.set(title=f"{strategy}: most work / mean {work.max() / work.mean():.2f}", ylabel="rank", yticks=range(RANKS))
for axes in figure.axes[2:]:
    axes.set_xlabel("tokens: each bar a sample; dotted: with padding")
figure.savefig(sys.argv[2], dpi=100)
