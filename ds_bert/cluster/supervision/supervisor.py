"""One process beside each rank that ends it when the job has failed anywhere, and says why it ended.

A rank cannot do that itself: it may be stopped, out of memory, or deep in a collective that nobody else will join. Its
supervisor is its parent, imports no torch, and is connected to the coordinator beside rank 0 (see `coordinator`).
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
from dataclasses import dataclass

import psutil

from ds_bert.cluster.network.connection import Connection, LostError, connect
from ds_bert.cluster.network.interface import interface_environment
from ds_bert.cluster.supervision.coordinator import Coordinator
from ds_bert.cluster.supervision.outcome import FAILED, LOST, Failure, Outcome, announce
from ds_bert.cluster.supervision.processes import StoppedFor, kill_tree
from ds_bert.cluster.supervision.protocol import (
    COMMAND,
    COORDINATOR_PORT,
    DEFAULT_TIMEOUT_S,
    FAILURE_TIMEOUT,
    JOB,
    REPORT_FD,
    STARTED_BY,
)
from ds_bert.cluster.supervision.signals import ENDING
from ds_bert.cluster.supervision.which_rank import Place, find_place
from ds_bert.errors import UserError

# From the wish to stop until a rank that has not saved is ended: within the 30 s that Slurm gives.
STOP_GRACE_S = 25.0
POLL_S = 1.0


@dataclass(frozen=True)
class Settings:
    """What all supervisors of a job agree about, from environment variables."""

    job: str
    coordinator_port: int
    timeout_s: float
    command: str
    """As messages to the user name it."""
    has_starter: bool
    """Whether a process of ours started the job and follows it."""

    @staticmethod
    def from_environment(place: Place) -> "Settings":
        env = os.environ
        return Settings(
            env.get(JOB, f"port {place.master_port}"),
            int(env.get(COORDINATOR_PORT, place.master_port + 1)),
            float(env.get(FAILURE_TIMEOUT, DEFAULT_TIMEOUT_S)),
            env.get(COMMAND, "ds-bert"),
            has_starter=JOB in env,
        )


def supervise_rank(module: str, arguments: list[str]) -> int:
    """Run a module as this process's rank of the job, supervised.

    Args:
        module: run as `python -m MODULE` in a process of its own.
        arguments: of the module.

    Returns:
        the exit code of the job, the same on all ranks that can still be reached: 0 if all came to their end.

    Raises:
        UserError: this is no rank that could run.
    """
    place = find_place()
    return asyncio.run(Supervisor(place, Settings.from_environment(place)).run(module, arguments))


class Supervisor:
    """Of one rank.

    Args:
        place: of the rank.
        settings: of the job.
    """

    def __init__(self, place: Place, settings: Settings) -> None:
        self.place, self.settings = place, settings
        self.host = socket.gethostname()
        self._connection: Connection | None = None
        self._unsent: list[dict] = []
        self._stopping = False
        self._parent = os.getppid()

    async def run(self, module: str, arguments: list[str]) -> int:
        """Run the rank to the end of the job."""
        environment = self._environment()
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        coordinator = await self._serve_coordinator() if self.place.rank == 0 else None
        for signum in ENDING:
            asyncio.get_running_loop().add_signal_handler(signum, self._ask_to_stop, signum.name)
        report, report_end = os.pipe()
        environment[REPORT_FD] = str(report_end)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-u", "-m", module, *arguments, env=environment, pass_fds=(report_end,)
        )
        os.close(report_end)
        watching = [
            asyncio.create_task(task)
            for task in (self._listen(), self._wait_for_rank(report), self._watch_for_stopped(), self._watch_parent())
        ]
        outcome = await self._outcome
        kill_tree(self._process.pid)
        await self._process.wait()
        if coordinator:
            self._say(outcome, has_starter=coordinator.has_starter)
            await coordinator.close()
        for task in watching:
            task.cancel()
        if outcome.failure:
            return outcome.failure.exit_code
        return 128 + signal.Signals[outcome.stopped_by] if outcome.stopped_by else 0

    def _environment(self) -> dict[str, str]:
        place = self.place
        one_host = place.local_size >= place.world_size
        if place.master_addr.startswith("127.") and not one_host:
            raise UserError(
                f"MASTER_ADDR is {place.master_addr}, but the {place.world_size} ranks are on several hosts; give the "
                "address by which the other hosts reach rank 0's"
            )
        interfaces = interface_environment(place.master_addr, one_host=one_host, env=os.environ)
        ours = {FAILURE_TIMEOUT: str(self.settings.timeout_s), STARTED_BY: place.started_by}
        return {**os.environ, **place.environment(), **interfaces, **ours}

    async def _serve_coordinator(self) -> Coordinator:
        settings = self.settings
        coordinator = Coordinator(
            self.place.world_size, settings.job, settings.timeout_s, wait_for_starter=settings.has_starter
        )
        try:
            await coordinator.serve(self.settings.coordinator_port)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(
                f"port {self.settings.coordinator_port} of {self.host} cannot be used ({reason}); end "
                f"what uses it, or name another with {COORDINATOR_PORT}"
            ) from None
        return coordinator

    async def _listen(self) -> None:
        """Be connected to the coordinator, and do what it says."""
        place, hello = self.place, {"job": self.settings.job, "rank": self.place.rank, "host": self.host}
        address = "127.0.0.1" if place.rank == 0 else place.master_addr
        try:
            self._connection = await connect(address, self.settings.coordinator_port, hello, self.settings.timeout_s)
            for message in self._unsent:
                self._connection.send(message)
            while True:
                message = await self._connection.receive()
                if "outcome" in message:
                    self._decide(Outcome.from_message(message))
                elif "stop" in message:
                    self._stop_rank(message["stop"])
        except LostError as error:
            outcome = Outcome(
                Failure(LOST, 0, place.master_addr, f"{error}, seen from rank {place.rank} on {self.host}")
            )
            if not self._outcome.done():
                self._say(outcome, has_starter=False)
            self._decide(outcome)

    def _decide(self, outcome: Outcome) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    def _say(self, outcome: Outcome, *, has_starter: bool) -> None:
        """Print the failure's traceback, and how the job ended unless the process that started it does."""
        if outcome.failure and outcome.failure.traceback:
            print(outcome.failure.traceback, end="", file=sys.stderr, flush=True)
        if not has_starter:
            announce(outcome, self.settings.command)

    def _send(self, message: dict) -> None:
        if self._connection is None:
            self._unsent.append(message)
        else:
            self._connection.send(message)

    def _fail(self, kind: str, reason: str, **more) -> None:
        failure = Failure(kind, self.place.rank, self.host, reason, **more)
        self._send({"failed": dataclasses.asdict(failure)})

    def _ask_to_stop(self, signal_name: str) -> None:
        self._send({"stop": signal_name})

    def _stop_rank(self, signal_name: str) -> None:
        if not self._stopping:
            self._stopping = True
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            asyncio.get_running_loop().call_later(STOP_GRACE_S, self._send, {"kill": signal_name})

    async def _wait_for_rank(self, report: int) -> None:
        """Tell the coordinator how the rank ended."""
        code = await self._process.wait()
        with open(report, "rb") as file:
            told = file.read()
        if code == 0 or self._stopping:
            self._send({"done": True})
        elif told:
            self._fail(**json.loads(told))
        else:
            self._fail(FAILED, _describe_exit(code), exit_code=code if code > 0 else 128 - code)

    async def _watch_for_stopped(self) -> None:
        """Notice a rank that is stopped (SIGSTOP, a debugger) for too long."""
        pid, timeout_s = self._process.pid, self.settings.timeout_s
        with contextlib.suppress(psutil.Error):
            stopped = StoppedFor(pid)
            while stopped.seconds() <= timeout_s:
                await asyncio.sleep(POLL_S)
            self._fail(FAILED, f"its process {pid} was stopped (SIGSTOP) for {timeout_s:g} s")

    async def _watch_parent(self) -> None:
        """Notice that the launcher on this host has ended without ending its ranks."""
        while os.getppid() == self._parent:
            await asyncio.sleep(POLL_S)
        self._fail(FAILED, f"the launcher's process {self._parent} on its host has ended")


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}; what it printed is above"
    name = signal.Signals(-code).name
    memory = " (out of memory? `dmesg` on that host tells)" if -code == signal.SIGKILL else ""
    return f"its process was ended by {name}{memory}"
