"""A rank without torch for tests of supervisors: `python -m tests.cluster.toy_rank WHAT_RANK_1_DOES`."""

import os
import signal
import sys
import time

from ds_bert.cluster.supervision import rank_side
from ds_bert.errors import UserError


def rank_1_does(what: str) -> None:
    if what == "end":
        sys.exit(0)
    if what == "exit with 3":
        sys.exit(3)
    if what == "be killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "be stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "stop its supervisor":
        os.kill(os.getppid(), signal.SIGSTOP)
    if what == "kill its supervisor":
        os.kill(os.getppid(), signal.SIGKILL)


def main() -> None:
    what, rank = sys.argv[1], int(os.environ["RANK"])
    rank_side.die_with_supervisor()
    print(f"rank {rank} is process {os.getpid()}", flush=True)
    if what == "save when asked":
        signal.signal(signal.SIGTERM, lambda signum, frame: print(f"rank {rank} saves", flush=True) or sys.exit(0))
    elif what == "not listen":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(0.5)
    if what == "user error":
        rank_side.report(UserError("--data x: does not exist"))
        sys.exit(1)
    if rank == 1:
        rank_1_does(what)
    elif what == "end":
        sys.exit(0)
    elif what == "be killed":
        # What gloo's exception makes of the other ranks, sooner than anybody sees why.
        time.sleep(0.1)
        sys.exit(1)
    time.sleep(60)


if __name__ == "__main__":
    main()
