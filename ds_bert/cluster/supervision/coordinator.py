"""The place where all ranks of a job, and the process that started them, know of each other: beside rank 0."""

import asyncio
import socket

from ds_bert.cluster.network.connection import LIMIT, ClosedError, Connection, LostError
from ds_bert.cluster.supervision.outcome import FAILED, LOST, Failure, Outcome, first_failure

# How long failures are collected before one is named: a rank that dies of another's death can be the first to say so.
SETTLE_S = 1.0

STARTER_GONE = "the process that started the job has ended"


class Coordinator:
    """Collects what the ranks' supervisors say, decides, and tells them all.

    Messages to it: `{"done": true}`, `{"failed": {...}}`, `{"stop": "SIGTERM"}` (save, then end), `{"kill": "SIGINT"}`
    (end now). From it: `{"stop": ...}` and `{"outcome": {...}}`.

    Args:
        world_size: ranks to wait for.
        job: the name that everybody of this job says first; others are sent away.
        timeout_s: silence after which a rank counts as lost.
        wait_for_starter: whether the process that started the job will connect, too.
    """

    def __init__(self, world_size: int, job: str, timeout_s: float, *, wait_for_starter: bool) -> None:
        self.world_size, self.job, self.timeout_s = world_size, job, timeout_s
        self._wait_for_starter = wait_for_starter
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.has_starter = False
        """Whether the process that started the job is connected: it has the last word."""
        self._connections: dict[Connection, int | None] = {}
        self._serving: list[asyncio.Task] = []
        self._seen: set[int] = set()
        self._done: set[int] = set()
        self._failures: list[Failure] = []
        self._stop: str | None = None

    async def serve(self, port: int) -> None:
        """Listen, from now on.

        Raises:
            OSError: the port is taken.
        """
        self._server = await asyncio.start_server(self._accept, None, port, limit=LIMIT, family=socket.AF_INET)
        self._waiting = asyncio.create_task(self._wait_for_all())

    async def close(self) -> None:
        """Hang up, after everybody could hear the outcome."""
        self._waiting.cancel()
        self._server.close()
        for connection in list(self._connections):
            await connection.close()
        for serving in self._serving:
            serving.cancel()

    async def _wait_for_all(self) -> None:
        await asyncio.sleep(self.timeout_s)
        missing = sorted(set(range(self.world_size)) - self._seen)
        if missing:
            others = f", and neither did {len(missing) - 1} others" if missing[1:] else ""
            reason = f"it did not start, or does not reach rank 0's host, within {self.timeout_s:g} s{others}"
            self._fail(Failure(LOST, missing[0], "an unknown host", reason))
        elif self._wait_for_starter and not self.has_starter:
            self._fail(Failure(FAILED, 0, socket.gethostname(), STARTER_GONE))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.append(asyncio.create_task(self._serve_connection(reader, writer)))

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer, self.timeout_s)
        rank, host = None, ""
        try:
            hello = await connection.receive()
            if hello.get("job") != self.job:
                await connection.close()
                return
            rank, host = hello["rank"], hello["host"]
            self._connections[connection] = rank
            if rank is None:
                self.has_starter = True
            else:
                self._seen.add(rank)
            if self._stop:
                connection.send({"stop": self._stop})
            if self.outcome.done():
                connection.send(self.outcome.result().to_message())
            while True:
                self._handle(await connection.receive(), rank)
        except LostError as error:
            self._connections.pop(connection, None)
            if rank is not None:
                self._fail(Failure(LOST, rank, host, str(error)))
            elif isinstance(error, ClosedError) and self.has_starter:
                # A starter that only cannot be reached may come back, and the ranks do not need it.
                self._fail(Failure(FAILED, 0, host, STARTER_GONE))

    def _handle(self, message: dict, rank: int | None) -> None:
        if "failed" in message:
            self._fail(Failure(**message["failed"]))
        elif "done" in message:
            self._done.add(rank)
            if len(self._done) == self.world_size:
                self._decide(Outcome(stopped_by=self._stop))
        elif "stop" in message and not self._stop:
            self._stop = message["stop"]
            self._tell_all({"stop": self._stop})
        elif "kill" in message:
            self._decide(Outcome(stopped_by=message["kill"]))

    def _fail(self, failure: Failure) -> None:
        if self.outcome.done() or failure.rank in self._done:
            return
        self._failures.append(failure)
        if len(self._failures) == 1:
            asyncio.get_running_loop().call_later(SETTLE_S, self._decide_on_failure)

    def _decide_on_failure(self) -> None:
        # Ranks that were asked to stop may do so at different places; that they did is what the user wants to hear.
        stopped = self._stop is not None and all(failure.kind != FAILED for failure in self._failures)
        self._decide(Outcome(None if stopped else first_failure(self._failures), self._stop))

    def _decide(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)
            self._tell_all(outcome.to_message())

    def _tell_all(self, message: dict) -> None:
        for connection in self._connections:
            connection.send(message)
