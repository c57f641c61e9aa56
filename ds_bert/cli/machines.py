"""The options that say where ranks run: this machine, or the hosts of a hostfile."""

import argparse

from ds_bert.arguments import not_negative_int, positive_float, positive_int
from ds_bert.cluster.launching.machines import LAUNCHERS, Machines
from ds_bert.cluster.supervision.protocol import DEFAULT_TIMEOUT_S
from ds_bert.errors import UsageError


def add_machines_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where it runs")
    where.add_argument(
        "--num-procs",
        type=positive_int,
        metavar="N",
        help="ranks on this machine (default: one for each GPU, without a GPU one)",
    )
    where.add_argument(
        "--hostfile", metavar="FILE", help="one rank for each slot of these hosts (docs/cluster.md); none by default"
    )
    where.add_argument("--include", metavar="SPEC", help="only these: HOST[:SLOT,SLOT...], several joined by @")
    where.add_argument("--exclude", metavar="SPEC", help="all but these, written alike")
    where.add_argument(
        "--launcher", choices=LAUNCHERS, help="what starts the ranks on other hosts (default: ssh, needs nothing else)"
    )
    where.add_argument(
        "--master_addr", metavar="ADDRESS", help="of the first host, as the others reach it (default: found out)"
    )
    where.add_argument("--master_port", type=positive_int, metavar="PORT", help="of rank 0 (default: a free one)")
    where.add_argument(
        "--failure-timeout",
        type=positive_float,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help="seconds without a sign of life from a rank until the job is ended (default: 60)",
    )


def add_max_restarts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-restarts",
        type=not_negative_int,
        default=0,
        metavar="N",
        help="after a failure start again from the last checkpoint, so often (default: 0)",
    )


def find_machines(args: argparse.Namespace) -> Machines:
    """Where the ranks run.

    Raises:
        UserError: a hostfile that cannot be used.
    """
    from ds_bert.accelerator.device import default_num_procs
    from ds_bert.cluster.launching.hostfile import read_hostfile, select

    if args.hostfile is None:
        for option in ("include", "exclude", "launcher", "master_addr"):
            if getattr(args, option):
                raise UsageError(f"--{option} needs --hostfile")
        return Machines(
            args.num_procs or default_num_procs(), master_port=args.master_port, timeout_s=args.failure_timeout
        )
    if args.num_procs:
        raise UsageError("--num-procs and --hostfile: give one; the hostfile's slots are the ranks")
    hosts = select(read_hostfile(args.hostfile), args.include, args.exclude)
    return Machines(
        hosts=tuple(hosts),
        launcher=args.launcher or LAUNCHERS[0],
        master_addr=args.master_addr,
        master_port=args.master_port,
        timeout_s=args.failure_timeout,
    )
