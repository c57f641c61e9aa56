"""Options that several commands share, and the types of their values."""

import argparse
from collections.abc import Callable

from ds_bert.constants import MAX_INT


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


def add_trust_remote_code(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that comes with a model or tokenizer folder",
    )


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
