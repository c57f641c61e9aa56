"""A real Slurm on this machine: munged, slurmctld and slurmd without systemd. Needs root."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from ds_bert.cluster.network.interface import free_port


@contextlib.contextmanager
def one_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """While Slurm runs: the environment variables of its commands."""
    host = socket.gethostname()
    for name in ("state", "spool"):
        (folder / name).mkdir()
    configuration = folder / "slurm.conf"
    configuration.write_text(
        f"ClusterName=one\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={free_port()}\nSlurmdPort={free_port()}\n"
        "SlurmUser=root\nAuthType=auth/munge\nCredType=cred/munge\n"
        f"AuthInfo=socket={folder}/munge/socket\n"
        f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool\n"
        f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd.pid\n"
        f"SlurmctldLogFile={folder}/slurmctld.log\nSlurmdLogFile={folder}/slurmd.log\n"
        "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nProctrackType=proctrack/linuxproc\n"
        "TaskPlugin=task/none\nMpiDefault=none\nReturnToService=2\n"
        f"NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory=2000 State=UNKNOWN\n"
        f"PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP\n"
    )
    environment = {"SLURM_CONF": str(configuration)}
    processes = [_start_munged(folder)]
    try:
        for daemon in ("slurmctld", "slurmd"):
            words = [shutil.which(daemon, path="/usr/sbin:/usr/bin"), "-D", *(["-c"] if daemon == "slurmctld" else [])]
            with (folder / f"{daemon}.out").open("w") as out:
                processes.append(subprocess.Popen(words, env={**os.environ, **environment}, stdout=out, stderr=out))
        _wait_for_node(environment, folder)
        yield environment
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(timeout=30)


def _start_munged(folder: Path) -> subprocess.Popen:
    """With a key and a socket of its own, beside one that the machine may have."""
    own = folder / "munge"
    own.mkdir(mode=0o755)
    key = own / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    words = [shutil.which("munged", path="/usr/sbin:/usr/bin"), "--foreground", "--force", f"--key-file={key}"]
    words += [f"--socket={own}/socket", f"--pid-file={own}/pid", f"--seed-file={own}/seed", f"--log-file={own}/log"]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _wait_for_node(environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done = subprocess.run(
            ["sinfo", "-h", "-t", "idle"], capture_output=True, text=True, env={**os.environ, **environment}
        )
        if "idle" in done.stdout:
            return
        time.sleep(0.5)
    logs = "".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("slurm*.log"))
    raise AssertionError(f"the node did not become idle:\n{logs}")
