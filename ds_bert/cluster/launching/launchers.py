"""The command lines by which each launcher starts the ranks of a job."""

import base64
import itertools
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ds_bert.cluster.launching.hostfile import Host
from ds_bert.cluster.launching.machines import Machines
from ds_bert.cluster.launching.running_job import Command
from ds_bert.cluster.network.ssh import remote_python, ssh_command
from ds_bert.cluster.supervision.task import TASK_MODULE, Task
from ds_bert.errors import UserError

# Its errors say which of its processes ended, at length; the job's outcome says why.
LAUNCHER_LOG_LEVEL = "critical"


def launcher_commands(machines: Machines, task: Task, master: str, port: int, folder: Path) -> list[Command]:
    """The launcher's processes on this machine.

    Args:
        machines: where the ranks run.
        task: what each rank does.
        master, port: of rank 0, as the others reach it.
        folder: for files that the launcher reads.

    Raises:
        UserError: the launcher is not installed, or cannot start ranks on these slots.
    """
    if machines.is_local:
        slots = machines.hosts[0].slots if machines.hosts else visible_slots(machines.num_procs)
        return [Command([sys.executable, *per_host_launcher({"localhost": slots}, 0, master, port, task.encode())])]
    _check_installed(machines.launcher)
    return _ON_HOSTS[machines.launcher](machines, task.encode(), master, port, folder)


def visible_slots(num_procs: int) -> list[int | str]:
    """The GPUs of this machine's ranks: the first of CUDA_VISIBLE_DEVICES where that is set, else from 0 on."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    # More ranks than GPUs: DeepSpeed says so, or there are none and nobody looks.
    return visible[:num_procs] if len(visible) >= num_procs else list(range(num_procs))


def per_host_launcher(world: dict[str, Sequence[int | str]], node: int, master: str, port: int, word: str) -> list[str]:
    """Arguments for Python: DeepSpeed's launcher of one host's ranks.

    `deepspeed` itself would start this, after loading torch and DeepSpeed in one more process.
    """
    info = base64.urlsafe_b64encode(json.dumps({name: list(slots) for name, slots in world.items()}).encode()).decode()
    options = [f"--world_info={info}", f"--node_rank={node}", f"--master_addr={master}", f"--master_port={port}"]
    options += [f"--log_level={LAUNCHER_LOG_LEVEL}", "--no_local_rank"]
    return ["-u", "-m", "deepspeed.launcher.launch", *options, "--module", TASK_MODULE, word]


def launcher_command(port: int, options: list[str]) -> list[str]:
    """The deepspeed launcher with some options; a script or `--module NAME` follows."""
    fixed = [f"--master_port={port}", f"--log_level={LAUNCHER_LOG_LEVEL}"]
    return [sys.executable, "-m", "deepspeed.launcher.runner", *fixed, *options]


def _ssh(machines: Machines, word: str, master: str, port: int, folder: Path) -> list[Command]:
    world = {host.name: host.slots for host in machines.hosts}
    first_ranks = itertools.accumulate((len(slots) for slots in world.values()), initial=0)
    return [
        Command(ssh_command(name, remote_python(per_host_launcher(world, node, master, port, word))), rank, name)
        for node, (name, rank) in enumerate(zip(world, first_ranks, strict=False))
    ]


def _pdsh(machines: Machines, word: str, master: str, port: int, folder: Path) -> list[Command]:
    chosen = "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in machines.hosts)
    hostfile = _write_hostfile(folder, machines.hosts)
    options = ["--launcher=pdsh", f"--hostfile={hostfile}", f"--include={chosen}", "--no_ssh_check"]
    return [_deepspeed(port, [*options, f"--master_addr={master}", "--force_multi"], word)]


def _openmpi(machines: Machines, word: str, master: str, port: int, folder: Path) -> list[Command]:
    _check_whole_hosts("openmpi", machines.hosts)
    options = ["--launcher=openmpi", f"--hostfile={_write_hostfile(folder, machines.hosts)}", "--no_ssh_check"]
    root = " --allow-run-as-root" if os.geteuid() == 0 else ""
    more = f"--launcher_args=-x MASTER_ADDR={master} -x MASTER_PORT={port}{root}"
    return [_deepspeed(port, [*options, f"--master_addr={master}", more], word)]


# DeepSpeed's launcher loses --module with the next two.
def _mpich(machines: Machines, word: str, master: str, port: int, folder: Path) -> list[Command]:
    names, per_host = _equal_hosts("mpich", machines.hosts)
    variables = ["-genv", "MASTER_ADDR", master, "-genv", "MASTER_PORT", str(port)]
    where = ["-n", str(machines.world_size), "-ppn", str(per_host), *variables, "-hosts", names]
    return [Command(["mpirun", *where, *_program(word)])]


def _slurm(machines: Machines, word: str, master: str, port: int, folder: Path) -> list[Command]:
    names, per_host = _equal_hosts("slurm", machines.hosts)
    where = [f"--nodelist={names}", f"--nodes={len(machines.hosts)}", f"--ntasks-per-node={per_host}"]
    variables = f"--export=ALL,MASTER_ADDR={master},MASTER_PORT={port}"
    options = [f"--ntasks={machines.world_size}", *where, "--kill-on-bad-exit=0", variables]
    return [Command(["srun", *options, *_program(word)])]


# Add a launcher here and in `machines.LAUNCHERS`; what it starts is TASK_MODULE, with the task as the last word.
_ON_HOSTS: dict[str, Callable[[Machines, str, str, int, Path], list[Command]]] = {
    "ssh": _ssh,
    "pdsh": _pdsh,
    "openmpi": _openmpi,
    "mpich": _mpich,
    "slurm": _slurm,
}


def _deepspeed(port: int, options: list[str], word: str) -> Command:
    return Command([*launcher_command(port, options), "--no_local_rank", "--module", TASK_MODULE, word])


def _program(word: str) -> list[str]:
    return [sys.executable, "-u", "-m", TASK_MODULE, word]


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


def _equal_hosts(launcher: str, hosts: tuple[Host, ...]) -> tuple[str, int]:
    """The hosts' names, joined by commas, and the slots that each has."""
    _check_whole_hosts(launcher, hosts)
    if len({len(host.slots) for host in hosts}) > 1:
        raise UserError(f"--launcher {launcher} needs as many slots on each host as on the others; use pdsh or ssh")
    return ",".join(host.name for host in hosts), len(hosts[0].slots)


def _write_hostfile(folder: Path, hosts: tuple[Host, ...]) -> Path:
    """A hostfile that DeepSpeed reads as we did."""
    path = folder / "hostfile"
    path.write_text("".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in hosts))
    return path
