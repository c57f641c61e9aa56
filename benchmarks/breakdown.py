"""Where a training step's time goes on one rank: the list of what to speed up next.

    ds-bert prepare --input corpus.txt --output data --vocab-size 30522 --sample-unit paragraph
    python benchmarks/breakdown.py --data data --json

Time of each operation by itself, from torch's profiler on the CPU, in training mode with dropout, sorted into parts by
its name and the shapes of its inputs. One process: communication is not in it (benchmarks/overlap.py has that).
"""

import argparse
import itertools
import re
import time
from collections import Counter
from collections.abc import Iterable

import torch
from job import PRECISIONS
from matmul_peak import matmul_peak
from record import setting, setting_lines, write
from throughput import MASKED_SHARE, VOCABULARY, flops_per_token
from torch.profiler import ProfilerActivity, profile, record_function

from ds_bert.data import PreparedData
from ds_bert.data.batches.masked_dataset import MaskedLMDataset
from ds_bert.data.batches.masking import TokenMasker
from ds_bert.data.preparing.processes import available_cores
from ds_bert.modeling import (
    PRESETS,
    MaskedPositionHead,
    architecture,
    build_model,
    collator_for,
    use_cpu_dropout,
)
from ds_bert.sampling import LengthBalancedBatchSampler

WARM_UP = 2

# The first that fits an operation's name.
PARTS = {
    "optimizer": r"adam|Optimizer",
    "attention": r"attention|softmax_backward|_softmax$|bmm|baddbmm",
    "matrix multiplication": r"mm$|linear|mkldnn",
    "dropout": r"dropout|bernoulli|native_dropout",
    "normalisation and activation": r"layer_norm|gelu|tanh",
    "embedding": r"embedding|index_add",
    "additions, copies and the rest": r"",
}
HEAD = "head and loss"


def part_of(name: str, shapes: list) -> str:
    sizes = set(itertools.chain.from_iterable(shape for shape in shapes if isinstance(shape, list)))
    part = next(part for part, pattern in PARTS.items() if re.search(pattern, name))
    return HEAD if VOCABULARY in sizes and part not in ("embedding", "optimizer") else part


def measure(args: argparse.Namespace, model_name: str, precision: str, packed: bool) -> dict:
    """Seconds of each part, over some steps."""
    torch.manual_seed(0)
    data = PreparedData(args.data)
    tokenizer = data.load_tokenizer()
    model = build_model(model_name, architecture(model_name, vocab_size=VOCABULARY)).train()
    collate, head = collator_for(model, tokenizer, packed=packed), MaskedPositionHead(model)
    head.use_fused_loss(model)
    use_cpu_dropout(model)
    model.to(torch.bfloat16 if precision == "bf16" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    dataset = MaskedLMDataset(data.train, TokenMasker(tokenizer, probability=MASKED_SHARE, seed=0))
    sampler = LengthBalancedBatchSampler(
        data.train.lengths, micro_batch_size=args.samples, gradient_accumulation_steps=1, world_size=1, rank=0
    )
    steps = itertools.islice(sampler, WARM_UP + args.steps)

    def run(steps: Iterable[list[int]]) -> int:
        tokens = 0
        for indices in steps:
            with record_function("data"):
                batch = collate([dataset[int(index)] for index in indices])
            loss = head.loss(model, batch.model_inputs, batch.positions, batch.labels)
            (loss / len(batch.labels)).backward()
            optimizer.step()
            optimizer.zero_grad()
            tokens += batch.real_tokens
        return tokens

    run(itertools.islice(steps, WARM_UP))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        began = time.perf_counter()
        tokens = run(steps)
        whole = time.perf_counter() - began
    seconds = Counter()
    for event in profiler.key_averages(group_by_input_shape=True):
        is_data = event.key == "data"
        spent = event.cpu_time_total if is_data else event.self_cpu_time_total
        seconds["data" if is_data else part_of(event.key, event.input_shapes)] += spent / 1e6
    seconds["between operations"] = max(0.0, whole - sum(seconds.values()))
    layers, hidden, _ = PRESETS[model_name]
    needed = flops_per_token(data.train.lengths, layers, hidden) * tokens
    return {
        "seconds": dict(seconds),
        "real_tokens_per_s": tokens / whole,
        "utilisation": needed / whole / matmul_peak(precision, 1, available_cores()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--models", nargs="+", default=["base"], choices=list(PRESETS))
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--samples", type=int, default=8, help="a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--padded", action="store_true", help="padded execution, too")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/breakdown.json and .md")
    args = parser.parse_args()
    where, results = setting("torch", "transformers"), {}
    for model, precision, packed in itertools.product(args.models, args.precisions, [True, False][: 1 + args.padded]):
        title = f"{model}, {precision}, {'packed' if packed else 'padded'}"
        results[title] = measure(args, model, precision, packed)
        print("\n".join(table(title, results[title])), flush=True)
    if args.json:
        lines = ["# Where a training step's time goes", "", f"{args.samples} samples a step.", ""]
        for title, found in results.items():
            lines += table(title, found)
        write("breakdown", {**where, "results": results}, [*lines, *setting_lines(where)])


def table(title: str, found: dict) -> list[str]:
    whole = sum(found["seconds"].values())
    return [
        f"## {title}",
        "",
        f"{found['real_tokens_per_s']:,.0f} real tokens/s, utilisation {found['utilisation']:.1%}",
        "",
        "| part | share |",
        "| --- | --- |",
        *(f"| {part} | {spent / whole:.1%} |" for part, spent in sorted(found["seconds"].items(), key=lambda x: -x[1])),
        "",
    ]


if __name__ == "__main__":
    main()
