"""Two real hosts on this machine: namespaces with a cable between them, each with a name and an sshd of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from two_hosts import ADDRESSES, INTERFACE, NAMES, two_hosts

HOSTS = ("node-a", "node-b")
DS_BERT = f"{sys.executable} -m ds_bert.cli.main"


def write_command(path: Path, command: str) -> None:
    """A command of that name that passes its arguments on."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)


class SshHosts:
    """The hosts, while `started`.

    Args:
        folder: for keys and settings.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hostfile = folder / "hostfile"
        self.hostfile.write_text("".join(f"{host} slots=1\n" for host in HOSTS))

    @contextlib.contextmanager
    def started(self) -> Iterator["SshHosts"]:
        self._write_settings()
        with two_hosts():
            try:
                for node, host in enumerate(HOSTS):
                    pid_file = f"PidFile={self.folder}/{host}.pid"
                    self.run(node, ["/usr/sbin/sshd", "-f", self.folder / "sshd_config", "-o", pid_file])
                yield self
            finally:
                self.end_all()

    def _write_settings(self) -> None:
        folder = self.folder
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("user_key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nPermitRootLogin yes\n"
            "StrictModes no\nUsePAM no\nMaxStartups 200\n"
        )
        addresses = zip(HOSTS, ADDRESSES, strict=True)
        (folder / "ssh_config").write_text(
            "".join(f"Host {host}\n HostName {address}\n" for host, address in addresses)
            + f"Host node-c\n HostName {ADDRESSES[1]}\n Port 2222\n"
            + f"Host *\n User root\n IdentityFile {folder}/user_key\n StrictHostKeyChecking no\n"
            " UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
        )
        lines = [f"{address} {host}\n" for host, address in zip(HOSTS, ADDRESSES, strict=True)]
        (folder / "etc_hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        # First on PATH, so that nobody's own ~/.ssh is touched.
        write_command(folder / "bin" / "ssh", f"/usr/bin/ssh -F {folder}/ssh_config")
        write_command(folder / "bin" / "ds-bert", DS_BERT)

    def start(self, node: int, words: list, **options) -> subprocess.Popen:
        """Start a command on a host."""
        environment = {**os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}", **options.pop("env", {})}
        inside = ["ip", "netns", "exec", NAMES[node], "unshare", "--uts", "sh", "-c"]
        inside += ['hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"', HOSTS[node]]
        inside += [str(self.folder / "etc_hosts")]
        return subprocess.Popen([*inside, *map(str, words)], env=environment, **options)

    def run(self, node: int, words: list, timeout: float = 300, **options) -> subprocess.CompletedProcess:
        """Run a command on a host to its end."""
        process = self.start(node, words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def ds_bert(self, *words, node: int = 0, **options) -> subprocess.CompletedProcess:
        """Run `ds-bert` on a host."""
        return self.run(node, [sys.executable, "-m", "ds_bert.cli.main", *words], **options)

    def sshd_pid(self, node: int) -> str:
        """The process whose namespaces all sessions on a host have."""
        return (self.folder / f"{HOSTS[node]}.pid").read_text().strip()

    def processes(self, node: int) -> list[psutil.Process]:
        """Python's processes on a host."""
        listed = subprocess.run(["ip", "netns", "pids", NAMES[node]], capture_output=True, text=True).stdout.split()
        found = []
        for pid in listed:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(int(pid))
                if "python" in process.name() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def rank(self, node: int) -> psutil.Process:
        """The process that trains on a host."""
        return next(p for p in self.processes(node) if "ds_bert.training.pretrain" in p.cmdline())

    def wait_until_empty(self, seconds: float) -> list[list[str]]:
        """Wait until nothing of a job is left on either host; what is, after so many seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            left = [process for node in range(2) for process in self.processes(node)]
            if not left:
                return []
            time.sleep(0.2)
        return [process.cmdline() for process in left if process.is_running()]

    def cut(self) -> None:
        """Take the cable away."""
        subprocess.run(["ip", "-n", NAMES[1], "link", "set", INTERFACE, "down"], check=True)

    def mend(self) -> None:
        """Put the cable back."""
        subprocess.run(["ip", "-n", NAMES[1], "link", "set", INTERFACE, "up"], check=True)

    def end_jobs(self) -> None:
        """End what is left of a job on either host."""
        for process in [*self.processes(0), *self.processes(1)]:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def end_all(self) -> None:
        """End every process on both hosts."""
        for name in NAMES:
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in listed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
