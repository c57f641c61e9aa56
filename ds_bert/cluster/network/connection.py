"""Connections that notice when the other end is gone: JSON lines, a beat each second, and a limit to silence."""

import asyncio
import contextlib
import json
import time

BEAT_S = 1.0
RETRY_S = 0.2

# Longest message; a traceback is the longest there is.
LIMIT = 1 << 20


class LostError(Exception):
    """The other end is gone; the message says how that showed."""


class ClosedError(LostError):
    """The other end closed the connection: its process has ended."""


class Connection:
    """One end of a connection.

    Args:
        reader, writer: of the connection.
        timeout_s: silence after which the other end counts as lost.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float) -> None:
        self._reader, self._writer, self._timeout_s = reader, writer, timeout_s
        self._beating = asyncio.create_task(self._beat())

    async def receive(self) -> dict:
        """The next message.

        Raises:
            LostError: the other end was silent for too long, or closed the connection (`ClosedError`).
        """
        while True:
            try:
                line = await asyncio.wait_for(self._reader.readline(), self._timeout_s)
            except asyncio.TimeoutError:
                raise LostError(f"no sign of life for {self._timeout_s:g} s") from None
            except (OSError, ValueError) as error:
                raise ClosedError(f"its connection broke ({error})") from None
            if not line.endswith(b"\n"):
                raise ClosedError("its process has ended")
            message = json.loads(line)
            if message:
                return message

    def send(self, message: dict) -> None:
        """Send a message, without waiting. One that cannot be sent is found out by the receiver's side."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _beat(self) -> None:
        while True:
            self.send({})
            await asyncio.sleep(BEAT_S)

    async def close(self) -> None:
        """Send what is left and close."""
        self._beating.cancel()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.drain(), BEAT_S)
        self._writer.close()


async def connect(host: str, port: int, hello: dict, timeout_s: float) -> Connection:
    """Connect and say who one is; tries until it works.

    Raises:
        LostError: it did not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(host, port, limit=LIMIT), max(left, RETRY_S)
            )
            break
        except (OSError, asyncio.TimeoutError) as error:
            if time.monotonic() > deadline:
                reason = getattr(error, "strerror", None) or "no answer"
                raise LostError(f"could not be reached at {host}:{port} for {timeout_s:g} s ({reason})") from None
            await asyncio.sleep(RETRY_S)
    connection = Connection(reader, writer, timeout_s)
    connection.send(hello)
    return connection
