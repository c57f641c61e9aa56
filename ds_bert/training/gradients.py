"""The gradient's norm at every ZeRO stage, and steps skipped by all ranks when it is not finite."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.base_optimizer import ZeROOptimizer

from ds_bert.errors import UserError

# One norm over millions of fp32 elements is off by up to 7.5e-4 on a CPU; the norm of the norms of rows of this many is
# right to 1e-7.
NORM_ROW_ELEMENTS = 4096

MAX_SKIPPED_IN_A_ROW = 10


def global_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all elements of all tensors: 0-d fp32, on the tensors' device (no host synchronisation)."""
    norms = []
    for tensor in tensors:
        flat = tensor.detach().flatten().float()
        whole = flat.numel() - flat.numel() % NORM_ROW_ELEMENTS
        norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW_ELEMENTS), dim=1))
        norms.append(torch.linalg.vector_norm(flat[whole:]).view(1))
    return torch.linalg.vector_norm(torch.cat(norms)) if norms else torch.zeros(())


class GradientGuard:
    """Watches the optimizer steps of one engine.

    DeepSpeed skips a step with a non-finite gradient at ZeRO stages 1 and 2 and in fp16 and bf16, but at stage 0 in
    fp32 it writes NaN into the weights; there the guard skips in its place, in the same way: the weights, the
    optimizer's state and the learning-rate schedule stay, `engine.skipped_steps` counts. DeepSpeed's own norm is
    missing at stage 0 in fp32 and taken in one sweep at the other stages, so the guard computes it from the reduced
    gradients. At stage 0 in fp16 DeepSpeed divides gradients by a loss scale that its backward never multiplied in, so
    that they come out too small by it and are never clipped; there the guard scales the loss.

    Args:
        engine: from `deepspeed.initialize`, at ZeRO stage 0, 1 or 2.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.skipped_in_a_row = 0
        self._any_step_succeeded = False
        self._scales_loss = _forgets_loss_scale(engine)
        self._norm: float | None = None
        self._scale_exhausted = False
        self._must_skip = not (engine.fp16_enabled() or engine.bfloat16_enabled() or engine.zero_optimization())
        if self._must_skip:
            self._make_skippable(engine.optimizer)
        scaler = self._loss_scaler()
        if hasattr(scaler, "raise_error_at_min_scale"):
            # DeepSpeed would raise a bare Exception; after_step() says the same in words.
            scaler.raise_error_at_min_scale = False

    @staticmethod
    def _make_skippable(optimizer: torch.optim.Optimizer) -> None:
        take_step = optimizer.step

        def step(*args, **kwargs):
            if not optimizer.overflow:
                return take_step(*args, **kwargs)

        # DeepSpeed reads `overflow` after step(), as it does with its own wrappers.
        optimizer.overflow = False
        optimizer.step = step

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to give to `engine.backward()`."""
        return loss * self._loss_scaler().cur_scale if self._scales_loss else loss

    def before_step(self) -> None:
        """Call between the last `engine.backward()` of an optimizer step and its `engine.step()`. A collective call."""
        scaler = self._loss_scaler()
        scale = getattr(scaler, "cur_scale", 1.0)
        self._scale_exhausted = scale <= _minimum_scale(scaler) and getattr(scaler, "cur_hysteresis", 1) <= 1
        grads = self._reduced_gradients()
        if grads is not None:
            norm = global_norm(grads).double()
            if self.engine.zero_optimization():
                square = norm.to(self.engine.device).square()
                dist.all_reduce(square)
                norm = square.sqrt()
            self._norm = norm.item() / scale
        if self._must_skip:
            self.engine.optimizer.overflow = not math.isfinite(self._norm)

    def after_step(self) -> None:
        """Call after the `engine.step()` that ends an optimizer step.

        Raises:
            UserError: ten steps in a row were skipped, or a dynamic loss scale is at its minimum and still too large.
                The same on all ranks, for all see the same reduced gradient.
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
                f"minimum of {_minimum_scale(self._loss_scaler()):g}; lower the learning rate, or train in bf16"
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
        """`grad_norm_before_clip` and `grad_norm_after_clip` of the last step.

        Before: the norm of the gradient averaged over all ranks and micro-steps, unscaled. After: as the optimizer got
        it, the smaller of that and `gradient_clipping`. Neither is finite for a skipped step.
        """
        norm = self._norm if self._norm is not None else float(self.engine.get_global_grad_norm())
        maximum = self.engine.gradient_clipping()
        return norm, min(norm, maximum) if maximum > 0 and math.isfinite(norm) else norm

    def _loss_scaler(self):
        """What holds the loss scale: DeepSpeed keeps it under two names, and nowhere in plain fp32."""
        optimizer = self.engine.optimizer
        return getattr(optimizer, "loss_scale_config", None) or getattr(optimizer, "loss_scaler", None)

    def _reduced_gradients(self) -> list[torch.Tensor] | None:
        """This rank's part of the averaged gradient; None where DeepSpeed keeps it out of reach (offloaded)."""
        if not self.engine.zero_optimization():
            return [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        groups = getattr(self.engine.optimizer, "averaged_gradients", None)
        if not groups or any(group is None for group in groups.values()):
            return None
        return [g for group in groups.values() for g in group if not getattr(g, "_zero_padding", False)]


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


def _minimum_scale(scaler) -> float:
    minimum = getattr(scaler, "min_loss_scale", None)
    return getattr(scaler, "min_scale", 0.0) if minimum is None else minimum
