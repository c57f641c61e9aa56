"""Should sequences of near lengths share one attention call on a CPU, at the price of some padding?

Forward and backward of one attention layer over the micro-batches of real lengths that balanced sampling makes:
sequences of equal length together (as `attend_by_runs` does), or of lengths within a factor, padded and masked.

    python benchmarks/attention_grouping.py --data data --json
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from record import setting, setting_lines, write
from torch.nn import functional as F

from ds_bert.data import PreparedData
from ds_bert.modeling.packed_attention import PackedRow, attend_by_runs
from ds_bert.sampling import LengthBalancedBatchSampler

FACTORS = (1.05, 1.1, 1.25, 1.5, float("inf"))
MICRO_BATCH_SIZE, HEAD_SIZE = 8, 64


def attend_by_groups(query, key, value, row: PackedRow, factor: float) -> torch.Tensor:
    """As `attend_by_runs`, for sequences sorted by length; a group is at most `factor` times its first."""
    lengths, start, outputs = row.boundaries.diff().tolist(), 0, []
    while lengths:
        group = [length for length in lengths if length <= factor * lengths[0]]
        lengths = lengths[len(group) :]
        end, longest = start + sum(group), group[-1]
        real = torch.arange(longest) < torch.tensor(group)[:, None]
        rows = []
        for tensor in (query, key, value):
            padded = tensor.new_zeros(len(group), longest, *tensor.shape[1:])
            rows.append(padded.masked_scatter(real[:, :, None, None], tensor[start:end]).transpose(1, 2))
        mask = None if real.all() else real[:, None, None, :]
        outputs.append(F.scaled_dot_product_attention(*rows, mask).transpose(1, 2)[real])
        start = end
    return torch.cat(outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--heads", nargs="+", type=int, default=[4, 12], help="of 64 numbers each")
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/attention_grouping.json and .md")
    args = parser.parse_args()
    where, results = setting("torch"), {}
    torch.set_num_threads(1)
    lengths = PreparedData(args.data).train.lengths
    sampler = LengthBalancedBatchSampler(
        lengths, micro_batch_size=MICRO_BATCH_SIZE, gradient_accumulation_steps=1, world_size=1, rank=0
    )
    ways: dict[str, Callable] = {"equal lengths": attend_by_runs}
    for factor in FACTORS:
        name = "all together" if factor == float("inf") else f"within a factor of {factor}"
        ways[name] = lambda q, k, v, row, factor=factor: attend_by_groups(q, k, v, row, factor)
    for heads, dtype in itertools.product(args.heads, (torch.float32, torch.bfloat16)):
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for indices in itertools.islice(sampler, args.batches):
            sorted_lengths = torch.tensor(sorted(int(lengths[int(index)]) for index in indices))
            boundaries = F.pad(sorted_lengths.cumsum(0), (1, 0)).int()
            row = PackedRow(boundaries, int(sorted_lengths[-1]), dropout=0.0, scaling=None, sliding_window=None)
            tensors = torch.randn(3, int(boundaries[-1]), heads, HEAD_SIZE).to(dtype).requires_grad_()
            for way, attend in ways.items():
                started = time.perf_counter()
                attend(*tensors.unbind(), row).sum().backward()
                seconds[way].append(time.perf_counter() - started)
        name = f"{heads} heads, {str(dtype).removeprefix('torch.')}"
        results[name] = {way: 1e3 * statistics.median(found) for way, found in seconds.items()}
        print(name, {way: f"{ms:.2f} ms" for way, ms in results[name].items()}, flush=True)
    if args.json:
        lines = [
            "# Sequences of near lengths in one attention call?",
            "",
            f"Milliseconds of one attention layer, forward and backward, one core, {MICRO_BATCH_SIZE} samples; medians "
            f"of {args.batches} micro-batches.",
            "",
            f"| together | {' | '.join(results)} |",
            f"| --- |{' --- |' * len(results)}",
            *(f"| {way} | " + " | ".join(f"{found[way]:.2f}" for found in results.values()) + " |" for way in ways),
            *setting_lines(where),
        ]
        write("attention_grouping", {**where, "milliseconds": results}, lines)


if __name__ == "__main__":
    main()
