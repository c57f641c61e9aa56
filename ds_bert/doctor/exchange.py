"""What ranks see together: how fast an all-reduce is, and whether they share the output folder.

Each rank runs `python -m ds_bert.doctor.exchange OUTPUT_FOLDER`, supervised and over the interface that a training
would use; rank 0 prints a line `ANSWER {...}`.
"""

import contextlib
import datetime
import json
import os
import socket
import statistics
import sys
import time
from pathlib import Path

from ds_bert.cluster.network.interface import GLOO, NCCL
from ds_bert.cluster.supervision import rank_side

ANSWER = "ds_bert.doctor.exchange:"
SMALL, LARGE = 1 << 10, 64 << 20  # bytes
TIMEOUT = datetime.timedelta(seconds=60)


def main() -> None:
    """Measure, look, and tell on rank 0."""
    rank_side.die_with_supervisor()
    try:
        _exchange(sys.argv[1] if len(sys.argv) > 1 else "")
    except Exception as error:
        rank_side.report(error)
        sys.stderr.flush()
        os._exit(1)


def _exchange(folder: str) -> None:
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT)

    def seconds(size: int) -> float:
        values = torch.zeros(size // 4, device=device)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(values)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    seconds(SMALL)
    small = statistics.median(seconds(SMALL) for _ in range(20))
    large = min(seconds(LARGE) for _ in range(2))
    unseen = _hosts_that_do_not_see(folder) if folder else []
    if dist.get_rank() == 0:
        # Of the ring algorithm, what passes each rank's interface: 2 (n - 1) / n times the values (as in nccl-tests).
        passed = 2 * (dist.get_world_size() - 1) / dist.get_world_size() * LARGE
        interface = os.environ.get(NCCL if on_gpu else GLOO)
        answer = {
            "ranks": dist.get_world_size(),
            "latency_s": small,
            "bits_per_s": 8 * passed / large,
            "interface": interface,
            "unseen": unseen,
        }
        print(ANSWER, json.dumps(answer), flush=True)
    dist.destroy_process_group()


def _hosts_that_do_not_see(folder: str) -> list[str]:
    """Hosts that do not see what rank 0's host writes into the nearest folder that exists."""
    import torch.distributed as dist

    existing = Path(folder)
    while not existing.is_dir():
        existing = existing.parent
    named = [str(existing / f".ds_bert_doctor_{os.getpid()}")]
    dist.broadcast_object_list(named)
    probe = Path(named[0])
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):
            probe.touch()
    dist.barrier()
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (socket.gethostname(), probe.exists()))
    if dist.get_rank() == 0:
        probe.unlink(missing_ok=True)
    if not seen[0][1]:
        return []  # rank 0's host cannot write there, which its facts say
    return sorted({host for host, sees in seen if not sees})


if __name__ == "__main__":
    main()
