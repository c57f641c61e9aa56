"""Held-out loss, perplexity and masked accuracy of a checkpoint or a Hugging Face model."""

import argparse
import json
import tempfile
from pathlib import Path

from ds_bert.accelerator.device import choose_device
from ds_bert.arguments import forwarded, positive_int
from ds_bert.training.evaluate_program import add_evaluate_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_evaluate_arguments(parser)
    parser.add_argument("--num-procs", type=positive_int, default=1, metavar="N", help="ranks (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    choose_device()
    figures = _evaluate_on_ranks(args)
    if isinstance(figures, int):
        return figures
    if args.json:
        print(json.dumps(figures))
        return 0
    print(f"checkpoint                    {figures['checkpoint']}")
    print(f"held-out samples              {figures['samples']:,} ({figures['eval_masked_tokens']:,} masked tokens)")
    print(f"loss (nats per masked token)  {figures['eval_loss']:.6f}")
    print(f"perplexity                    {figures['eval_perplexity']:.4f}")
    print(f"masked accuracy               {figures['eval_accuracy']:.6f}")
    print(f"  always the most frequent    {figures['most_frequent_token_accuracy']:.6f}")
    return 0


def _evaluate_on_ranks(args: argparse.Namespace) -> dict | int:
    """The figures, or the exit code of ranks that failed."""
    from ds_bert.cluster.launching.launch import launch
    from ds_bert.cluster.launching.machines import Machines
    from ds_bert.training.evaluate_program import evaluate

    if args.num_procs == 1:
        return evaluate(args)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "figures.json"
        arguments = [*forwarded(args, add_evaluate_arguments), f"--result-file={result}"]
        code = launch("ds-bert evaluate", "ds_bert.training.evaluate_program", arguments, Machines(args.num_procs))
        return code or json.loads(result.read_text())
