"""How much of the gradients' communication hides behind the backward pass, against what users have today.

Two hosts (network namespaces, one core a host), a cable of a set speed, the same model, data, optimizer and maximum
norm; all ways to reduce gradients take turns step by step in one run. Needs root and iproute2.

    python benchmarks/overlap.py --json
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import two_hosts
from record import setting, setting_lines, write

WORKER = Path(__file__).parent / "overlap_worker.py"
RATES = {"unlimited": None, "1 Gbit/s": "1gbit", "500 Mbit/s": "500mbit"}
BASELINE = "no communication"

# A step without communication over the all-reduces alone at 1 Gbit/s: enough work to hide them, and not more.
WORK_OVER_TRANSFER = 1.75
CALIBRATED_AT = "1 Gbit/s"


def run(rate: str, ranks_per_host: int, port: int, **options) -> dict:
    """Run the worker on all ranks; what rank 0 reports."""
    two_hosts.set_rate(RATES[rate])
    command = [sys.executable, str(WORKER)]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            command.append(flag)
        elif isinstance(value, list):
            command += [flag, *value]
        elif value is not False:
            command += [flag, str(value)]
    processes = two_hosts.start_ranks(command, ranks_per_host, port)
    try:
        output = processes[0].communicate(timeout=1800)[0]
        codes = [process.wait(60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    line = next((line for line in output.splitlines() if line.startswith("RESULT ")), None)
    if line is None or any(codes):
        sys.exit(f"a rank failed (exit codes {codes}):\n{output[-2000:]}")
    return json.loads(line.removeprefix("RESULT "))


def calibrate(ports: Iterator[int]) -> int:
    """Sequences a rank, so that a step has the wanted ratio to the transfer."""
    sequences = 16
    for _ in range(2):
        found = run(CALIBRATED_AT, 1, next(ports), sequences=sequences, rounds=3, variants=[BASELINE])
        ratio = statistics.median(found["steps_s"][BASELINE]) / found["all_reduces_alone_s"]
        print(f"{sequences} sequences: a step takes {ratio:.2f} of the all-reduces alone", flush=True)
        sequences = max(1, round(sequences * WORK_OVER_TRANSFER / ratio))
    return sequences


def summarise(report: dict) -> dict:
    """Medians, in ms, and shares of the step without communication."""
    medians = {name: statistics.median(values) for name, values in report["steps_s"].items()}
    alone = report["all_reduces_alone_s"]
    return {
        "all_reduces_alone_ms": 1e3 * alone,
        "step_over_all_reduces": medians[BASELINE] / alone,
        "variants": {
            name: {
                "step_ms": 1e3 * median,
                "speed_over_no_communication": medians[BASELINE] / median,
                "wait_over_all_reduces": statistics.median(report["wait_s"][name]) / alone
                if name in report["wait_s"]
                else None,
            }
            for name, median in medians.items()
        },
    }


def table(title: str, summary: dict) -> list[str]:
    lines = [
        f"## {title}",
        "",
        f"All-reduces alone {summary['all_reduces_alone_ms']:.0f} ms; a step without communication takes "
        f"{summary['step_over_all_reduces']:.2f} of that.",
        "",
        "| | step, ms | speed / no communication | waiting / all-reduces alone |",
        "| --- | --- | --- | --- |",
    ]
    for name, row in summary["variants"].items():
        wait = "" if row["wait_over_all_reduces"] is None else f"{row['wait_over_all_reduces']:.1%}"
        lines.append(f"| {name} | {row['step_ms']:.0f} | {row['speed_over_no_communication']:.3f} | {wait} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="steps of each variant that count")
    parser.add_argument("--sequences", type=int, help="of 128 tokens a rank (default: calibrated)")
    parser.add_argument("--rates", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="these variants, at the rates, on two ranks")
    parser.add_argument("--bucket-size-mb", type=float, default=1.0)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/overlap.json and .md")
    args = parser.parse_args()
    where, ports, results = setting("torch", "deepspeed", "transformers"), itertools.count(29_601), {}
    with two_hosts.two_hosts():
        sequences = args.sequences or calibrate(ports)
        common = {"sequences": sequences, "rounds": args.rounds, "bucket_size_mb": args.bucket_size_mb}
        if args.only:
            common["variants"] = list(dict.fromkeys([BASELINE, *args.only]))
        cases = [(f"2 ranks, {rate}", rate, 1, {}) for rate in args.rates]
        if not args.only:
            cases += [
                (
                    "2 ranks, 1 Gbit/s, accumulation 4",
                    CALIBRATED_AT,
                    1,
                    {"accumulation": 4, "sequences": max(1, sequences // 4)},
                ),
                ("2 ranks, 1 Gbit/s, untied embedding", CALIBRATED_AT, 1, {"untied": True}),
                (
                    "4 ranks, two on each host and core, 1 Gbit/s",
                    CALIBRATED_AT,
                    2,
                    {"sequences": max(1, sequences // 2)},
                ),
            ]
        for title, rate, ranks_per_host, changes in cases:
            results[title] = summarise(run(rate, ranks_per_host, next(ports), **{**common, **changes}))
            print("\n".join(table(title, results[title])), flush=True)
    if args.json:
        lines = [
            "# How much communication hides behind the backward pass?",
            "",
            f"{sequences} sequences of 128 tokens a rank, BERT of 4 layers x 256, vocabulary 30,528 (11.2 million "
            f"parameters, fp32), AdamW, maximum norm 0.5, medians of {args.rounds} steps, all rows in turn.",
            "",
        ]
        for title, summary in results.items():
            lines += table(title, summary)
        write("overlap", {**where, "sequences": sequences, "results": results}, [*lines, *setting_lines(where)])


if __name__ == "__main__":
    main()
