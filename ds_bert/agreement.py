"""Agreement of ranks: the same values on all, and an error on one becomes the same error on all, so none waits."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from ds_bert.errors import UserError
from ds_bert.identity import differing_keys

Result = TypeVar("Result")


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(value: Result, group: dist.ProcessGroup | None = None) -> list[Result]:
    """The (picklable) values of all ranks of a group, in the order of the ranks. A collective call."""
    world_size = dist.get_world_size(group) if dist.is_initialized() else 1
    values = [value]
    if world_size > 1:
        values = [None] * world_size
        dist.all_gather_object(values, value, group=group)
    return values


def agree(mine: dict, who: str, remedy: str, group: dist.ProcessGroup | None = None) -> None:
    """Stop all ranks if one of them holds other values than rank 0. A collective call.

    Args:
        mine: this rank's plain values by name.
        who: the subject of the error, such as "the ranks".
        remedy: the end of the error, what to do.
        group: the ranks that are compared; all without it.

    Raises:
        UserError: the same on all ranks; names the first value that differs, on rank 0 and on the first rank with
            another.
    """
    first, *others = gather(mine, group)
    for rank, other in enumerate(others, start=1):
        for key in differing_keys(first, other):
            raise UserError(
                f"{who} differ in {key}: {first.get(key)!r} on rank 0, {other.get(key)!r} on rank {rank}; {remedy}"
            )


def first_problem(problems: list[str | None]) -> str | None:
    """The first of the ranks' problems, with its rank in front unless all have the same; None if nobody has one."""
    for rank, problem in enumerate(problems):
        if problem:
            everywhere = all(other == problem for other in problems)
            return problem if everywhere else f"rank {rank}: {problem}"
    return None


def together(function: Callable[[], Result]) -> Result:
    """Call `function` on every rank; if it fails on any, fail on all with the same message. A collective call.

    Returns:
        what `function` returned on this rank.

    Raises:
        UserError: the message of the first rank that met a `UserError` or an `OSError`; it names the rank if others
            did not meet the same.
    """
    result, problem = None, None
    try:
        result = function()
    except UserError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or 'file system'}: {error.strerror or error}"
    common = first_problem(gather(problem))
    if common:
        raise UserError(common)
    return result


def on_first_rank(function: Callable[[], Result]) -> Result:
    """Call `function` on rank 0 and give its (picklable) result to all; fail on all if it fails. A collective call."""
    rank, world_size = rank_and_world()
    result = together(lambda: function() if rank == 0 else None)
    if world_size > 1:
        box = [result]
        dist.broadcast_object_list(box, src=0)
        result = box[0]
    return result
