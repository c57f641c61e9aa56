"""What the program of each rank begins and ends with."""

import logging
import os
import sys
from collections.abc import Callable

from ds_bert.accelerator.device import choose_device
from ds_bert.cluster.network.interface import GLOO
from ds_bert.cluster.supervision import rank_side
from ds_bert.cluster.supervision.protocol import COMMAND, STARTED_BY
from ds_bert.cluster.supervision.task import TASK_MODULE, Task
from ds_bert.errors import UserError

log = logging.getLogger(__name__)


def run_rank(name: str, module: str, arguments: list[str], work: Callable[[int], None]) -> int:
    """The frame of a rank's program: join the others, work, leave, and say what failed.

    The process that a launcher starts becomes the supervisor of one that does the work (see `supervisor`).

    Args:
        name: of the command, for messages.
        module, arguments: of this very program.
        work: called with the rank; a `UserError` it raises must be the same on all ranks.

    Returns:
        the exit code: 0 done, else the error's.
    """
    if not rank_side.is_supervised():
        return _become_supervisor(name, module, arguments)
    rank_side.die_with_supervisor()
    rank_side.stop_request.listen()
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    import torch.distributed as dist

    try:
        _join_ranks()
        rank = dist.get_rank()
        if rank:  # rank 0 says the same
            for repeating in ("DeepSpeed", "transformers"):
                logging.getLogger(repeating).setLevel(logging.ERROR)
            logging.getLogger("ds_bert").setLevel(logging.WARNING)
        log.info(
            f"{dist.get_world_size()} ranks, started by {os.environ[STARTED_BY]}; they meet at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, over {os.environ.get(GLOO, 'any interface')}"
        )
        work(rank)
        dist.destroy_process_group()
    except UserError as error:
        rank_side.report(error)
        dist.destroy_process_group()
        return error.exit_code
    except Exception as error:
        rank_side.report(error)
        # Without leaving the process group: the other ranks, which it would wait for, may be in another collective.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    return 0


def _become_supervisor(name: str, module: str, arguments: list[str]) -> int:
    # In place of this process, which has loaded torch already: a supervisor needs a hundredth of its memory.
    os.environ.setdefault(COMMAND, name)
    word = Task(module, arguments, os.getcwd(), settings={}, environment={}).encode()
    os.execv(sys.executable, [sys.executable, "-u", "-m", TASK_MODULE, word])


def _join_ranks() -> None:
    """Start the process group, over gloo without a GPU and NCCL with one, and share the machine's cores."""
    choose_device()
    import deepspeed
    import torch

    from ds_bert.accelerator.compiled_ops import skip_unused_comm_op

    for noisy in ("datasets", "httpx"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    skip_unused_comm_op()
    # On CPUs oneDNN keeps a compiled kernel for each of the last 1,024 shapes; with samples of many lengths nearly
    # every shape is new, and a small model's memory grows by half a gigabyte for nothing.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    if "OMP_NUM_THREADS" not in os.environ:
        ranks_here = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_here))
    deepspeed.init_distributed()
