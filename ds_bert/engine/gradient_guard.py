"""Steps whose gradient is not finite are skipped by all ranks; what DeepSpeed 0.19 leaves out for that."""

import logging
import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.base_optimizer import ZeROOptimizer

from ds_bert.engine.patches import wrap
from ds_bert.errors import UserError
from ds_bert.reduction.norms import global_norm
from ds_bert.reduction.statistics import ReductionStatistics
from ds_bert.reduction.trace import Trace

MAX_SKIPPED_IN_A_ROW = 10

log = logging.getLogger(__name__)


class BucketClipping(Protocol):
    """What the two ways of clipping buckets have in common: `OverlappedReducer` (stage 0), `ZeroClipping` (1 and 2)."""

    statistics: ReductionStatistics | None
    """Figures of the last step."""
    trace: Trace | None

    def first_nonfinite(self) -> str | None:
        """See `OverlappedReducer.first_nonfinite`."""

    def state_dict(self) -> dict:
        """What a resumed run needs to give the same numbers: plain values."""

    def load_state_dict(self, state: dict) -> None:
        """Take what `state_dict` gave, on all ranks alike, before the first step."""


class GradientGuard:
    """Watches the optimizer steps of one engine, from inside its `step()`.

    DeepSpeed skips a step with a non-finite gradient at ZeRO stages 1 and 2 and in fp16 and bf16, but at stage 0 in
    fp32 it writes NaN into the weights; there the guard skips in its place, in the same way: the weights, the
    optimizer's state and the learning-rate schedule stay, `engine.skipped_steps` counts. DeepSpeed's own norm is
    missing at stage 0 in fp32 and taken in one sweep at the other stages, so the guard computes it from the reduced
    gradients, and `engine.get_global_grad_norm()` returns it. At stage 0 in fp16 DeepSpeed divides gradients by a loss
    scale that its backward never multiplied in, so that they come out too small by it and are never clipped; there the
    guard scales the loss.

    `engine.step()` raises UserError, the same on all ranks, once ten steps in a row were skipped, or when a dynamic
    loss scale is at its minimum and still too large.

    Args:
        engine: from `deepspeed.initialize`, at ZeRO stage 0, 1 or 2.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.clipping: BucketClipping | None = None
        """Bucket clipping attached to the engine, if there is one: it knows the norms."""
        self.skipped_in_a_row = 0
        self._any_step_succeeded = False
        self._norm: float | None = None
        self._scale_exhausted = False
        self._must_skip = not (engine.fp16_enabled() or engine.bfloat16_enabled() or engine.zero_optimization())
        if self._must_skip:
            _make_skippable(engine.optimizer)
        if _forgets_loss_scale(engine):
            _remember_loss_scale(engine, self.loss_scale)
        scaler = loss_scaler(engine)
        if hasattr(scaler, "raise_error_at_min_scale"):
            # DeepSpeed would raise a bare Exception; after_step() says the same in words.
            scaler.raise_error_at_min_scale = False
        wrap(engine, "get_global_grad_norm", "gradient guard", lambda _: lambda: self.norms()[1])
        wrap(engine, "_take_model_step", "gradient guard", self._watched)

    def _watched(self, take_step: Callable) -> Callable:
        def watched_step(*args, **kwargs):
            self.before_step()
            take_step(*args, **kwargs)
            self.after_step()

        return watched_step

    def loss_scale(self) -> float:
        """The factor in the gradients; 1 without fp16."""
        return getattr(loss_scaler(self.engine), "cur_scale", 1.0)

    def before_step(self) -> None:
        """The reduced gradient is there and the optimizer has not stepped. A collective call."""
        scaler, scale = loss_scaler(self.engine), self.loss_scale()
        self._scale_exhausted = scale <= _minimum_scale(scaler) and getattr(scaler, "cur_hysteresis", 1) <= 1
        self._norm = self._measure(scale)
        if self._must_skip:
            self.engine.optimizer.overflow = not math.isfinite(self._norm)
        if self.clipping and not math.isfinite(self.norms()[1]):
            self._tell_where()

    def _measure(self, scale: float) -> float | None:
        """The norm of the averaged gradient, unscaled; None where DeepSpeed keeps it out of reach (offloaded)."""
        if self.clipping and self.clipping.statistics.norm_after is not None:
            return self.clipping.statistics.grad_norm_after_clip
        gradients = self._reduced_gradients()
        if gradients is None:
            return None
        norm = global_norm(gradients).double()
        if self.engine.zero_optimization():
            square = norm.to(self.engine.device).square()
            dist.all_reduce(square, group=self.engine.data_parallel_group)
            norm = square.sqrt()
        return norm.item() / scale

    def _tell_where(self) -> None:
        where = self.clipping.first_nonfinite() or "the average of all ranks, each of which is finite"
        if dist.get_rank() == 0:
            log.warning(f"step {self.engine.global_steps + 1}: the gradient is not finite ({where}); all ranks skip it")

    def after_step(self) -> None:
        """The optimizer has stepped, or not.

        Raises:
            UserError: see the class; the same on all ranks, for all see the same reduced gradient.
        """
        engine = self.engine
        if engine.was_step_applied():
            self.skipped_in_a_row = 0
            self._any_step_succeeded = True
            return
        dynamic = engine.fp16_enabled() and engine.dynamic_loss_scale()
        if dynamic and self._scale_exhausted:
            raise UserError(
                f"step {engine.global_steps}: the gradient is not finite although the dynamic loss scale is at its "
                f"minimum of {_minimum_scale(loss_scaler(engine)):g}; lower the learning rate, or train in bf16"
            )
        # A dynamic scale starts far too high on purpose, and comes down by skipped steps.
        if dynamic and not self._any_step_succeeded:
            return
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise UserError(
                f"step {engine.global_steps}: {MAX_SKIPPED_IN_A_ROW} steps in a row had a gradient that is not finite "
                "and were skipped; lower the learning rate, lengthen the warm-up or set gradient_clipping"
            )

    def norms(self) -> tuple[float, float]:
        """`grad_norm_before_clip` and `grad_norm_after_clip` of the last step (docs/clipping.md), unscaled.

        Neither is finite for a skipped step.
        """
        norm = self._norm if self._norm is not None else float(self.engine._global_grad_norm)
        if self.clipping:
            return self.clipping.statistics.grad_norm_before_clip, norm
        maximum = self.engine.gradient_clipping()
        return norm, min(norm, maximum) if maximum > 0 and math.isfinite(norm) else norm

    def _reduced_gradients(self) -> list[torch.Tensor] | None:
        """This rank's part of the averaged gradient; None where it is out of reach."""
        if not self.engine.zero_optimization():
            return [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        groups = getattr(self.engine.optimizer, "averaged_gradients", None)
        if not groups or any(group is None for group in groups.values()):
            return None
        return [g for group in groups.values() for g in group if not getattr(g, "_zero_padding", False)]


def guard_of(engine: DeepSpeedEngine) -> GradientGuard:
    """The engine's guard; it gets one if it has none."""
    if "gradient_guard" not in vars(engine):
        engine.gradient_guard = GradientGuard(engine)
    return engine.gradient_guard


def loss_scaler(engine: DeepSpeedEngine):
    """What holds the loss scale: DeepSpeed keeps it under two names, and nowhere in plain fp32."""
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scale_config", None) or getattr(optimizer, "loss_scaler", None)


def _minimum_scale(scaler) -> float:
    minimum = getattr(scaler, "min_loss_scale", None)
    return getattr(scaler, "min_scale", 0.0) if minimum is None else minimum


def _make_skippable(optimizer: torch.optim.Optimizer) -> None:
    def skippable(take_step: Callable) -> Callable:
        def step(*args, **kwargs):
            if not optimizer.overflow:
                return take_step(*args, **kwargs)

        return step

    # DeepSpeed reads `overflow` after step(), as it does with its own wrappers.
    optimizer.overflow = False
    wrap(optimizer, "step", "gradient guard", skippable)


def _forgets_loss_scale(engine: DeepSpeedEngine) -> bool:
    """Whether the engine's backward leaves out the loss scale that its optimizer divides by.

    True of DeepSpeed 0.19 at ZeRO stage 0. Asked of the engine, so that a version that mends it is not scaled twice.
    """
    if not engine.fp16_enabled() or isinstance(engine.optimizer, ZeROOptimizer):
        return False
    one = torch.ones((), device=engine.device, requires_grad=True) * 1
    forgotten = bool(engine.scale(one) == 1)
    engine._manual_backward_expected = False  # scale() expects a backward to follow
    return forgotten


def _remember_loss_scale(engine: DeepSpeedEngine, loss_scale: Callable[[], float]) -> None:
    def scaled_backward(backward: Callable) -> Callable:
        return lambda loss, *args, **kwargs: backward(loss * loss_scale(), *args, **kwargs) / loss_scale()

    wrap(engine, "backward", "gradient guard", scaled_backward)
    wrap(engine, "scale", "gradient guard", lambda scale: lambda loss: scale(loss) * loss_scale())
