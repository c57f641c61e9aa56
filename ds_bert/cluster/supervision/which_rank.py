"""Who started this process, and which rank of how many it is."""

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from ds_bert.errors import UserError

DEFAULT_PORT = 29500  # DeepSpeed's and torch's

# With what they are where they are missing.
VARIABLES = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}

# Steps that Slurm numbers from here on are no steps of tasks: an interactive shell, a batch script, ...
SLURM_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Place:
    """The place of a process among the ranks of a job."""

    started_by: str
    rank: int
    world_size: int
    local_rank: int
    """Among the ranks of this host."""
    local_size: int
    """Ranks of this host."""
    master_addr: str
    """Of rank 0's host, as the others reach it."""
    master_port: int

    def environment(self) -> dict[str, str]:
        """The variables that torch and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_SIZE": str(self.local_size),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def started_as_rank(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher (deepspeed, torchrun, mpirun, srun) started this process as one of several ranks.

    Variables that say so only at first sight are left-overs of an interactive shell, or exported by hand.
    """
    if "CROSS_RANK" in env or "TORCHELASTIC_RUN_ID" in env:
        return "RANK" in env and _number(env, "WORLD_SIZE", 1) > 1
    return _open_mpi_size(env) > 1 or _slurm_size(env) > 1 or _number(env, "PMI_SIZE", 1) > 1


def find_place(env: Mapping[str, str] = os.environ) -> Place:
    """This process's place; alone if no launcher is recognised.

    Under MPI without MASTER_ADDR a collective call: rank 0 tells the others where it is, through mpi4py.

    Raises:
        UserError: variables contradict each other, or mpi4py is missing.
    """
    if "CROSS_RANK" in env or "TORCHELASTIC_RUN_ID" in env:
        place = _from_variables("torchrun" if "TORCHELASTIC_RUN_ID" in env else "the deepspeed launcher", env)
    elif _open_mpi_size(env) > 1:
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        place = _mpi_place("mpirun (Open MPI)", [_number(env, f"OMPI_COMM_WORLD_{name}", 0) for name in names], env)
    elif _slurm_size(env) > 1:
        place = _slurm_place(env)
    elif _number(env, "PMI_SIZE", 1) > 1:
        names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        place = _mpi_place("mpirun (MPICH)", [_number(env, name, 0) for name in names], env)
    elif {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= env.keys():
        place = _from_variables("the variables RANK and WORLD_SIZE", env)
    else:
        place = Place("this command itself", 0, 1, 0, 1, "127.0.0.1", _number(env, "MASTER_PORT", DEFAULT_PORT))
    if not 0 <= place.rank < place.world_size:
        raise UserError(f"{place.started_by}: rank {place.rank} of {place.world_size} cannot be; check the environment")
    return place


def _from_variables(launcher: str, env: Mapping[str, str]) -> Place:
    local_size = _number(env, "LOCAL_SIZE", _number(env, "LOCAL_WORLD_SIZE", 1))
    rank, size, local_rank = (_number(env, name, default) for name, default in VARIABLES.items())
    port = _number(env, "MASTER_PORT", DEFAULT_PORT)
    return Place(launcher, rank, size, local_rank, local_size, env.get("MASTER_ADDR", "127.0.0.1"), port)


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise UserError(f"environment variable {name}={text}: must be a whole number; unset it") from None


def _open_mpi_size(env: Mapping[str, str]) -> int:
    return _number(env, "OMPI_COMM_WORLD_SIZE", 1) if "OMPI_COMM_WORLD_RANK" in env else 1


def _slurm_size(env: Mapping[str, str]) -> int:
    """Tasks of the job step that this process is one of; 1 in a batch script or an interactive shell."""
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    is_task = step.isdigit() and int(step) < SLURM_FIRST_SPECIAL_STEP and "SLURM_PROCID" in env
    # `srun --pty`: one shell, whatever the number of tasks that was asked for.
    if not is_task or "SLURM_PTY_PORT" in env:
        return 1
    return _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))


def _slurm_place(env: Mapping[str, str]) -> Place:
    job = _number(env, "SLURM_JOB_ID", 0)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    # The same on all tasks without a word between them; another job on these hosts has another number.
    port = _number(env, "MASTER_PORT", 20000 + job % 10000)
    tasks = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "1")
    node = min(_number(env, "SLURM_NODEID", 0), len(tasks) - 1)
    return Place(
        "srun", _number(env, "SLURM_PROCID", 0), _slurm_size(env), _number(env, "SLURM_LOCALID", 0), tasks[node],
        env.get("MASTER_ADDR") or _first_node(nodes), port,
    )  # fmt: skip


def _tasks_per_node(text: str) -> list[int]:
    """Slurm writes `2(x3),1` for three hosts of two tasks and one of one."""
    tasks = []
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(repeats or 1)
    return tasks or [1]


def _first_node(nodes: str) -> str:
    """Of a Slurm node list such as `gpu[01-03,07],login1`."""
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.split():
            return done.stdout.split()[0]
    except OSError:
        pass
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def _mpi_place(launcher: str, numbers: list[int], env: Mapping[str, str]) -> Place:
    rank, size, local_rank, local_size = numbers
    if "MASTER_ADDR" in env:
        address, port = env["MASTER_ADDR"], _number(env, "MASTER_PORT", DEFAULT_PORT)
    else:
        address, port = _ask_rank_0_over_mpi(launcher)
    return Place(launcher, rank, size, local_rank, max(1, local_size), address, port)


def _ask_rank_0_over_mpi(launcher: str) -> tuple[str, int]:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"{launcher}: mpi4py is needed to find rank 0 ({error}); install it, or set MASTER_ADDR and MASTER_PORT"
        ) from None
    from ds_bert.cluster.network.interface import address_of_this_host, free_port

    comm = MPI.COMM_WORLD
    hosts = comm.allgather(socket.gethostname())
    answer = None
    if comm.Get_rank() == 0:
        here = len(set(hosts)) == 1
        answer = ("127.0.0.1" if here else address_of_this_host(), free_port())
    return comm.bcast(answer, root=0)
