"""One run in a folder at a time: two would write the same checkpoints and metrics."""

import os
import socket
from pathlib import Path
from typing import IO

from ds_bert.errors import UserError
from ds_bert.files import lock_exclusively

LOCK_FILE = ".lock"


def check_free(run_folder: Path) -> None:
    """Notice a run that is going on in this folder before ranks are started.

    Raises:
        UserError: see `hold`.
    """
    if (run_folder / LOCK_FILE).is_file():
        hold(run_folder).close()


def hold(run_folder: Path) -> IO:
    """Take the run folder for this process, until it ends or the returned file is closed.

    Raises:
        UserError: another process has it; its host and number are given.
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    file = open(run_folder / LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115
    if not lock_exclusively(file.fileno(), wait_s=0):
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise UserError(f"--output {run_folder}: a run is going on in it ({holder}); wait for its end, or end it")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file
