"""Errors meant for the user: one line that says what is wrong, where, and what to do."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something in the user's hands is wrong (a file, a folder, a setting). The commands exit with code 1.

    The message is complete by itself: what is wrong, where (file, line, key), what to do. The commands print it
    as one line without a traceback.
    """

    exit_code = 1


class UsageError(UserError):
    """The command line itself is wrong. The commands exit with code 2."""

    exit_code = 2


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its kind if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def last_line(text: str) -> str:
    """The last line that is not blank: where a Python or compiler failure says what it was."""
    return next((line for line in reversed(text.strip().splitlines()) if line.strip()), "no message")


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """The end of an error about a name that is not in `valid`: the nearest one, and all of them."""
    valid = list(valid)
    nearest = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"{hint} (valid: {', '.join(valid)})"
