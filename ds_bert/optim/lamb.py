"""LAMB (arXiv 1904.00962, algorithm 2) in plain torch, for devices that DeepSpeed's kernel is not made for.

No library serves: timm's is right but needs torchvision, and a build of that which does not match torch breaks
transformers; pytorch-optimizer's corrects no bias.
"""

from collections.abc import Iterable

import torch
from torch.optim import Optimizer


class Lamb(Optimizer):
    """Adam whose step for each tensor is as long as the tensor, times the learning rate.

    In step t, for a tensor x with gradient g:

        m = beta1 m + (1 - beta1) g;    v = beta2 v + (1 - beta2) g^2
        u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay x
        x = x - lr r u,    r = |x| / |u|, or 1 where either is 0 or weight_decay is 0 (as in NVIDIA's and MLPerf's)

    Args:
        params: tensors, or groups as for every torch optimizer.
        lr, betas, eps, weight_decay: see above.
        bias_correction: false leaves m and v as they are.
        min_coeff, max_coeff: bounds of r, as DeepSpeed's kernel has them (0.01 and 10 there); None for none.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        min_coeff: float | None = None,
        max_coeff: float | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "min_coeff": min_coeff, "max_coeff": max_coeff, "step": 0}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        """One step; see `torch.optim.Optimizer.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1
            tensors = [p for p in group["params"] if p.grad is not None]
            if tensors:
                self._step_group(group, tensors)
        return loss

    def _step_group(self, group: dict, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if not self.state[tensor]:
                self.state[tensor] = {name: torch.zeros_like(tensor) for name in ("exp_avg", "exp_avg_sq")}
        m, v = ([self.state[tensor][name] for tensor in tensors] for name in ("exp_avg", "exp_avg_sq"))
        gradients, (beta1, beta2) = [tensor.grad for tensor in tensors], group["betas"]
        torch._foreach_lerp_(m, gradients, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, gradients, gradients, 1 - beta2)
        corrected = group["bias_correction"]
        scale_m, scale_v = ((1 - beta ** group["step"]) if corrected else 1.0 for beta in (beta1, beta2))
        denominators = torch._foreach_div(v, scale_v)
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_div(m, scale_m)
        torch._foreach_div_(updates, denominators)
        if group["weight_decay"]:
            torch._foreach_add_(updates, tensors, alpha=group["weight_decay"])
            torch._foreach_mul_(updates, self._ratios(group, tensors, updates))
        torch._foreach_add_(tensors, updates, alpha=-group["lr"])

    @staticmethod
    def _ratios(group: dict, tensors: list[torch.Tensor], updates: list[torch.Tensor]) -> list[torch.Tensor]:
        lengths, steps = (torch.stack(torch._foreach_norm(these)) for these in (tensors, updates))
        ratios = lengths / steps
        if group["min_coeff"] is not None or group["max_coeff"] is not None:
            ratios = ratios.clamp(group["min_coeff"], group["max_coeff"])
        return list(torch.where((lengths > 0) & (steps > 0), ratios, 1.0).unbind())
