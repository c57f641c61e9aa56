"""`ds-bert`: picks the subcommand and turns errors meant for the user into one line and an exit code."""

import argparse
import importlib
import sys

from ds_bert.errors import UserError
from ds_bert.version import __version__

# name -> (module, what it does). Modules are imported when their command runs: torch alone takes seconds to load.
COMMANDS = {
    "prepare": ("ds_bert.cli.prepare", "raw text -> tokenized samples on disk"),
    "balance": ("ds_bert.cli.balance", "lengths -> how evenly each sampling strategy loads a cluster's ranks"),
    "doctor": ("ds_bert.cli.doctor", "hosts -> whether a job would run on them, and what to do if not"),
    "pretrain": (
        "ds_bert.cli.pretrain",
        "prepared data -> trained checkpoints (starts the deepspeed launcher)",
    ),
    "sweep": (
        "ds_bert.cli.sweep",
        "values of the configuration to try -> trained trials, the best configuration, a plot",
    ),
    "evaluate": ("ds_bert.cli.evaluate", "checkpoint or model folder -> held-out loss and masked accuracy"),
    "trace": ("ds_bert.cli.trace", "traced run -> exposed and hidden communication of each step, overlap.png"),
    "export": ("ds_bert.cli.export", "checkpoint -> folder that transformers and sentence-transformers load"),
}

OVERVIEW = """\
the road from text to a model:
  ds-bert prepare  --input corpus.txt --output data/ --vocab-size 30000
  ds-bert balance  --data data/ --world-size 64 --micro-batch-size 16        # optional: for a cluster you plan
  ds-bert pretrain --data data/ --output run/ --model small \\
                   --deepspeed_config ds_configs/cpu_quickstart.json --num-procs 2 --max-steps 1000
  ds-bert evaluate --checkpoint run/ --data data/
  ds-bert export   --checkpoint run/ --output model/      # AutoModelForMaskedLM.from_pretrained("model/")

`ds-bert COMMAND --help` lists every option of a command."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-bert",
        description="Fast BERT-type pretraining on DeepSpeed.",
        epilog=OVERVIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ds-bert {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of: " + ", ".join(COMMANDS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `ds-bert`. Returns the exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    args = build_parser().parse_args(argv)
    module_name, summary = COMMANDS[args.command]
    module = importlib.import_module(module_name)
    parser = argparse.ArgumentParser(
        prog=f"ds-bert {args.command}", description=module.__doc__ or summary, allow_abbrev=False
    )
    module.add_arguments(parser)
    try:
        return module.run(parser.parse_args(args.arguments)) or 0
    except UserError as error:
        print(f"ds-bert {args.command}: error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"ds-bert {args.command}: error: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"ds-bert {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
