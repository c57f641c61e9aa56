"""Work in other processes: a function over a stream (results in order, few items in flight), or one long call.

Each process has a pipe of its own and nothing is shared, so a process that is killed at any moment is noticed at its
pipe. (`concurrent.futures` can wait for ever here: a thread of it writes to a shared pipe that nobody reads.)
"""

import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from ds_bert.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

# What the end of a pipe raises when the process at its other end is gone, perhaps in the middle of a message.
_PIPE_ERRORS = (EOFError, OSError)
_ITEMS_IN_FLIGHT = 2  # for each worker: one that it works on, one that waits


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    num_workers: int,
    initializer: Callable[..., None],
    initargs: tuple[Any, ...],
) -> Iterator[Result]:
    """Apply `function` to each item, in processes; yield the results in the order of the items.

    Args:
        function: picklable.
        items: read by this process, at most `2 * num_workers` ahead of the result that is yielded.
        num_workers: number of processes; 1 works in this process.
        initializer: called once in each process before its first item.
        initargs: its arguments.

    Raises:
        UserError: a worker died.
    """
    if num_workers == 1:
        initializer(*initargs)
        yield from map(function, items)
        return
    workers: list[_Peer] = []
    num_sent = num_received = 0
    try:
        # All are started before the first is waited for, so that they load their modules at the same time.
        workers.extend(_Peer(_serve_items) for _ in range(num_workers))
        for worker in workers:
            worker.send((function, initializer, initargs))
        for item in items:
            workers[num_sent % num_workers].send(item)
            num_sent += 1
            if num_sent - num_received == _ITEMS_IN_FLIGHT * num_workers:
                yield workers[num_received % num_workers].receive()
                num_received += 1
        while num_received < num_sent:
            yield workers[num_received % num_workers].receive()
            num_received += 1
    except _PeerDiedError:
        raise UserError(
            "a worker process died, killed from outside or for want of memory (see the kernel's log: "
            f"dmesg); try again with fewer workers: --num-workers {max(1, num_workers // 2)}"
        ) from None
    finally:
        for worker in workers:
            worker.kill()


def run_apart(
    function: Callable[..., Result], *args: Any, on_progress: Callable[[float], None] = lambda amount: None
) -> Result:
    """Call `function(*args, report)` in a process of its own.

    Unlike a long call into a library here, it can be interrupted at any time, and its memory is given back.

    Args:
        function: picklable; calls `report(amount)` as it goes on.
        args: picklable.
        on_progress: gets these amounts.

    Raises:
        UserError: raised by the function, or the process died.
    """
    peer = _Peer(_serve_call)
    try:
        peer.send((function, args))
        while (message := peer.receive())[0] == "progress":
            on_progress(message[1])
        return message[1]
    except _PeerDiedError:
        raise UserError(
            "the process that learns the vocabulary died, killed from outside or for want of memory (see "
            "the kernel's log: dmesg); free some memory and run again"
        ) from None
    finally:
        peer.kill()


class _PeerDiedError(Exception):
    """The process at the other end of a pipe is gone."""


class _Peer:
    """A process that serves this one over a pipe.

    It is spawned: threads of this process (those of the tokenizers library, for one) do not survive a fork. What it
    works on goes through the pipe, because `Process(args=...)` of a process that dies early can wait for ever.
    """

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, its_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(its_end, serve), daemon=True)
        self._process.start()
        its_end.close()

    def send(self, value: Any) -> None:
        """Raises: _PeerDiedError."""
        try:
            self._pipe.send(value)
        except _PIPE_ERRORS:
            raise _PeerDiedError from None

    def receive(self) -> Any:
        """The next value it sends. Raises: _PeerDiedError, or what its function raised."""
        try:
            value, error, trace = self._pipe.recv()
        except _PIPE_ERRORS:
            raise _PeerDiedError from None
        if error is not None:
            raise error from (None if isinstance(error, UserError) else RuntimeError(f"in another process:\n{trace}"))
        return value

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, serve: Callable[[Connection], None]) -> None:
    # Ctrl-C reaches the whole process group; the main process alone decides what then happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def leave_with_parent() -> None:
        parent.join()
        os._exit(1)

    # After kill -9 of the main process a long call would go on to its end.
    threading.Thread(target=leave_with_parent, daemon=True).start()
    with suppress(*_PIPE_ERRORS):
        try:
            serve(pipe)
        except Exception as error:
            pipe.send((None, error, traceback.format_exc()))


def _serve_items(pipe: Connection) -> None:
    function, initializer, initargs = pipe.recv()
    initializer(*initargs)
    items = queue.SimpleQueue()

    def receive_items() -> None:
        with suppress(*_PIPE_ERRORS):
            while True:
                items.put(pipe.recv())

    # Items are taken in while a result is being sent: two ends that both only send would wait for each other.
    threading.Thread(target=receive_items, daemon=True).start()
    while True:
        pipe.send((function(items.get()), None, None))


def _serve_call(pipe: Connection) -> None:
    function, args = pipe.recv()
    result = function(*args, lambda amount: pipe.send((("progress", amount), None, None)))
    pipe.send((("result", result), None, None))


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Turn SIGTERM into an exception inside the block, so that clean-up runs; then exit as SIGTERM would."""

    def stop(signum: int, frame: Any) -> None:
        raise SystemExit(128 + signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
