"""Real gloo ranks for tests: started once, they run many functions, since a start costs some ten seconds."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class RankPool:
    """`world_size` processes that form one process group over loopback.

    Args:
        world_size: number of ranks.
        folder: for their rendezvous file.
    """

    def __init__(self, world_size: int, folder: Path) -> None:
        self.world_size = world_size
        self.folder = folder
        self._starts = 0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._starts += 1
        store = str(self.folder / f"rendezvous{self._starts}")
        self._pipes, self._processes = [], []
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, store, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable, *args: Any, timeout_s: float = 240) -> list:
        """Call a module-level function on every rank.

        Returns:
            what it returned, one value a rank.

        Raises:
            AssertionError: with the traceback of the first rank that failed, or if a rank did not answer in time.
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        deadline = time.monotonic() + timeout_s
        answers: list = [None] * self.world_size
        waiting = set(range(self.world_size))
        while waiting:
            for rank in sorted(waiting):
                if self._pipes[rank].poll(0.02):
                    answers[rank] = self._pipes[rank].recv()
                    waiting.discard(rank)
            failed = [rank for rank in range(self.world_size) if answers[rank] and not answers[rank][0]]
            # The others may hang in a collective that the failed rank never joins; a moment for a common failure.
            if failed and waiting:
                deadline = min(deadline, time.monotonic() + 5)
            if waiting and time.monotonic() > deadline:
                self.close()
                self._start()
                break
        for rank, answer in enumerate(answers):
            assert answer is None or answer[0], f"rank {rank} failed:\n{answer[1]}"
        assert not waiting, f"ranks {sorted(waiting)} did not answer within {timeout_s} s"
        return [answer[1] for answer in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, world_size: int, store: str, pipe) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_SIZE=str(world_size),
        DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", HF_HUB_OFFLINE="1", TQDM_DISABLE="1",
    )  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from ds_bert.accelerator.compiled_ops import skip_unused_comm_op

    # Some CPUs' mkldnn refuses fp16 although training works there; the tests want it everywhere.
    get_accelerator().is_fp16_supported = lambda: True
    get_accelerator().supported_dtypes = lambda: [torch.float32, torch.float16, torch.bfloat16]
    skip_unused_comm_op()
    deepspeed.init_distributed()
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
