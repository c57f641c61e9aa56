"""Progress bars that can also be read where there is no terminal: in a log file, or through pdsh."""

import sys
from collections.abc import Iterable

from tqdm import tqdm

INTERVAL_S = 10.0


def progress_bar(iterable: Iterable | None = None, **options) -> tqdm:
    """A tqdm bar on stderr; where that is no terminal, a line every ten seconds.

    A bar draws itself over and over in one line, and what passes lines on (pdsh, a log) would show nothing until the
    end.
    """
    if sys.stderr.isatty():
        return tqdm(iterable, **options)
    # All at position 0: a bar within another one would move the cursor.
    lines = {"file": _Lines(), "position": 0, "mininterval": INTERVAL_S, "maxinterval": INTERVAL_S, "delay": INTERVAL_S}
    return tqdm(iterable, **options, **lines)


class _Lines:
    """Takes what tqdm draws, gives each drawing a line."""

    def write(self, text: str) -> None:
        text = text.strip()
        if text:
            sys.stderr.write(text + "\n")

    def flush(self) -> None:
        sys.stderr.flush()
