"""Progress bars that can also be read where there is no terminal: in a log file, or through pdsh."""

import sys

from tqdm import tqdm

INTERVAL_S = 10.0


def progress_bar(**options) -> tqdm:
    """A tqdm bar on stderr; where that is no terminal, a line every ten seconds.

    A bar draws itself over and over in one line, and what passes lines on (pdsh, a log) would show nothing until the
    end.
    """
    if sys.stderr.isatty():
        return tqdm(**options)
    return tqdm(**options, file=_Lines(), mininterval=INTERVAL_S, maxinterval=INTERVAL_S)


class _Lines:
    """Takes what tqdm draws, gives each drawing a line."""

    def write(self, text: str) -> None:
        text = text.strip()
        if text:
            sys.stderr.write(text + "\n")

    def flush(self) -> None:
        sys.stderr.flush()
