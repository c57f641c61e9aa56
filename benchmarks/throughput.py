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
import statistics
from pathlib import Path

import numpy as np
from job import PRECISIONS, Job, threads
from matmul_peak import matmul_peak
from record import RESULTS, setting, setting_lines, write

from ds_bert.data import PreparedData
from ds_bert.modeling import PRESETS

WORKER = Path(__file__).parent / "throughput_hf_trainer.py"
SYSTEMS = ("HF Trainer + DeepSpeed", "HF Trainer, group_by_length", "ds_bert padded", "ds_bert packed")
VOCABULARY = 30_522
MICRO_BATCH_SIZE = 8
MASKED_SHARE = 0.15
WARM_UP = 5  # steps not counted
STEPS = {"tiny": 60, "mini": 40, "small": 30, "base": 15, "large": 10}


def run(system: str, data: Path, model: str, precision: str, ranks: int, steps: int) -> tuple[list[dict], float]:
    """One job of a system.

    Returns:
        metrics of each step; peak resident memory of its largest process, in MB.
    """
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        **PRECISIONS[precision],
    }
    shape = {"ranks": ranks, "steps": steps, "vocabulary": VOCABULARY}
    if system.startswith("ds_bert"):
        config["ds_bert"] = {"execution": {"packed": system.endswith("packed")}}
        return Job(data, model, config, **shape).wait()
    arguments = ["--group-by-length"] if system.endswith("group_by_length") else []
    return Job(data, model, config, **shape, program=[WORKER], arguments=arguments).wait()


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
    where = setting("torch", "deepspeed", "transformers", "accelerate")
    lengths = np.asarray(PreparedData(args.data).train.lengths)
    for model, precision, ranks in itertools.product(args.models, args.precisions, args.ranks):
        title = f"{model}, {precision}, {ranks} rank{'s' if ranks > 1 else ''} of {threads(ranks)} core(s)"
        found = {**compare(args, model, precision, ranks, lengths), "rounds": args.rounds, "setting": where}
        print("\n".join(table(title, found)), flush=True)
        if args.json:
            record(title, found, lengths)


def record(title: str, found: dict, lengths: np.ndarray) -> None:
    """Put one comparison into the results, beside those of earlier runs."""
    path = RESULTS / "throughput.json"
    results = {**(json.loads(path.read_text())["results"] if path.is_file() else {}), title: found}
    lines = [
        "# Real tokens per second of whole jobs",
        "",
        f"{MICRO_BATCH_SIZE} samples a rank and step, one a paragraph (mean {lengths.mean():.0f} tokens, longest "
        f"{lengths.max()}), vocabulary of {VOCABULARY:,}, AdamW; the systems of a table took turns in one run. The "
        f"median step after {WARM_UP}. Utilisation: multiplications and additions that the real tokens need, over the "
        "highest rate of matrix multiplication measured beside the jobs.",
        "",
    ]
    for name, one in results.items():
        lines += [*table(name, one)[:-1], "", f"{one['rounds']} jobs of each.", *setting_lines(one["setting"]), ""]
    write("throughput", {"results": results}, lines[:-1])


def compare(args: argparse.Namespace, model: str, precision: str, ranks: int, lengths: np.ndarray) -> dict:
    """All systems in turn, some rounds, and the machine's peak beside them."""
    layers, hidden, _ = PRESETS[model]
    rates: dict[str, list[float]] = {system: [] for system in args.systems}
    waits: dict[str, list[float]] = {system: [] for system in args.systems}
    memory, peaks = dict.fromkeys(args.systems, 0.0), []
    for _ in range(args.rounds):
        peaks.append(matmul_peak(precision, ranks, threads(ranks)))
        for system in args.systems:
            lines, megabytes = run(system, args.data, model, precision, ranks, args.steps or STEPS[model])
            measured = [line["real_tokens_per_s"] for line in lines[WARM_UP:]]
            rates[system] += measured
            waits[system] += [line["data_wait_s"] / line["step_s"] for line in lines[WARM_UP:] if "step_s" in line]
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
                "data_wait_share": statistics.mean(waits[system]) if waits[system] else None,
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
        "| | real tokens/s | over the first | utilisation | peak memory of a rank, MB | waiting for data |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for system, row in found["systems"].items():
        share = row.get("data_wait_share")
        waiting = "-" if share is None else f"{share:.1%}"
        lines.append(
            f"| {system} | {row['real_tokens_per_s']:,.0f} | {row['over_first']:.2f} | {row['utilisation']:.1%} | "
            f"{row['peak_memory_mb']:,.0f} | {waiting} |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    main()
