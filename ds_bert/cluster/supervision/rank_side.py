"""The rank's side of its supervision (see `supervisor`): says why it fails, stops when asked, never outlives it."""

import contextlib
import ctypes
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator

import psutil

from ds_bert.cluster.supervision.outcome import FAILED, FOLLOWED, USER_ERROR
from ds_bert.cluster.supervision.processes import StoppedFor
from ds_bert.cluster.supervision.protocol import FAILURE_TIMEOUT, REPORT_FD
from ds_bert.errors import UserError, first_line

PR_SET_PDEATHSIG = 1
POLL_S = 1.0

# In what gloo, NCCL and torch say when the other end of a connection is gone.
BROKEN_CONNECTION = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "TCPStore")


def is_supervised() -> bool:
    """Whether a supervisor started this process."""
    return REPORT_FD in os.environ


def report(error: BaseException) -> None:
    """Tell the supervisor what this rank fails of."""
    kind, reason = USER_ERROR, str(error)
    if not isinstance(error, UserError):
        kind = FOLLOWED if _is_broken_connection(error) else FAILED
        reason = f"{type(error).__name__}: {first_line(error)}"
    message = {"kind": kind, "reason": reason, "exit_code": getattr(error, "exit_code", 1)}
    if kind != USER_ERROR:
        message["traceback"] = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        os.write(int(os.environ[REPORT_FD]), json.dumps(message).encode())
    # A stopped one would outlive this process, which may be ending before it could count as stopped for too long.
    with contextlib.suppress(psutil.Error):
        supervisor = psutil.Process(os.getppid())
        if supervisor.status() == psutil.STATUS_STOPPED:
            supervisor.kill()


def _is_broken_connection(error: BaseException) -> bool:
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in BROKEN_CONNECTION)


def die_with_supervisor() -> None:
    """From now on this process ends when its supervisor does, and ends it if that is stopped for too long."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    timeout_s = float(os.environ[FAILURE_TIMEOUT])
    threading.Thread(target=_end_if_stopped, args=(os.getppid(), timeout_s), daemon=True).start()


def _end_if_stopped(pid: int, timeout_s: float) -> None:
    with contextlib.suppress(psutil.Error):
        stopped = StoppedFor(pid)
        while stopped.seconds() <= timeout_s:
            time.sleep(POLL_S)
        psutil.Process(pid).kill()


class StopRequest:
    """A wish to stop (SIGTERM): obeyed at once, except inside `deferred`."""

    def __init__(self) -> None:
        self.received = False
        """Inside `deferred`, whether this rank was asked to stop."""
        self._deferred = False

    def listen(self) -> None:
        """From now on take SIGTERM, and leave Ctrl-C to the supervisor."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _on_signal(self, signum: int, frame) -> None:
        self.received = True
        if not self._deferred:
            os._exit(128 + signum)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """While the caller looks at `received` itself."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False


stop_request = StopRequest()
