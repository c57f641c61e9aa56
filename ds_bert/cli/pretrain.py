"""Pretrain a masked-language model on prepared data, on this machine's GPUs or cores."""

import argparse

from ds_bert.cluster.device import choose_device
from ds_bert.training.options import add_num_procs, add_pretrain_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pretrain_arguments(parser)
    add_num_procs(parser)


def run(args: argparse.Namespace) -> int:
    choose_device()
    from ds_bert.cluster.ranks import default_num_procs, forwarded, launch
    from ds_bert.training.setup import set_up_run

    num_procs = args.num_procs or default_num_procs()
    # Found here, a mistake costs seconds and one line, not the start of all ranks.
    set_up_run(args, num_procs)
    return launch("ds_bert.training.pretrain", forwarded(args, add_pretrain_arguments), num_procs)
