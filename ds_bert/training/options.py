"""The options of a pretraining run: the same for `ds-bert pretrain` and for the program each rank runs."""

import argparse
from collections.abc import Callable

from ds_bert.config import MAX_INT


def _at_least(minimum: int) -> Callable[[str], int]:
    """An argparse type: whole numbers from `minimum` on."""

    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, not {value}")
        if value > MAX_INT:
            raise argparse.ArgumentTypeError(f"must be at most {MAX_INT}, not {value}")
        return value

    parse.__name__ = "int"  # argparse says "invalid int value"
    return parse


positive_int = _at_least(1)
not_negative_int = _at_least(0)


def positive_float(text: str) -> float:
    """An argparse type."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text}")
    return value


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of every command that trains."""
    parser.add_argument("--data", required=True, metavar="DIR", help="prepared data (from `ds-bert prepare`)")
    parser.add_argument(
        "--deepspeed_config",
        required=True,
        metavar="FILE",
        help="DeepSpeed JSON, with our section in it if you like",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="tiny|mini|small|base|large, or a Hugging Face name or folder",
    )
    parser.add_argument(
        "--from-config",
        action="store_true",
        help="take only the architecture of --model; its weights start fresh",
    )
    parser.add_argument(
        "--seed", type=not_negative_int, default=0, help="of weights, order, masks and dropout (default: 0)"
    )
    parser.add_argument(
        "--num-workers",
        type=not_negative_int,
        default=0,
        metavar="N",
        help="processes a rank that mask ahead (default: 0, none)",
    )
    add_trust_remote_code(parser)


def add_trust_remote_code(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that comes with a model or tokenizer folder",
    )


def add_pretrain_arguments(parser: argparse.ArgumentParser) -> None:
    add_training_arguments(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="run folder: checkpoints, metrics, loss.png")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--max-steps", type=positive_int, metavar="N", help="optimizer steps of the whole run")
    length.add_argument("--epochs", type=positive_int, metavar="N", help="passes over the data of the whole run")
    parser.add_argument(
        "--save-interval",
        type=positive_int,
        metavar="N",
        help="steps between checkpoints (default: only at the end)",
    )
    parser.add_argument(
        "--eval-interval",
        type=positive_int,
        metavar="N",
        help="steps between evaluations (default: only at the end)",
    )
    parser.add_argument(
        "--resume", default="auto", metavar="auto|never|TAG", help="go on from the newest whole checkpoint (default), "
        "refuse to, or go on from this one"
    )  # fmt: skip
    parser.add_argument("--keep-last", type=positive_int, metavar="N", help="delete all but the N newest checkpoints")


def forwarded(args: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None]) -> list[str]:
    """The command line that gives a rank's program the options the user gave.

    Args:
        args: parsed options, of which the program knows some.
        add_arguments: adds the program's options to a parser.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    words = []
    for action in parser._actions:
        value = getattr(args, action.dest)
        if value is True:
            words.append(action.option_strings[0])
        elif value not in (None, False):
            # One word, so that a value that begins with a dash stays a value.
            words.append(f"{action.option_strings[0]}={value}")
    return words
