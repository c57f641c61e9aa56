"""Starting and ending the ranks of a program: through the deepspeed launcher, and inside each of them."""

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import IO

import psutil

from ds_bert.cluster.interface import free_port
from ds_bert.errors import UserError

LAUNCHER_LOG_LEVEL = "error"


def launch(module: str, arguments: list[str], num_procs: int) -> int:
    """Run a module on this machine's ranks through the deepspeed launcher and wait for it.

    Args:
        module: run as `python -m MODULE` by each rank.
        arguments: of the module.
        num_procs: number of ranks.

    Returns:
        the launcher's exit code: that of the first rank that failed, or 0.
    """
    process = start(module, arguments, num_procs)
    received: list[int] = []

    def stop(signum: int, frame) -> None:
        received.append(signum)
        terminate(process)

    with ending_signals_to(stop):
        code = process.wait()
    if received:
        print(f"stopped by {signal.Signals(received[0]).name}", file=sys.stderr)
        return 128 + received[0]
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def ending_signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """While the signals that ask a command to end go to a handler."""
    former = {signum: signal.signal(signum, handler) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, previous in former.items():
            signal.signal(signum, previous)


def start(module: str, arguments: list[str], num_procs: int, output: IO | None = None) -> subprocess.Popen:
    """Start the deepspeed launcher on a module; `terminate` ends it.

    Args:
        module, arguments, num_procs: see `launch`.
        output: file for what the ranks print; None for this process's own streams.
    """
    command = [*launcher_command(num_procs), "--module", module, *arguments]
    # In a session of its own: a Ctrl-C at the terminal then reaches this process alone, which passes it on. The
    # launcher's outer process would die of it and leave the ranks behind.
    return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)


def terminate(launcher: subprocess.Popen) -> None:
    """Ask the deepspeed launcher to end its ranks."""
    with contextlib.suppress(psutil.Error):
        outer = psutil.Process(launcher.pid)
        for part in outer.children() or [outer]:
            part.terminate()


def default_num_procs() -> int:
    """One rank for each GPU; without a GPU a single one, which uses all cores."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    return 1 if accelerator.device_name() == "cpu" else max(1, accelerator.device_count())


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


def launcher_command(num_procs: int) -> list[str]:
    """The deepspeed launcher for so many ranks on this machine; a script or `--module NAME` follows."""
    options = [f"--num_gpus={num_procs}", f"--master_port={free_port()}", f"--log_level={LAUNCHER_LOG_LEVEL}"]
    return [sys.executable, "-m", "deepspeed.launcher.runner", *options]


def run_rank(name: str, work: Callable[[int], None]) -> int:
    """The frame of a rank's program: join the others, work, leave, and say on rank 0 what all ranks failed of.

    Args:
        name: of the command, for the message.
        work: called with the rank; a `UserError` it raises must be the same on all ranks.

    Returns:
        the exit code: 0 done, else the error's.
    """
    import torch.distributed as dist

    logging.basicConfig(format="%(message)s", level=logging.INFO)
    _join_ranks()
    rank = dist.get_rank()
    if rank:  # rank 0 says the same
        for repeating in ("DeepSpeed", "transformers"):
            logging.getLogger(repeating).setLevel(logging.ERROR)
        logging.getLogger("ds_bert").setLevel(logging.WARNING)
    try:
        work(rank)
    except UserError as error:
        if rank == 0:
            print(f"{name}: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        dist.destroy_process_group()
    return 0


def _join_ranks() -> None:
    """Start the process group, over gloo without a GPU and NCCL with one, and share the machine's cores."""
    import deepspeed
    import torch

    from ds_bert.cluster.ops import skip_unused_comm_op

    for noisy in ("datasets", "httpx"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    skip_unused_comm_op()
    # On CPUs oneDNN keeps a compiled kernel for each of the last 1,024 shapes; with samples of many lengths nearly
    # every shape is new, and a small model's memory grows by half a gigabyte for nothing.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    if "OMP_NUM_THREADS" not in os.environ:
        ranks_here = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_here))
    deepspeed.init_distributed()
