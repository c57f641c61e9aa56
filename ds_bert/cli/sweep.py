"""Search values of a DeepSpeed configuration, such as batch size and learning rate, with real trainings."""

import argparse
from pathlib import Path

from ds_bert.accelerator.device import choose_device
from ds_bert.arguments import positive_float, positive_int
from ds_bert.cli.machines import add_machines_arguments, find_machines
from ds_bert.errors import UsageError
from ds_bert.training.options import add_training_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_training_arguments(parser)
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="sweep folder: trials.csv, best_config.json, ..."
    )
    parser.add_argument(
        "--param",
        required=True,
        nargs="+",
        action="extend",
        metavar="PATH=SPEC",
        help="a key of the JSON by its path and its values: a,b,c or lo..hi or log:lo..hi; may be repeated",
    )
    parser.add_argument(
        "--trials",
        type=positive_int,
        metavar="N",
        help="draw so many (needed with a range; default: every combination of the lists once)",
    )
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--budget-samples", type=positive_int, metavar="N", help="samples that each trial sees")
    budget.add_argument(
        "--budget-minutes",
        type=positive_float,
        metavar="M",
        help="minutes that each trial trains, by the speed of its first steps",
    )
    parser.add_argument(
        "--pruner",
        choices=("none", "median", "hyperband"),
        default="none",
        help="ends trials early that do badly (default: none)",
    )
    add_machines_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="go on with the sweep in --output")


def run(args: argparse.Namespace) -> int:
    choose_device()
    from ds_bert.sweep import Sweep, SweepSettings, parse_parameter

    parameters = tuple(parse_parameter(text) for text in args.param)
    paths = [parameter.path for parameter in parameters]
    repeated = next((path for path in paths if paths.count(path) > 1), None)
    if repeated:
        raise UsageError(f"--param {repeated}: given twice; write its values in one")
    ranges = [parameter for parameter in parameters if parameter.choices is None]
    if ranges and args.trials is None:
        raise UsageError(f"--param {ranges[0].path}={ranges[0].spec}: a range needs --trials N")
    settings = SweepSettings(
        parameters,
        budget_samples=args.budget_samples,
        budget_minutes=args.budget_minutes,
        trials=args.trials,
        machines=find_machines(args),
        pruner=args.pruner,
    )
    folder = Path(args.output)
    sweep = Sweep(folder, args, settings, resume=args.resume)
    sweep.run()
    print(f"{folder}/trials.csv, best_config.json, sweep.png")
    return 0
