"""A job from the side of the process that starts it: its launcher, its end, and what to tell the user."""

import asyncio
import dataclasses
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import IO

from ds_bert.cluster.network.connection import Connection, LostError, connect
from ds_bert.cluster.supervision.outcome import FAILED, LOST, Failure, Outcome
from ds_bert.cluster.supervision.processes import kill_tree

# How long a launcher may take to notice that its ranks have ended. One whose host has vanished never does.
LAUNCHER_GRACE_S = 5.0
POLL_S = 0.1


@dataclass(frozen=True)
class Command:
    """A process of the launcher on this machine."""

    words: list[str]
    rank: int = 0
    """The first that it starts."""
    host: str = "this machine"
    """Where it starts ranks."""


@dataclass(frozen=True)
class CoordinatorAddress:
    """Where a job's coordinator listens, and what it wants to hear."""

    host: str
    port: int
    job: str
    timeout_s: float


class RunningJob:
    """A running job.

    Args:
        commands: of its launcher: one, or one for each host.
        coordinator: of the job.
        output: file for what the ranks print; None for this process's own streams.
    """

    def __init__(self, commands: list[Command], coordinator: CoordinatorAddress, output: IO | None = None) -> None:
        self.outcome: Outcome | None = None
        """How it ended, as soon as that is known; None to the end if its ranks never came up."""
        self._commands, self._coordinator = commands, coordinator
        self._connection: Connection | None = None
        # In a session of its own: a Ctrl-C at the terminal reaches this process alone, which passes it on.
        self._processes = [
            subprocess.Popen(
                command.words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
            for command in commands
        ]
        self._some_failed_at: float | None = None
        self._loop = asyncio.new_event_loop()
        self._observing = threading.Thread(target=self._loop.run_until_complete, args=(self._observe(),), daemon=True)
        self._observing.start()

    async def _observe(self) -> None:
        there = self._coordinator
        hello = {"job": there.job, "rank": None, "host": socket.gethostname()}
        while self._connection is None:
            try:
                self._connection = await connect(there.host, there.port, hello, there.timeout_s)
            except LostError:
                # The ranks may still be starting: other hosts can be slow. The coordinator limits for how long.
                if self._ended():
                    return
        try:
            while self.outcome is None:
                message = await self._connection.receive()
                if "outcome" in message:
                    self.outcome = Outcome.from_message(message)
        except LostError as error:
            self.outcome = Outcome(Failure(LOST, 0, there.host, str(error)))
        await self._connection.close()

    def _ended(self) -> bool:
        return all(process.poll() is not None for process in self._processes)

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if not self._ended():
            self._notice_failed_command()
            return None
        self._observing.join(timeout=LAUNCHER_GRACE_S)
        codes = [process.returncode for process in self._processes]
        first = next((code for code in codes if code), 0)
        return first if first >= 0 else 128 - first

    def _notice_failed_command(self) -> None:
        """End the job when one host's ranks cannot start: the others would wait for them until the timeout."""
        failed = [(c, p) for c, p in zip(self._commands, self._processes, strict=True) if p.poll()]
        if not failed or self.outcome:
            return
        self._some_failed_at = self._some_failed_at or time.monotonic()
        if time.monotonic() - self._some_failed_at < LAUNCHER_GRACE_S:
            return
        command, process = failed[0]
        reason = f"the launcher on its host ended (exit code {process.returncode}); what it said is above"
        failure = Failure(FAILED, command.rank, command.host, reason)
        self._send({"failed": dataclasses.asdict(failure)})
        self.outcome = Outcome(failure)

    def wait(self) -> int:
        """Wait until it has ended, and return the exit code."""
        decided_at = None
        while (code := self.poll()) is None:
            decided_at = decided_at or (time.monotonic() if self.outcome else None)
            if decided_at and time.monotonic() - decided_at > LAUNCHER_GRACE_S:
                self._end_launcher()
            time.sleep(POLL_S)
        if self.outcome and self.outcome.failure:
            return self.outcome.failure.exit_code
        return code

    def stop(self, signal_name: str) -> None:
        """Ask the ranks to save and end; before they are up, end the launcher."""
        self._send({"stop": signal_name})

    def kill(self, signal_name: str) -> None:
        """End the ranks now."""
        self._send({"kill": signal_name})

    def _send(self, message: dict) -> None:
        connection = self._connection
        if connection is None:
            self._end_launcher()
        else:
            self._loop.call_soon_threadsafe(connection.send, message)

    def _end_launcher(self) -> None:
        """End the launcher's processes on this machine, the ranks' among them."""
        for process in self._processes:
            kill_tree(process.pid, LAUNCHER_GRACE_S)
