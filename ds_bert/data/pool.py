"""Work in other processes: a function over a stream (results in order, few items in flight), or one long call."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ds_bert.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")


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
    # spawn: threads of this process (those of the tokenizers library, for one) do not survive a fork.
    executor = ProcessPoolExecutor(
        num_workers,
        multiprocessing.get_context("spawn"),
        _start_worker,
        (initializer, initargs),
    )
    waiting = deque()
    try:
        for item in items:
            waiting.append(executor.submit(function, item))
            if len(waiting) >= 2 * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        # Before Python 3.11.5 the pool waits for ever for its thread that writes to a pipe nobody reads any more
        # (github.com/python/cpython/issues/94777); closing this end wakes it.
        with suppress(AttributeError, OSError):
            executor._call_queue._reader.close()
        # A worker that was just starting can miss the pool's own end and wait for a lock the dead one held.
        for process in list((executor._processes or {}).values()):
            process.kill()
        raise UserError(
            "a worker process died, killed from outside or for want of memory (see the kernel's log: "
            f"dmesg); try again with fewer workers: --num-workers {max(1, num_workers // 2)}"
        ) from None
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _start_worker(initializer: Callable[..., None], initargs: tuple[Any, ...]) -> None:
    _detach_from_terminal()
    initializer(*initargs)


def _detach_from_terminal() -> None:
    # Ctrl-C reaches the whole process group; the main process alone decides what then happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def leave_with_parent() -> None:
        parent.join()
        os._exit(1)

    # After kill -9 of the main process a worker would wait for its next item for ever.
    threading.Thread(target=leave_with_parent, daemon=True).start()


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
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, function, args), daemon=True)
    process.start()
    sender.close()
    try:
        while True:
            kind, value = receiver.recv()
            if kind == "result":
                return value
            if kind == "error":
                raise value
            on_progress(value)
    except EOFError:
        raise UserError(
            "the process that learns the vocabulary died, killed from outside or for want of memory (see "
            "the kernel's log: dmesg); free some memory and run again"
        ) from None
    finally:
        process.kill()
        process.join()


def _call(sender: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _detach_from_terminal()
    try:
        sender.send(("result", function(*args, lambda amount: sender.send(("progress", amount)))))
    except UserError as error:
        sender.send(("error", error))


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
