"""Clip each bucket of gradients as it becomes ready, and send it while the backward pass goes on.

The method of arXiv 2402.02447: a bucket is clipped by its own norm on its own rank, so nothing has to wait for the norm
of the whole gradient. docs/clipping.md has the mathematics. Plain torch: DeepSpeed is not needed here.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from ds_bert.agreement import agree, gather
from ds_bert.constants import MIB
from ds_bert.errors import UserError
from ds_bert.identity import fingerprint
from ds_bert.reduction.bucket import Bucket, SplitBucket
from ds_bert.reduction.communication import let_computation_go_first, start_all_reduce, wait_for
from ds_bert.reduction.plan import BucketPlan, Member
from ds_bert.reduction.statistics import ReductionStatistics, first_nonfinite
from ds_bert.reduction.thresholds import RULES
from ds_bert.reduction.tied import TiedEmbedding
from ds_bert.reduction.trace import Trace, span

# As in torch's DistributedDataParallel: what is ready first shall not wait for a whole bucket.
FIRST_BUCKET_MB = 1.0

log = logging.getLogger(__name__)

# Modules that have a reducer: two would each send what the other averaged.
_attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class OverlappedReducer:
    """Averages gradients over ranks, each bucket clipped by its own norm before it is sent.

    The first step only learns in which order gradients become ready; from the second on a bucket is sent from inside
    the backward pass. Buckets go out in the same order on every rank. After `finish()` every `parameter.grad` is the
    averaged gradient, a view into its bucket.

    Args:
        module: its trainable parameters are reduced; the same on all ranks.
        max_norm: maximum norm of the averaged gradient (`thresholds` says what each rule promises).
        threshold: "proportional", "equal" or "uniform".
        bucket_size_mb: MiB of the dtype that is sent.
        overlap: false sends everything in `finish()`: the same numbers, slower.
        communication_dtype: what is sent; None for each gradient's own.
        process_group: the ranks; None for the default group, or for one rank if there is none.
        split_tied_embedding: send the dense and the lookup part of a tied embedding's gradient apart.
        synchronizes: whether the backward pass under way ends an optimizer step; None for all outside `no_sync()`.
        loss_scale: the factor in the gradients (1.0 without fp16); norms are those of the unscaled gradient.

    Raises:
        UserError: no trainable parameter, or a setting out of range.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        max_norm: float,
        threshold: str = "proportional",
        bucket_size_mb: float = 25.0,
        overlap: bool = True,
        communication_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
        split_tied_embedding: bool = True,
        synchronizes: Callable[[], bool] | None = None,
        loss_scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        check_settings(max_norm, threshold, bucket_size_mb)
        if communication_dtype is not None and not isinstance(communication_dtype, torch.dtype):
            raise UserError(f"communication_dtype: give a torch.dtype or None, not {communication_dtype!r}")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise UserError("bucket clipping: DistributedDataParallel reduces gradients itself; give the module in it")
        if module in _attached:
            raise UserError("this module has a reducer already: attach one only, or detach() the other first")
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise UserError("bucket clipping: the model has no trainable parameter")
        self.max_norm, self.threshold, self.bucket_size_mb = max_norm, threshold, bucket_size_mb
        self.overlap, self.communication_dtype = overlap, communication_dtype
        self.group = process_group
        self.world_size = dist.get_world_size(process_group) if dist.is_initialized() else 1
        self.plan: BucketPlan | None = None
        """None until the first step has been learned, or a saved plan is loaded."""
        self.buckets: list[Bucket] = []
        self.statistics: ReductionStatistics | None = None
        """Of the last `finish()`."""
        self.trace: Trace | None = None
        """Gets a span for everything that is done, if set before the plan is learned or loaded."""
        self._device = next(iter(self.parameters.values())).device
        self._synchronizes = synchronizes or (lambda: True)
        self._loss_scale = loss_scale
        self._inside_no_sync = False
        self._names = {parameter: name for name, parameter in self.parameters.items()}
        self._learned_order: list[str] = []
        self._bucket_of: dict[str, int] = {}
        self._not_ready: list[set[str]] = []
        self._next = 0
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient) for parameter in self.parameters.values()
        ]
        if overlap and self.world_size > 1 and self._device.type == "cpu":
            let_computation_go_first()
        self._module = module
        _attached.add(module)
        self.tied: TiedEmbedding | None = None
        if split_tied_embedding:
            self._split_tied_embedding(module)

    def _split_tied_embedding(self, module: nn.Module) -> None:
        self.tied, obstacle = TiedEmbedding.find(module)
        if obstacle:
            log.info(f"the tied embedding's gradient is sent in one piece, at the end: {obstacle}")
        if self.tied:
            self.tied.on_dense = lambda: self._is_ready(self.tied.name)
            self.tied.split()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only accumulate gradients; the next one outside sends their sum."""
        before, self._inside_no_sync = self._inside_no_sync, True
        try:
            yield
        finally:
            self._inside_no_sync = before

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        # Autograd calls this also for a weight whose gradient was kept from it.
        if parameter.grad is not None and not (self.tied and parameter is self.tied.weight):
            self._is_ready(self._names[parameter])

    def _is_ready(self, name: str) -> None:
        if self._inside_no_sync or not self._synchronizes():
            return
        if self.plan is None:
            self._learned_order.append(name)
            return
        bucket = self._bucket_of[name]
        if bucket < self._next:
            raise UserError(
                f"a second gradient of {name} arrived after its bucket was sent; call finish() once after the backward "
                "pass that ends an optimizer step, run those before it inside no_sync(), or set overlap to false"
            )
        if not self.overlap:
            return
        self._not_ready[bucket].discard(name)
        while self._next < len(self.buckets) and not self._not_ready[self._next]:
            self._send_next()

    def _send_next(self) -> None:
        with span(self.trace, f"clip bucket {self._next}", "clip"):
            self.buckets[self._next].send(self._loss_scale())
        self._next += 1

    def finish(self) -> ReductionStatistics:
        """Send what is left and wait for all of it. A collective call, between backward and the optimizer's step.

        Returns:
            what was done, also kept as `statistics`.

        Raises:
            UserError: at the first step, on all ranks: they hold different parameters or settings.
        """
        if self.plan is None:
            self._learn()
        if self.tied and self.tied.has_third_use:
            raise UserError(
                f"{self.tied.name} got a gradient from a third use beside lookup and decoder, not seen in the "
                "first step; set split_tied_embedding to false"
            )
        while self._next < len(self.buckets):
            self._send_next()
        for bucket in self.buckets:
            bucket.send_rest(self._loss_scale())
        sums, sums_work = self._sum_over_ranks()
        # The split one last: its rows are still travelling.
        for bucket in sorted(self.buckets, key=lambda bucket: isinstance(bucket, SplitBucket)):
            bucket.receive()
        waits = [wait for bucket in self.buckets for wait in bucket.waits]
        waits += wait_for(sums_work, "wait sums", self._device, self.trace)
        self.statistics = ReductionStatistics(
            bucket_norms=torch.stack([bucket.norm for bucket in self.buckets]),
            coefficients=torch.stack([bucket.coefficient for bucket in self.buckets]),
            sums=sums,
            norm_after=torch.linalg.vector_norm(torch.stack([bucket.averaged_norm for bucket in self.buckets]))
            / self._loss_scale(),
            waits=waits,
            world_size=self.world_size,
        )
        self._rearm()
        return self.statistics

    def _sum_over_ranks(self) -> tuple[torch.Tensor, dist.Work | None]:
        norms = torch.stack([bucket.norm for bucket in self.buckets]).double()
        clipped = torch.stack([bucket.clipped() for bucket in self.buckets]).double()
        sums = torch.stack([norms.square().sum(), clipped.sum()])
        work = start_all_reduce(sums, "sums of norms", group=self.group, world_size=self.world_size, trace=self.trace)
        return sums, work

    def _rearm(self) -> None:
        self._next = 0
        self._not_ready = [set(bucket.names) for bucket in self.buckets]

    def _learn(self) -> None:
        """Agree on rank 0's ready order and fill the buckets by it."""
        # An embedding used in a third place has a gradient that neither part holds.
        leaks = self.tied is not None and self.tied.has_third_use
        order = self._learned_order
        if self.world_size > 1:
            remedy = "give all the same model, from the same seed, and configuration"
            agree(self._what_ranks_share(), "bucket clipping: the ranks", remedy, self.group)
            offers = gather((order if dist.get_rank(self.group) == 0 else None, leaks), self.group)
            order, leaks = offers[0][0], any(leak for _, leak in offers)
        if leaks:
            log.info(f"the gradient of {self.tied.name} is sent in one piece, at the end: it has a third use")
            order = [name for name in order if name != self.tied.name] + [self.tied.name]
            self._unsplit()
        plan = BucketPlan.build(
            order,
            {name: self._member(p) for name, p in self.parameters.items()},
            bucket_bytes=self.bucket_size_mb * MIB,
            first_bucket_bytes=min(FIRST_BUCKET_MB, self.bucket_size_mb) * MIB,
            split=self.tied.name if self.tied else None,
        )
        self._adopt(plan)

    def _what_ranks_share(self) -> dict:
        # Nobody broadcasts weights here, and ranks that start from different ones would never meet.
        weights = {name: int(p.detach().reshape(-1).view(torch.uint8).sum()) for name, p in self.parameters.items()}
        return {
            "gradient_clipping": self.max_norm,
            "threshold": self.threshold,
            "bucket_size_mb": self.bucket_size_mb,
            "overlap": self.overlap,
            "communication_data_type": str(self.communication_dtype),
            "split_tied_embedding": self.tied is not None,
            "trainable parameters": fingerprint({name: list(p.shape) for name, p in self.parameters.items()}),
            "weights": fingerprint(weights),
        }

    def _member(self, parameter: nn.Parameter) -> Member:
        dtype = self.communication_dtype or parameter.dtype
        return Member(parameter.numel() * dtype.itemsize, f"{parameter.dtype} on {parameter.device}")

    def _adopt(self, plan: BucketPlan) -> None:
        elements = [sum(self.parameters[name].numel() for name in bucket) for bucket in plan.buckets]
        thresholds = RULES[self.threshold](self.max_norm, elements)
        settings = {"dtype": self.communication_dtype, "group": self.group, "world_size": self.world_size}
        self.buckets = [
            SplitBucket(self.tied, threshold, **settings)
            if names == (plan.split,)
            else Bucket({name: self.parameters[name] for name in names}, threshold, **settings)
            for names, threshold in zip(plan.buckets, thresholds, strict=True)
        ]
        self._bucket_of = {name: index for index, names in enumerate(plan.buckets) for name in names}
        for number, bucket in enumerate(self.buckets):
            bucket.trace, bucket.label = self.trace, f"bucket {number}"
        self.plan = plan
        self._rearm()

    def _unsplit(self) -> None:
        self.tied.unsplit()
        self.tied = None

    def state_dict(self) -> dict:
        """What a resumed run needs to give the same numbers: plain values."""
        return {"plan": self.plan and self.plan.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Take the saved plan, so that nothing is learned anew. On all ranks alike, before the first step.

        Raises:
            UserError: the plan is of another model.
        """
        if state["plan"] is None:
            return
        plan = BucketPlan.from_state_dict(state["plan"], list(self.parameters))
        if plan.split is None and self.tied:
            self._unsplit()
        if plan.split is not None and not self.tied:
            raise UserError(
                f"the saved bucket plan sends the gradient of {plan.split} in two parts, and this model does not tie it"
            )
        self._adopt(plan)

    def first_nonfinite(self) -> str | None:
        """Which rank's gradient was not finite in the last step, and where: "rank 3, parameter ...". Collective.

        Returns:
            the lowest such rank with its first such parameter in the order of sending; None if every rank's own
            gradient was finite.
        """
        names = [name for bucket in self.buckets for name in bucket.names]
        return first_nonfinite(names, [bucket.parameter_norms for bucket in self.buckets], self.group)

    def detach(self) -> None:
        """Give the model back as it was."""
        for handle in self._handles:
            handle.remove()
        _attached.discard(self._module)
        if self.tied:
            self._unsplit()


def check_settings(max_norm: float, threshold: str, bucket_size_mb: float) -> None:
    for name, value in {"max_norm": max_norm, "bucket_size_mb": bucket_size_mb}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise UserError(f"{name}: must be a positive number, not {value!r}")
    if threshold not in RULES:
        raise UserError(f"threshold: {threshold!r} is not known (valid: {', '.join(RULES)})")


def attach(module: nn.Module, *, max_norm: float, **settings) -> OverlappedReducer:
    """Reduce a module's gradients under plain torch.distributed.

        reducer = attach(model, max_norm=1.0)
        loss.backward()
        statistics = reducer.finish()
        if math.isfinite(statistics.grad_norm_after_clip):  # the same on all ranks
            optimizer.step()

    All ranks must start from the same weights; parameters that are trainable now are reduced, frozen ones never.

    Args:
        module, max_norm, settings: see `OverlappedReducer`.
    """
    return OverlappedReducer(module, max_norm=max_norm, **settings)
