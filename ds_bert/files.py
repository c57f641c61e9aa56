"""Files that several processes may meet in: written whole or not at all, locked by the system itself."""

import fcntl
import math
import os
import time
from pathlib import Path

POLL_S = 0.1


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader, even after a crash, sees the old text or the new.

    Args:
        path: file to write; `path.tmp` beside it is used meanwhile.
        text: whole content, written as UTF-8.

    Raises:
        OSError: the file cannot be written; the old one is unchanged.
    """
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def lock_exclusively(descriptor: int, *, wait_s: float = math.inf) -> bool:
    """Lock an open file or folder against other processes, until it is closed or this process ends.

    The system keeps the lock, not the file's existence, so a killed process leaves nothing to tidy up.

    Args:
        descriptor: of the open file or folder.
        wait_s: how long to wait for another process that has it; 0: not at all.

    Returns:
        whether this process has the lock now.

    Raises:
        OSError: the file system has no locks (some network file systems).
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
