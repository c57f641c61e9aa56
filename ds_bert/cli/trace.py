"""Say how much of a run's communication the backward pass hid, and draw a step's timeline."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_DIR", help='a run with "bucket_clipping": {"trace": true}, or its traces')


def run(args: argparse.Namespace) -> int:
    from ds_bert.reduction.trace_report import as_table, plot_overlap, read_traces, typical_step

    folder = Path(args.run)
    steps = read_traces(folder)
    print(as_table(steps))
    picture = folder / "overlap.png"
    plot_overlap(typical_step(steps), picture)
    print(f"picture: {picture}; every rank's trace opens in ui.perfetto.dev")
    return 0
