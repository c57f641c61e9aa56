"""What a reduction did, for people to see."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_bert.reduction.timing import Moment, seconds_between


@dataclass(frozen=True)
class ReductionStatistics:
    """One optimizer step. Tensors stay on the device; the properties wait for it.

    Attributes:
        bucket_norms: (buckets,) fp32, this rank's norms before clipping, unscaled.
        coefficients: (buckets,) fp32, what this rank multiplied its buckets with; of a split embedding, its dense part.
        sums: (2,) fp64, over all ranks: squared norms before clipping, and clipped buckets.
        norm_after: 0-d fp32, of the averaged gradient, unscaled; None where the ranks hold parts of it (ZeRO 1 and 2).
        waits: when each wait for communication after the backward pass began and ended; None where DeepSpeed waits.
        world_size: number of ranks.
    """

    bucket_norms: torch.Tensor
    coefficients: torch.Tensor
    sums: torch.Tensor
    norm_after: torch.Tensor | None
    waits: list[tuple[Moment, Moment]] | None
    world_size: int

    @property
    def grad_norm_before_clip(self) -> float:
        """The root of the mean over ranks of the squared local norms: at least the norm of the unclipped mean."""
        return (self.sums[0] / self.world_size).sqrt().item()

    @property
    def grad_norm_after_clip(self) -> float:
        """The norm of the averaged gradient as the optimizer receives it."""
        return self.norm_after.item()

    @property
    def clipped_share(self) -> float:
        """Clipped buckets over buckets, of all ranks."""
        return self.sums[1].item() / (self.world_size * len(self.coefficients))

    @property
    def wait_s(self) -> float | None:
        """Seconds this rank waited for communication after its backward pass; None if that is not known."""
        return None if self.waits is None else sum(seconds_between(*wait) for wait in self.waits)


def first_nonfinite(names: Sequence[str], norms: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> str | None:
    """Which rank's own gradient was not finite, and where: "rank 3, parameter ...". A collective call.

    Args:
        names: of parameters, in the order of sending.
        norms: theirs, in pieces.
        group: the ranks.

    Returns:
        the lowest such rank with its first such parameter; None if every rank's own gradient was finite.
    """
    bad = (~torch.isfinite(torch.cat(list(norms)))).nonzero().flatten().tolist() if norms else []
    everyone = [names[bad[0]] if bad else None]
    if dist.is_initialized():
        mine, everyone = everyone[0], [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
    return next((f"rank {rank}, parameter {name}" for rank, name in enumerate(everyone) if name), None)
