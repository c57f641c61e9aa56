"""Watching and ending processes of this machine."""

import contextlib
import time

import psutil


class StoppedFor:
    """How long a process has been stopped (SIGSTOP, a debugger), as far as the calls have seen."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._since: float | None = None

    def seconds(self) -> float:
        """Since the first call of those that found it stopped without a break; 0 if it runs.

        Raises:
            psutil.Error: it has ended.
        """
        if self._process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            self._since = None
            return 0.0
        now = time.monotonic()
        self._since = self._since or now
        return now - self._since


def kill_tree(pid: int, grace_s: float = 0.0) -> None:
    """End a process with all that it started.

    Args:
        pid: of the process; one that has ended is fine.
        grace_s: for how long they may end by themselves after a SIGTERM; 0: SIGKILL at once.
    """
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        parts = [*process.children(recursive=True), process]
        if grace_s:
            for part in parts:
                with contextlib.suppress(psutil.Error):
                    part.terminate()
            parts = psutil.wait_procs(parts, timeout=grace_s)[1]
        for part in parts:
            with contextlib.suppress(psutil.Error):
                part.kill()
