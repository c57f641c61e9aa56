"""Bucket clipping at ZeRO stages 1 and 2: DeepSpeed fills and sends the buckets, here they are clipped first."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from ds_bert.engine.patches import wrap
from ds_bert.errors import UserError
from ds_bert.reduction.bucket import clip_coefficient
from ds_bert.reduction.norms import tensor_norms
from ds_bert.reduction.statistics import ReductionStatistics, first_nonfinite
from ds_bert.reduction.thresholds import RULES
from ds_bert.reduction.trace import Trace, span


class ZeroClipping:
    """Clips each flat bucket that DeepSpeed's ZeRO 1 or 2 is about to average.

    Stage 2 reduces every micro-batch: there each micro-gradient (already divided by the accumulation steps) is clipped
    at the bucket's threshold over the accumulation steps, which keeps the bound on their sum.

    Args:
        engine: at ZeRO stage 1 or 2, with contiguous gradients.
        max_norm, threshold: see `OverlappedReducer`.
        loss_scale: the factor in the gradients.
    """

    def __init__(
        self, engine: DeepSpeedEngine, *, max_norm: float, threshold: str, loss_scale: Callable[[], float]
    ) -> None:
        self.max_norm, self.threshold = max_norm, threshold
        self.trace: Trace | None = None
        self.statistics: ReductionStatistics | None = None
        self.buckets: list[list[str]] = []
        """Parameter names of each bucket of the last step; at stage 2 of each of its micro-steps in turn."""
        self.thresholds: list[float] = []
        """What each of `buckets` was clipped at."""
        self._engine, self._optimizer, self._loss_scale = engine, engine.optimizer, loss_scale
        self._group = engine.data_parallel_group
        self._world_size = dist.get_world_size(self._group)
        self._names = {parameter: name for name, parameter in engine.module.named_parameters()}
        groups = self._optimizer.bit16_groups
        self._total_elements = sum(parameter.numel() for group in groups for parameter in group)
        self._micro_steps = engine.gradient_accumulation_steps() if engine.zero_optimization_stage() == 2 else 1
        self._bucket_count = self._count_buckets()
        self._norms: list[torch.Tensor] = []
        self._coefficients: list[torch.Tensor] = []
        self._parameter_norms: list[torch.Tensor] = []
        self._in_micro_step = 0
        self._finished = False
        wrap(self._optimizer, "average_tensor", "bucket clipping", self._clip_before)
        wrap(engine, "allreduce_gradients", "bucket clipping", self._finish_after)

    def _clip_before(self, average: Callable) -> Callable:
        def clip_and_average(tensor: torch.Tensor, communication_data_type: torch.dtype):
            if not tensor.numel():
                return average(tensor, communication_data_type)
            name = f"bucket {self._in_micro_step}"
            with span(self.trace, f"clip {name}", "clip"):
                self._clip(tensor, self._optimizer.ipg_buckets[communication_data_type].params)
            # On a CPU DeepSpeed waits in here, on a GPU it only starts.
            with span(self.trace, f"all-reduce {name}", "communication"), span(self.trace, f"wait {name}", "wait"):
                return average(tensor, communication_data_type)

        return clip_and_average

    def _finish_after(self, reduce: Callable) -> Callable:
        def reduce_and_finish(*args, **kwargs):
            result = reduce(*args, **kwargs)
            self._in_micro_step = 0
            if self._engine.is_gradient_accumulation_boundary():
                self._finish()
            return result

        return reduce_and_finish

    def _count_buckets(self) -> int:
        """How many buckets DeepSpeed's filling rule makes of the parameters, last first as backward has them."""
        limit, count, open_elements = self._optimizer.reduce_bucket_size, 0, {}
        for parameter in reversed(list(self._engine.module.parameters())):
            if not parameter.requires_grad:
                continue
            kind = self._optimizer.get_param_comm_dtype(parameter)
            if kind not in open_elements or open_elements[kind] + parameter.numel() > limit:
                count, open_elements[kind] = count + 1, 0
            open_elements[kind] += parameter.numel()
        return count

    def _clip(self, tensor: torch.Tensor, members: list[tuple[int, int, int]]) -> None:
        if self._finished:
            self._start_step()
        parameters = [self._optimizer.bit16_groups[group][index] for group, index, _ in members]
        self._in_micro_step += 1
        if self.threshold == "equal" and self._in_micro_step > self._bucket_count:
            raise UserError(
                f"bucket_clipping.threshold: 'equal' divides by the number of buckets, {self._bucket_count} were "
                'counted and DeepSpeed makes more; use "proportional"'
            )
        norms = tensor_norms(tensor.split([parameter.numel() for parameter in parameters])) / self._loss_scale()
        norm = torch.linalg.vector_norm(norms)
        threshold = self._threshold_of(tensor.numel()) / self._micro_steps
        coefficient = clip_coefficient(norm, threshold)
        tensor.mul_(coefficient)
        self.buckets.append([self._names[parameter] for parameter in parameters])
        self.thresholds.append(threshold)
        self._parameter_norms.append(norms)
        self._norms.append(norm)
        self._coefficients.append(coefficient)

    def _threshold_of(self, elements: int) -> float:
        if self.threshold == "equal":
            return RULES["equal"](self.max_norm, [1] * self._bucket_count)[0]
        return RULES[self.threshold](self.max_norm, [elements, self._total_elements - elements])[0]

    def _start_step(self) -> None:
        self._finished = False
        for collected in (self.buckets, self.thresholds, self._norms, self._coefficients, self._parameter_norms):
            collected.clear()

    def _finish(self) -> None:
        """Sum the squared norms and the clipped buckets over the ranks."""
        self._finished = True
        norm_of: dict[tuple[str, ...], torch.Tensor] = {}
        for bucket, norm in zip(self.buckets, self._norms, strict=True):
            # A sum of micro-gradients is at most as long as their norms together.
            norm_of[tuple(bucket)] = norm_of.get(tuple(bucket), 0) + norm
        nothing = torch.zeros(0, device=self._engine.device)
        norms = torch.stack(list(norm_of.values())) if norm_of else nothing
        coefficients = torch.stack(self._coefficients) if norm_of else nothing
        sums = torch.stack([norms.double().square().sum(), (coefficients < 1).sum().double()])
        dist.all_reduce(sums, group=self._group)
        self.statistics = ReductionStatistics(
            bucket_norms=norms,
            coefficients=coefficients,
            sums=sums,
            norm_after=None,
            waits=None,
            world_size=self._world_size,
        )

    def first_nonfinite(self) -> str | None:
        """See `OverlappedReducer.first_nonfinite`."""
        names = [name for bucket in self.buckets for name in bucket]
        return first_nonfinite(names, self._parameter_norms, self._group)

    def state_dict(self) -> dict:
        """Nothing: DeepSpeed fills its buckets anew, in the same way."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """See `state_dict`."""
