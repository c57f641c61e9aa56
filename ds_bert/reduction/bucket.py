"""One bucket: gradients of a few parameters that are clipped together and travel in one message."""

import torch
import torch.distributed as dist

from ds_bert.reduction.communication import start_all_reduce, wait_for
from ds_bert.reduction.norms import global_norm, row_norms, tensor_norms
from ds_bert.reduction.tied import TiedEmbedding
from ds_bert.reduction.timing import Moment
from ds_bert.reduction.trace import Trace, span

# As torch.nn.utils.clip_grad_norm_ has it, so that a gradient of zero divides by something.
EPSILON = 1e-6


def clip_coefficient(norm: torch.Tensor, threshold: float) -> torch.Tensor:
    """min(1, threshold / (norm + 1e-6)), without a wait for the device: exactly 1 where nothing is clipped."""
    return torch.clamp(threshold / (norm + EPSILON), max=1.0)


class Bucket:
    """Clips, sends and receives the gradients of some parameters.

    What is sent is each gradient times coefficient / world size, so the sum over ranks is the mean, followed by one
    number a parameter that tells whether this rank had a gradient at all.

    Args:
        parameters: by name, all of one dtype and device.
        threshold: the bucket's part of the maximum norm.
        dtype: what is sent; None for the gradients' own.
        group: the ranks; None for the default group.
        world_size: number of ranks; with 1 nothing is sent.
    """

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        threshold: float,
        *,
        dtype: torch.dtype | None,
        group: dist.ProcessGroup | None,
        world_size: int,
    ) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.threshold, self.group, self.world_size = threshold, group, world_size
        first = self.parameters[0]
        self.elements = sum(p.numel() for p in self.parameters)
        self._sent = torch.empty(self.elements + len(self.names), dtype=dtype or first.dtype, device=first.device)
        self.averaged = self._sent[: self.elements]
        """(elements,): after `receive`, the averaged gradient."""
        self._present = self._sent[self.elements :]
        sizes = [p.numel() for p in self.parameters]
        self._views = [part.view_as(p) for part, p in zip(self.averaged.split(sizes), self.parameters, strict=True)]
        self.trace: Trace | None = None
        self.label = ""
        """What the trace calls it."""
        self.waits: list[tuple[Moment, Moment]] = []
        """Of this step, for communication after the backward pass."""
        self._work: dist.Work | None = None
        self._missing: list[bool] = []
        self.parameter_norms = torch.zeros(0)
        """(parameters,) fp32: of this rank's gradients, unscaled."""
        self.norm = torch.zeros(())
        """0-d fp32: this rank's norm before clipping, unscaled."""
        self.averaged_norm = torch.zeros(())
        """0-d fp32: after `receive`, the norm of `averaged`."""
        self.coefficient = torch.ones(())

    def send(self, loss_scale: float) -> None:
        """Clip what this rank has and start its all-reduce; the gradients leave the parameters."""
        self.waits = []
        gradients = self._take_gradients()
        self._missing = [gradient is None for gradient in gradients]
        zero = torch.zeros((), device=self._sent.device)
        norms = tensor_norms([zero if gradient is None else gradient for gradient in gradients])
        self.parameter_norms = norms / loss_scale if loss_scale != 1.0 else norms
        self.norm = torch.linalg.vector_norm(self.parameter_norms)
        self.coefficient = clip_coefficient(self.norm, self._dense_threshold)
        factor = self.coefficient / self.world_size
        for view, gradient in zip(self._views, gradients, strict=True):
            _scale_into(view, gradient, factor)
        self._present.copy_(torch.tensor([0.0 if missing else 1.0 for missing in self._missing]))
        self._work = self._all_reduce(self._sent, f"all-reduce {self.label}")

    @property
    def _dense_threshold(self) -> float:
        return self.threshold

    def _take_gradients(self) -> list[torch.Tensor | None]:
        gradients = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def send_rest(self, loss_scale: float) -> None:
        """Send what is ready only when the backward pass has ended."""

    def receive(self) -> None:
        """Wait for the others; then every parameter's `grad` is the averaged one, or None if no rank had any."""
        self._wait_for(self._work, f"wait {self.label}")
        self._give_gradients()
        self.averaged_norm = global_norm([self.averaged])

    def _give_gradients(self) -> None:
        for parameter, view, missing, present in zip(
            self.parameters, self._views, self._missing, self._present, strict=True
        ):
            if missing and not self._anyone_else_has(present):
                continue
            parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)

    def _anyone_else_has(self, present: torch.Tensor) -> bool:
        return self.world_size > 1 and bool(present > 0)

    def clipped(self) -> torch.Tensor:
        """0-d bool: whether this rank clipped the bucket."""
        return self.coefficient < 1

    def _all_reduce(self, tensor: torch.Tensor, what: str, op=dist.ReduceOp.SUM) -> dist.Work | None:
        return start_all_reduce(tensor, what, group=self.group, world_size=self.world_size, trace=self.trace, op=op)

    def _wait_for(self, work: dist.Work | None, what: str) -> None:
        self.waits += wait_for(work, what, self._sent.device, self.trace)


class SplitBucket(Bucket):
    """A tied embedding: its dense gradient is sent as soon as the decoder has it, its looked-up rows at the end.

    The parts act on the same elements, so their norms add: each is clipped to half of the threshold.

    Args:
        tied: the embedding, already split.
        threshold, dtype, group, world_size: see `Bucket`.
    """

    def __init__(self, tied: TiedEmbedding, threshold: float, **settings) -> None:
        super().__init__({tied.name: tied.weight}, threshold, **settings)
        self.tied = tied
        if self._sent.dtype == tied.weight.dtype:
            tied.buffer_VH = self._views[0]
        self._seen_V = torch.zeros(0)
        self._rows_UH: torch.Tensor | None = None
        self._row_numbers = torch.zeros(0)
        self._seen_work: dist.Work | None = None
        self._rows_work: dist.Work | None = None
        self.rows_coefficient = torch.ones(())

    @property
    def _dense_threshold(self) -> float:
        return self.threshold / 2

    def _take_gradients(self) -> list[torch.Tensor | None]:
        return [self.tied.dense_VH]

    def send(self, loss_scale: float) -> None:
        # Which rows any rank has looked up travels while there is time, so that the rows need no exchange of sizes.
        self._seen_V = self.tied.seen_rows()
        self._seen_work = self._all_reduce(self._seen_V, "which rows", dist.ReduceOp.MAX)
        super().send(loss_scale)
        self.tied.dense_VH = None

    def send_rest(self, loss_scale: float) -> None:
        self._wait_for(self._seen_work, "wait which rows")
        with span(self.trace, "clip rows", "clip"):
            self._clip_rows(loss_scale)
        self._rows_work = self._all_reduce(self._rows_UH, "all-reduce rows")
        self.tied.clear()

    def _clip_rows(self, loss_scale: float) -> None:
        self._row_numbers = self._seen_V.nonzero().flatten()
        position_V = torch.cumsum(self._seen_V, 0, dtype=torch.int64) - 1
        rows_UH = self.tied.lookup_rows(position_V, len(self._row_numbers))
        norm = global_norm([rows_UH]) / loss_scale
        self.rows_coefficient = clip_coefficient(norm, self.threshold / 2)
        # Either part alone is a lower bound on what the other may hide, so the sum is what is reported.
        self.norm = self.norm + norm
        self.parameter_norms = self.parameter_norms + norm
        self._missing = [self._missing[0] and not self.tied.has_lookups]
        self._rows_UH = rows_UH.mul_(self.rows_coefficient / self.world_size).to(self._sent.dtype)

    def receive(self) -> None:
        self._wait_for(self._work, f"wait {self.label}")
        dense_VH = self._views[0]
        norms_V = row_norms(dense_VH)  # while the rows travel
        self._wait_for(self._rows_work, "wait rows")
        if len(self._row_numbers):
            dense_VH.index_add_(0, self._row_numbers, self._rows_UH)
            norms_V[self._row_numbers] = row_norms(dense_VH[self._row_numbers])
        self._rows_UH = None
        self.averaged_norm = global_norm([norms_V])
        self._give_gradients()

    def _anyone_else_has(self, present: torch.Tensor) -> bool:
        # Rows seen by another rank count even where no rank had a dense part.
        return super()._anyone_else_has(present) or len(self._row_numbers) > 0

    def clipped(self) -> torch.Tensor:
        return super().clipped() | (self.rows_coefficient < 1)


def _scale_into(target: torch.Tensor, gradient: torch.Tensor | None, factor: torch.Tensor) -> None:
    if gradient is None:
        target.zero_()
    elif gradient.dtype == target.dtype == torch.float32:
        torch.mul(gradient, factor, out=target)
    elif gradient.dtype.itemsize >= 4:
        target.copy_(gradient * factor)
    else:
        # A factor rounded to half precision would be off by 1e-3.
        target.copy_(gradient.float().mul_(factor))
