"""Pretrain a masked-language model on prepared data: on this machine's GPUs or cores, or on the hosts of a hostfile."""

import argparse
import os
from pathlib import Path

from ds_bert.accelerator.device import choose_device
from ds_bert.arguments import forwarded
from ds_bert.cli.machines import add_machines_arguments, add_max_restarts, find_machines
from ds_bert.cluster.supervision.which_rank import started_as_rank
from ds_bert.errors import UsageError
from ds_bert.training.options import add_pretrain_arguments

MODULE = "ds_bert.training.pretrain"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pretrain_arguments(parser)
    add_machines_arguments(parser)
    add_max_restarts(parser)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if started_as_rank():
        from ds_bert.cluster.supervision.protocol import COMMAND
        from ds_bert.cluster.supervision.supervisor import supervise_rank

        for option in ("num_procs", "hostfile"):
            if getattr(args, option):
                raise UsageError(
                    f"--{option.replace('_', '-')}: this is one of several ranks that srun, mpirun or torchrun "
                    "started; leave the option out, or start the command once"
                )
        os.environ.setdefault(COMMAND, "ds-bert pretrain")
        return supervise_rank(MODULE, forwarded(args, add_pretrain_arguments))
    choose_device()
    from ds_bert.cluster.launching.launch import launch
    from ds_bert.training import run_lock
    from ds_bert.training.setup import set_up_run

    machines = find_machines(args)
    # Found here, a mistake costs seconds and one line, not the start of all ranks.
    set_up_run(args, machines.world_size)
    run_lock.check_free(Path(args.output))
    return launch("ds-bert pretrain", MODULE, forwarded(args, add_pretrain_arguments), machines, args.max_restarts)
