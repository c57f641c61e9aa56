"""Two hosts on one machine: network namespaces and a cable of a set speed between them. Needs root and iproute2."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

NAMES = (f"dsb{os.getpid()}a", f"dsb{os.getpid()}b")
ADDRESSES = ("10.78.0.1", "10.78.0.2")
INTERFACE = "eth0"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    """While the two hosts exist."""
    if os.geteuid() != 0:
        sys.exit("network namespaces need root: run this as root, in a container for example")
    # A plain kill would leave the namespaces behind.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        _ip("link", "add", NAMES[0], "type", "veth", "peer", "name", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            _ip("link", "set", name, "netns", name)
            _ip("-n", name, "link", "set", name, "name", INTERFACE)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", INTERFACE, "up")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def set_rate(rate: str | None) -> None:
    """Limit the cable in both directions, such as "1gbit"; None for no limit."""
    for name in NAMES:
        tc = ["ip", "netns", "exec", name, "tc", "qdisc"]
        subprocess.run([*tc, "del", "dev", INTERFACE, "root"], check=False, stderr=subprocess.DEVNULL)
        if rate:
            shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
            subprocess.run([*tc, "add", "dev", INTERFACE, "root", *shape], check=True)


def start_ranks(command: Sequence[str], ranks_per_host: int, port: int) -> list[subprocess.Popen]:
    """Start one process a rank, the ranks of a host on one core of their own; rank 0's stdout is a pipe."""
    cores = sorted(os.sched_getaffinity(0))
    world_size = 2 * ranks_per_host
    processes = []
    for rank in range(world_size):
        host = rank // ranks_per_host
        environment = {
            **os.environ,
            "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank % ranks_per_host),
            "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        pinned = ["ip", "netns", "exec", NAMES[host], "taskset", "-c", str(cores[host % len(cores)]), *command]
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(pinned, env=environment, stdout=output, text=True))
    return processes
