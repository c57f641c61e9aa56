"""Commands on other hosts over ssh, and how those hosts reach each other."""

import contextlib
import ipaddress
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import psutil

from ds_bert.errors import UserError, last_line

# Asks nothing: a password prompt of one of many hosts would wait for ever, unseen.
SSH = ("ssh", "-n", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
TIMEOUT_S = 30
LEFTOVERS_TIMEOUT_S = 5

PROBE = "import sys; from ds_bert.cluster.network.ssh import probe; probe(*sys.argv[1:])"

Result = TypeVar("Result")


def ssh_command(host: str, command: Sequence[str]) -> list[str]:
    """The command line that runs a command on a host, its words unchanged."""
    return [*SSH, host, shlex.join(command)]


def remote_python(arguments: Sequence[str]) -> list[str]:
    """The command that runs this Python on another host, finding modules where it does here."""
    path = ":".join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    return ["env", f"PYTHONPATH={path}", sys.executable, "-u", *arguments]


def on_all(hosts: Sequence[str], function: Callable[[str], Result]) -> list[Result]:
    """Call a function for each host at the same time."""
    with ThreadPoolExecutor(max_workers=max(1, len(hosts))) as pool:
        return list(pool.map(function, hosts))


def run_on(host: str, command: Sequence[str], timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess:
    """Run a command on a host over ssh.

    Raises:
        UserError: ssh cannot log in there without a question, or the command did not end in time.
    """
    try:
        done = subprocess.run(ssh_command(host, command), capture_output=True, text=True, timeout=timeout_s)
    except FileNotFoundError:
        raise UserError("ssh is not installed here; install an ssh client, or use --launcher slurm") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{host}: no answer over ssh within {timeout_s:g} s; try: ssh {host} true") from None
    if done.returncode == 255:
        raise UserError(
            f"{host}: cannot log in over ssh without a question ({last_line(done.stderr)}); try: ssh {host} true, and "
            f"if it asks for a password: ssh-copy-id {host}"
        )
    return done


def end_leftovers(hosts: Sequence[str], word: str) -> None:
    """End processes of a failed job that cannot end themselves, such as stopped ones, on hosts that can be reached.

    Args:
        hosts: to look at.
        word: that stands in the command lines of the job's processes and nowhere else.
    """

    def end(host: str) -> None:
        with contextlib.suppress(UserError):
            run_on(host, ["pkill", "-KILL", "-f", word], LEFTOVERS_TIMEOUT_S)

    on_all(hosts, end)


def probe(towards: str = "") -> None:
    """Runs on a host: print by which address it was reached, and which it sends from towards another."""
    from ds_bert.cluster.network.interface import source_address

    words = os.environ.get("SSH_CONNECTION", "").split()
    reached_at = words[2] if len(words) == 4 else ""
    print(json.dumps({"reached_at": reached_at, "source": source_address(towards) if towards else ""}))


def _ask(host: str, towards: str = "") -> dict:
    done = run_on(host, remote_python(["-c", PROBE, towards]))
    if done.returncode:
        raise UserError(
            f"{host}: {sys.executable} with ds_bert does not run there ({last_line(done.stderr)}); make the same "
            "environment at the same path on every host"
        )
    return json.loads(done.stdout.splitlines()[-1])


def is_this_host(name: str) -> bool:
    """Whether a name means the machine this runs on."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return False
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return address in own or ipaddress.ip_address(address).is_loopback


def master_address(names: Sequence[str]) -> str:
    """The address of the first host by which the others reach it; of a single host, by which this one does.

    `hostname -I`, which DeepSpeed's launcher takes, can begin with a container bridge; a host's name can resolve to
    127.0.1.1 on itself. So the first host is asked from which address it sends to the second.

    Raises:
        UserError: a host cannot be reached over ssh, or has no ds_bert.
    """
    if len(names) == 1:
        return _ask(names[0])["reached_at"] or "127.0.0.1"
    first, second, *_ = on_all(names, _ask)
    if (
        first["reached_at"]
        and not ipaddress.ip_address(first["reached_at"]).is_loopback
        and (not second["reached_at"] or ipaddress.ip_address(second["reached_at"]).is_loopback)
    ):
        # This is the second host, and that is how it reached the first.
        return first["reached_at"]
    return _ask(names[0], second["reached_at"])["source"]
