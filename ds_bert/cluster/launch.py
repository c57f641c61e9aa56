"""Starting the ranks of a job, on this machine or on the hosts of a hostfile, and seeing them to their end."""

import base64
import itertools
import json
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ds_bert.cluster import environment
from ds_bert.cluster.hostfile import Host
from ds_bert.cluster.hub import announce
from ds_bert.cluster.interface import free_port
from ds_bert.cluster.job import Command, HubAddress, Job
from ds_bert.cluster.remote import end_leftovers, is_this_host, master_address, remote_python, ssh_command
from ds_bert.cluster.signals import ending_signals_to
from ds_bert.cluster.supervised import STOPPED_TIMEOUT
from ds_bert.cluster.supervisor import COMMAND, DEFAULT_TIMEOUT_S, HUB_PORT, JOB
from ds_bert.cluster.verdict import USER_ERROR, Verdict
from ds_bert.cluster.worker import Task
from ds_bert.errors import UserError

WORKER = "ds_bert.cluster.worker"
LAUNCHERS = ("ssh", "pdsh", "openmpi", "mpich", "slurm")
# Its errors say which of its processes ended, at length; our verdict says why.
LAUNCHER_LOG_LEVEL = "critical"


@dataclass(frozen=True)
class Machines:
    """Where a job runs.

    Either `num_procs` ranks on this machine, or one rank for each slot of `hosts`.
    """

    num_procs: int = 1
    hosts: tuple[Host, ...] = ()
    launcher: str = "ssh"
    """One of `LAUNCHERS`: what starts the ranks on other hosts."""
    master_addr: str | None = None
    """Of the first host, as the others reach it; None: found out."""
    master_port: int | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Without a sign of life from a rank, until the job is ended."""

    @property
    def world_size(self) -> int:
        return sum(len(host.slots) for host in self.hosts) if self.hosts else self.num_procs

    @property
    def is_local(self) -> bool:
        return not self.hosts or (len(self.hosts) == 1 and is_this_host(self.hosts[0].name))


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
    verdict = job.verdict
    if received:
        announce(Verdict(stopped_by=signal.Signals(received[0]).name), command)
        return 128 + received[0], False
    if verdict is None:
        if code:
            print(f"{command}: error: the launcher ended with exit code {code}; it said why above", file=sys.stderr)
        return code, False
    announce(verdict, command)
    return code, verdict.failure is not None and verdict.failure.kind != USER_ERROR


@contextmanager
def start(
    command: str, module: str, arguments: list[str], machines: Machines, output: IO | None = None
) -> Iterator[Job]:
    """Start the ranks of a job.

    Args:
        command, module, arguments, machines: see `launch`.
        output: file for what the ranks print; None for this process's own streams.
    """
    hosts = list(machines.hosts)
    master = "127.0.0.1" if machines.is_local else machines.master_addr or master_address(hosts)
    hub_port, timeout_s = free_port(), machines.timeout_s
    name = secrets.token_hex(8)
    ours = {JOB: name, HUB_PORT: str(hub_port), STOPPED_TIMEOUT: str(timeout_s), COMMAND: command}
    task = Task(
        module,
        arguments,
        os.getcwd(),
        settings={**environment.of_deepspeed_env(), **ours},
        environment=environment.of_this_shell(),
    )
    master_port = machines.master_port or free_port()
    with tempfile.TemporaryDirectory(prefix="ds_bert_") as folder:
        commands = _commands(machines, task, master, master_port, Path(folder))
        job = Job(commands, HubAddress(master, hub_port, name, timeout_s), output)
        try:
            yield job
        finally:
            if job.verdict != Verdict() and not machines.is_local:
                end_leftovers([host.name for host in hosts], task.encode())


def _commands(machines: Machines, task: Task, master: str, port: int, folder: Path) -> list[Command]:
    """The launcher's processes; files they need are written into `folder`."""
    word = task.encode()
    if machines.is_local:
        options = [f"--num_gpus={machines.num_procs}"]
        if machines.hosts:
            options = [*_hosts_options(folder, machines.hosts), f"--master_addr={master}"]
        return [_deepspeed(port, options, word)]
    hosts, world_size = machines.hosts, machines.world_size
    launcher = machines.launcher
    program = [sys.executable, "-u", "-m", WORKER, word]
    _check_installed(launcher)
    if launcher == "ssh":
        first_ranks = itertools.accumulate((len(host.slots) for host in hosts), initial=0)
        return [
            Command(_over_ssh(hosts, node, master, port, word), rank, host.name)
            for node, (host, rank) in enumerate(zip(hosts, first_ranks, strict=False))
        ]
    if launcher == "pdsh":
        options = ["--launcher=pdsh", *_hosts_options(folder, hosts), f"--master_addr={master}", "--force_multi"]
        return [_deepspeed(port, options, word)]
    _check_whole_hosts(launcher, hosts)
    names, per_host = ",".join(host.name for host in hosts), len(hosts[0].slots)
    if launcher == "openmpi":
        options = ["--launcher=openmpi", f"--hostfile={_write_hostfile(folder, hosts)}", "--no_ssh_check"]
        root = " --allow-run-as-root" if os.geteuid() == 0 else ""
        more = f"--launcher_args=-x MASTER_ADDR={master} -x MASTER_PORT={port}{root}"
        return [_deepspeed(port, [*options, f"--master_addr={master}", more], word)]
    # DeepSpeed's launcher loses --module with these two.
    if launcher == "mpich":
        variables = ["-genv", "MASTER_ADDR", master, "-genv", "MASTER_PORT", str(port)]
        words = ["mpirun", "-n", str(world_size), "-ppn", str(per_host), *variables, "-hosts", names, *program]
        return [Command(words)]
    variables = f"--export=ALL,MASTER_ADDR={master},MASTER_PORT={port}"
    where = [f"--nodelist={names}", f"--nodes={len(hosts)}", f"--ntasks-per-node={per_host}"]
    return [Command(["srun", f"--ntasks={world_size}", *where, "--kill-on-bad-exit=0", variables, *program])]


def _deepspeed(port: int, options: list[str], word: str) -> Command:
    return Command([*launcher_command(port, options), "--no_local_rank", "--module", WORKER, word])


def launcher_command(port: int, options: list[str]) -> list[str]:
    """The deepspeed launcher with some options; a script or `--module NAME` follows."""
    fixed = [f"--master_port={port}", f"--log_level={LAUNCHER_LOG_LEVEL}"]
    return [sys.executable, "-m", "deepspeed.launcher.runner", *fixed, *options]


def _over_ssh(hosts: tuple[Host, ...], node: int, master: str, port: int, word: str) -> list[str]:
    world = {host.name: list(host.slots) for host in hosts}
    options = [f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}", f"--node_rank={node}"]
    options += [f"--master_addr={master}", f"--master_port={port}", f"--log_level={LAUNCHER_LOG_LEVEL}"]
    launcher = ["-m", "deepspeed.launcher.launch", *options, "--no_local_rank", "--module", WORKER, word]
    return ssh_command(hosts[node].name, remote_python(launcher))


def _check_installed(launcher: str) -> None:
    program = {"openmpi": "mpirun", "mpich": "mpirun", "slurm": "srun"}.get(launcher, launcher)
    if not shutil.which(program):
        raise UserError(f"--launcher {launcher}: {program} is not installed here; install it, or use --launcher ssh")
    for text, what in ((sys.executable, "Python's path"), (os.getcwd(), "the current folder's name")):
        if launcher == "pdsh" and shlex.quote(text) != text:
            raise UserError(
                f"--launcher pdsh: {what}, {text}, has a character that DeepSpeed's launcher does not pass on; use "
                "--launcher ssh, or another folder"
            )


def _check_whole_hosts(launcher: str, hosts: tuple[Host, ...]) -> None:
    for host in hosts:
        if list(host.slots) != list(range(len(host.slots))):
            slots = ",".join(map(str, host.slots))
            raise UserError(f"--launcher {launcher} cannot choose the slots {slots} of {host.name}; use pdsh or ssh")
    if launcher != "openmpi" and len({len(host.slots) for host in hosts}) > 1:
        raise UserError(f"--launcher {launcher} needs as many slots on each host as on the others; use pdsh or ssh")


def _write_hostfile(folder: Path, hosts: tuple[Host, ...]) -> Path:
    """A hostfile that DeepSpeed reads as we did."""
    path = folder / "hostfile"
    path.write_text("".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in hosts))
    return path


def _hosts_options(folder: Path, hosts: tuple[Host, ...]) -> list[str]:
    chosen = "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in hosts)
    return [f"--hostfile={_write_hostfile(folder, hosts)}", f"--include={chosen}", "--no_ssh_check"]
