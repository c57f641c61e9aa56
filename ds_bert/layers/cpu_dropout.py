"""Dropout on a CPU in a fifth of the time, since torch draws its masks there one element after the other."""

import numpy as np
import torch
from torch import nn

RESOLUTION = 1 << 16  # of the probability: 16 random bits for each element


@torch.compiler.disable  # numpy draws, so that a compiled model has the same masks
def dropout(x: torch.Tensor, p: float) -> torch.Tensor:
    """`torch.nn.functional.dropout` in training mode, on a CPU.

    Seeded by torch's global generator, so that `torch.manual_seed` and checkpointing of activations repeat it; the
    numbers are others than torch's.

    Args:
        x: any shape, a float dtype.
        p: probability, rounded to 1 / 65,536.
    """
    dropped = round(p * RESOLUTION)
    if dropped == RESOLUTION:
        return x * 0
    seed = torch.empty((), dtype=torch.int64).random_().item()
    raw = np.random.SFC64(seed).random_raw(-(-x.numel() // 4))
    kept = raw.view(np.int16)[: x.numel()] >= dropped - RESOLUTION // 2
    # As bytes: torch converts booleans two to four times as slowly.
    noise = torch.from_numpy(kept.view(np.int8)).to(x.dtype)
    return x * noise.mul_(RESOLUTION / (RESOLUTION - dropped)).view(x.shape)


class CpuDropout(nn.Dropout):
    """`nn.Dropout` through `dropout` on a CPU, and as it was elsewhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not 0 < self.p < 1 or x.device.type != "cpu" or x.numel() == 0:
            return super().forward(x)
        return dropout(x, self.p)


def use_cpu_dropout(model: nn.Module) -> None:
    """Give every `nn.Dropout` of a model the faster masks, in place; what is saved of the model stays the same."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = CpuDropout
