"""Where a job runs."""

from dataclasses import dataclass

from ds_bert.cluster.launching.hostfile import Host
from ds_bert.cluster.network.ssh import is_this_host
from ds_bert.cluster.supervision.protocol import DEFAULT_TIMEOUT_S

LAUNCHERS = ("ssh", "pdsh", "openmpi", "mpich", "slurm")


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
