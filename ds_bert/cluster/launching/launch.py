"""Starting the ranks of a job, on this machine or on the hosts of a hostfile, and seeing them to their end."""

import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ds_bert.cluster.launching import variables
from ds_bert.cluster.launching.launchers import launcher_commands
from ds_bert.cluster.launching.machines import Machines
from ds_bert.cluster.launching.running_job import CoordinatorAddress, RunningJob
from ds_bert.cluster.network.interface import free_port
from ds_bert.cluster.network.ssh import end_leftovers, master_address
from ds_bert.cluster.supervision.outcome import USER_ERROR, Outcome, announce
from ds_bert.cluster.supervision.protocol import COMMAND, COORDINATOR_PORT, FAILURE_TIMEOUT, JOB
from ds_bert.cluster.supervision.signals import ending_signals_to
from ds_bert.cluster.supervision.task import Task


def launch(command: str, module: str, arguments: list[str], machines: Machines, max_restarts: int = 0) -> int:
    """Run a module on all ranks and wait for it.

    Args:
        command: what the user calls it, for messages.
        module: run as `python -m MODULE` by each rank.
        arguments: of the module.
        machines: where.
        max_restarts: start again so often after a failure that is no `UserError`.

    Returns:
        the exit code: 0, that of the rank that failed first, or 128 + the signal's number.
    """
    received: list[int] = []
    for attempt in range(max_restarts + 1):
        code, can_restart = _launch_once(command, module, arguments, machines, received)
        if not can_restart or attempt == max_restarts:
            break
        print(f"{command}: starting again ({attempt + 1} of {max_restarts})", file=sys.stderr, flush=True)
    return code


def _launch_once(
    command: str, module: str, arguments: list[str], machines: Machines, received: list[int]
) -> tuple[int, bool]:
    with start(command, module, arguments, machines) as job:

        def stop(signum: int, frame) -> None:
            name = signal.Signals(signum).name
            # The second one is from somebody who does not want to wait.
            (job.kill if received else job.stop)(name)
            received.append(signum)

        with ending_signals_to(stop):
            code = job.wait()
    outcome = job.outcome
    if received:
        announce(Outcome(stopped_by=signal.Signals(received[0]).name), command)
        return 128 + received[0], False
    if outcome is None:
        if code:
            print(f"{command}: error: the launcher ended with exit code {code}; it said why above", file=sys.stderr)
        return code, False
    announce(outcome, command)
    return code, outcome.failure is not None and outcome.failure.kind != USER_ERROR


@contextmanager
def start(
    command: str, module: str, arguments: list[str], machines: Machines, output: IO | None = None
) -> Iterator[RunningJob]:
    """Start the ranks of a job.

    Args:
        command, module, arguments, machines: see `launch`.
        output: file for what the ranks print; None for this process's own streams.
    """
    hosts = [host.name for host in machines.hosts]
    master = "127.0.0.1" if machines.is_local else machines.master_addr or master_address(hosts)
    coordinator_port, timeout_s = free_port(), machines.timeout_s
    name = secrets.token_hex(8)
    ours = {JOB: name, COORDINATOR_PORT: str(coordinator_port), FAILURE_TIMEOUT: str(timeout_s), COMMAND: command}
    task = Task(
        module,
        arguments,
        os.getcwd(),
        settings={**variables.of_deepspeed_env(), **ours},
        environment=variables.of_this_shell(),
    )
    master_port = machines.master_port or free_port()
    with tempfile.TemporaryDirectory(prefix="ds_bert_") as folder:
        commands = launcher_commands(machines, task, master, master_port, Path(folder))
        job = RunningJob(commands, CoordinatorAddress(master, coordinator_port, name, timeout_s), output)
        try:
            yield job
        finally:
            if job.outcome != Outcome() and not machines.is_local:
                end_leftovers(hosts, task.encode())
