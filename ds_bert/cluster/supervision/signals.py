"""The signals that ask a command to end."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def ending_signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """While the signals that ask a command to end go to a handler."""
    former = {signum: signal.signal(signum, handler) for signum in ENDING}
    try:
        yield
    finally:
        for signum, previous in former.items():
            signal.signal(signum, previous)
