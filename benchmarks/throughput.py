"""Real tokens per second of a whole training job, against what users have today.

The same text, tokenizer, model, optimizer, precision, samples a step and cores; the systems take turns in one run:
HF Trainer + DeepSpeed (padded to the longest of a micro-batch), the same with group_by_length, ds_bert padded, ds_bert
packed. Prepare data of natural lengths first:

    ds-bert prepare --input corpus.txt --output data --vocab-size 30522 --sample-unit paragraph
    python benchmarks/throughput.py --data data --json
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from matmul_peak import matmul_peak
from record import setting, setting_lines, write

from ds_bert.cluster.ranks import launcher_command
from ds_bert.data import PreparedData
from ds_bert.data.pool import available_cores
from ds_bert.modeling import PRESETS, architecture
from ds_bert.training.metrics import read_metrics

WORKER = Path(__file__).parent / "throughput_hf_trainer.py"
SYSTEMS = ("HF Trainer + DeepSpeed", "HF Trainer, group_by_length", "ds_bert padded", "ds_bert packed")
VOCABULARY = 30_522
MICRO_BATCH_SIZE = 8
MASKED_SHARE = 0.15
WARM_UP = 5  # steps not counted
STEPS = {"tiny": 60, "mini": 40, "small": 30, "base": 15, "large": 10}
# bf16 weights, with fp32 master weights in DeepSpeed's optimizer.
PRECISIONS = {
    "fp32": {"zero_optimization": {"stage": 0}},
    "bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
}


def run(system: str, data: Path, folder: Path, precision: str, ranks: int, steps: int) -> tuple[list[float], float]:
    """One job of a system.

    Returns:
        real tokens per second of each step, over all ranks; peak resident memory of its largest process, in MB.
    """
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        **PRECISIONS[precision],
    }
    if system.startswith("ds_bert"):
        config["ds_bert"] = {"execution": {"packed": system.endswith("packed")}}
    (folder / "ds_config.json").write_text(json.dumps(config))
    command = launcher_command(ranks)
    command += ["--module", "ds_bert.training.pretrain"] if system.startswith("ds_bert") else [WORKER]
    command += ["--data", data, "--model", folder / "model", "--max-steps", steps, "--output", folder / "run"]
    command += ["--deepspeed_config", folder / "ds_config.json"]
    command += ["--group-by-length"] if system.endswith("group_by_length") else []
    # As `ds-bert pretrain` shares the cores out; the Trainer alone would give each rank all of them.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads(ranks))}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{system} failed:\n{(folder / 'log').read_text()[-3000:]}")
    rates = [line["real_tokens_per_s"] for line in read_metrics(folder / "run") if "real_tokens_per_s" in line]
    return rates[WARM_UP:], usage.ru_maxrss / 1024


def threads(ranks: int) -> int:
    return max(1, available_cores() // ranks)


def flops_per_token(lengths: np.ndarray, layers: int, hidden: int) -> float:
    """Multiplications and additions that a training step needs for a real token: forward, and twice that backward.

    Matrix products only; attention within the sample, and the head on masked positions.
    """
    encoder = layers * (12 * hidden**2 + 2 * hidden * (lengths.astype(float) ** 2).sum() / lengths.sum())
    head = MASKED_SHARE * (hidden**2 + hidden * VOCABULARY)
    return 6 * (encoder + head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--models", nargs="+", default=["mini", "base"], choices=list(PRESETS))
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--steps", type=int, help=f"of each job, {WARM_UP} of them not counted (default: by model)")
    parser.add_argument("--rounds", type=int, default=2, help="jobs of each system, in turn")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/throughput.json and .md")
    args = parser.parse_args()
    where, results = setting("torch", "deepspeed", "transformers", "accelerate"), {}
    lengths = np.asarray(PreparedData(args.data).train.lengths)
    for model, precision, ranks in itertools.product(args.models, args.precisions, args.ranks):
        title = f"{model}, {precision}, {ranks} rank{'s' if ranks > 1 else ''} of {threads(ranks)} core(s)"
        found = compare(args, model, precision, ranks, lengths)
        results[title] = found
        print("\n".join(table(title, found)), flush=True)
    if args.json:
        lines = [
            "# Real tokens per second of whole jobs",
            "",
            f"{MICRO_BATCH_SIZE} samples a rank and step, one a paragraph (mean {lengths.mean():.0f} tokens, longest "
            f"{lengths.max()}), vocabulary of {VOCABULARY:,}, AdamW; {args.rounds} jobs of each in turn. The median "
            f"step after {WARM_UP}. Utilisation: multiplications and additions that the real tokens need, over the "
            "highest rate of matrix multiplication measured beside the jobs.",
            "",
        ]
        for title, found in results.items():
            lines += table(title, found)
        write("throughput", {**where, "results": results}, [*lines, *setting_lines(where)])


def compare(args: argparse.Namespace, model: str, precision: str, ranks: int, lengths: np.ndarray) -> dict:
    """All systems in turn, some rounds, and the machine's peak beside them."""
    layers, hidden, _ = PRESETS[model]
    rates: dict[str, list[float]] = {system: [] for system in args.systems}
    memory, peaks = dict.fromkeys(args.systems, 0.0), []
    for _ in range(args.rounds):
        peaks.append(matmul_peak(precision, ranks, threads(ranks)))
        for system in args.systems:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                architecture(model, vocab_size=VOCABULARY).save_pretrained(folder / "model")
                steps = args.steps or STEPS[model]
                measured, megabytes = run(system, args.data, folder, precision, ranks, steps)
            rates[system] += measured
            memory[system] = max(memory[system], megabytes)
            print(f"{system}: {statistics.median(measured):,.0f} real tokens/s", flush=True)
    needed, peak = flops_per_token(lengths, layers, hidden), max(peaks)
    medians = {system: statistics.median(values) for system, values in rates.items()}
    return {
        "matmul_peak_gflops": peak / 1e9,
        "gflops_per_token": needed / 1e9,
        "systems": {
            system: {
                "real_tokens_per_s": rate,
                "over_first": rate / medians[args.systems[0]],
                "utilisation": rate * needed / peak,
                "peak_memory_mb": memory[system],
                "steps": rates[system],
            }
            for system, rate in medians.items()
        },
    }


def table(title: str, found: dict) -> list[str]:
    lines = [
        f"## {title}",
        "",
        f"Matrix multiplication: {found['matmul_peak_gflops']:,.0f} GFLOP/s.",
        "",
        "| | real tokens/s | over the first | utilisation | peak memory of a rank, MB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for system, row in found["systems"].items():
        lines.append(
            f"| {system} | {row['real_tokens_per_s']:,.0f} | {row['over_first']:.2f} | {row['utilisation']:.1%} | "
            f"{row['peak_memory_mb']:,.0f} |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    main()
