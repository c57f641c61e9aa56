"""What is so on one host: `python -m ds_bert.doctor.facts QUESTIONS` prints it as one line of JSON.

Facts only; `findings` says what they mean.
"""

import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ds_bert.errors import UserError, first_line
from ds_bert.version import __version__

PACKAGES = ("torch", "deepspeed", "transformers")
SHARED_MEMORY = "/dev/shm"

# Enough to meet a full disk or an exhausted quota, where creating an empty file still works.
PROBE_BYTES = 4 << 20


@dataclass(frozen=True)
class Questions:
    """What to look at."""

    folder: str
    """That ranks will work in."""
    data: str | None = None
    """Prepared data; the absolute path."""
    output: str | None = None
    """A run folder, which need not exist; the absolute path."""
    port: int | None = None
    """Of rank 0, on its host."""
    ops: tuple[str, ...] = ()
    """DeepSpeed's builders of ops to compile."""

    def encode(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    """Answer the questions in the first argument."""
    questions = Questions(**json.loads(sys.argv[1]))
    facts = {
        "versions": versions(),
        "own_name": own_name(),
        "has_folder": os.path.isdir(questions.folder),
        "shared_memory": shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else None,
        "memory": psutil.virtual_memory().available,
        "gpus": gpus(),
        "ops_problem": ops_problem(questions.ops),
        "data": data(questions.data) if questions.data else None,
        "output": output(Path(questions.output)) if questions.output else None,
        "port_problem": port_problem(questions.port) if questions.port else None,
        "time": time.time(),
    }
    print(json.dumps(facts), flush=True)


def versions() -> dict[str, str]:
    """Of Python and of what must be the same on all hosts."""
    found = {"python": platform.python_version(), "ds_bert": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def own_name() -> dict:
    """The host's name and the address that it has for it; None where it does not resolve."""
    name = socket.gethostname()
    try:
        return {"name": name, "address": socket.gethostbyname(name)}
    except OSError:
        return {"name": name, "address": None}


def gpus() -> list[dict]:
    """Name and bytes of memory of each GPU."""
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": one.name, "memory": one.total_memory} for one in properties]


def ops_problem(names: tuple[str, ...]) -> str | None:
    """Why DeepSpeed's ops cannot be compiled; compiles those that are not yet."""
    if not names:
        return None
    from ds_bert.accelerator.device import choose_device

    choose_device()
    from ds_bert.accelerator.compiled_ops import build_ops, skip_unused_comm_op

    skip_unused_comm_op()
    return build_ops(list(names))


def data(folder: str) -> dict:
    """A hash of prepared data's manifest and sizes, or what is wrong with it."""
    from ds_bert.data.prepared import PreparedData

    try:
        manifest = PreparedData(folder).manifest
    except (UserError, OSError) as error:
        return {"problem": first_line(error)}
    files = sorted(
        (str(path.relative_to(folder)), path.stat().st_size) for path in Path(folder).rglob("*") if path.is_file()
    )
    words = json.dumps([manifest, files], sort_keys=True)
    return {"problem": None, "hash": hashlib.sha256(words.encode()).hexdigest()[:16]}


def output(folder: Path) -> dict:
    """Free bytes where a run folder is or would be, and why nothing can be written there."""
    existing = folder
    while not existing.is_dir():
        existing = existing.parent
    probe = existing / f".ds_bert_doctor_{socket.gethostname()}_{os.getpid()}"
    problem = None
    try:
        with probe.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        problem = "full" if full else error.strerror
    finally:
        probe.unlink(missing_ok=True)
    return {"folder": str(existing), "free": shutil.disk_usage(existing).free, "problem": problem}


def port_problem(port: int) -> str | None:
    """Why nothing can listen at a port, with the process that does."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            return None
        except OSError as error:
            reason = error.strerror
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                process = psutil.Process(connection.pid)
                return f"{reason}: by process {process.pid} ({' '.join(process.cmdline())[:60]})"
    except psutil.Error:
        pass  # other users' connections
    return reason


if __name__ == "__main__":
    main()
