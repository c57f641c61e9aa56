"""Sampling: which samples each rank trains on, and in which order.

Planned from the samples' lengths alone, never from their contents, and without communication: a position is a pure
function of (seed, epoch, step). `batch_sampler` is the way in; `plan` says what a strategy gets and returns, and
`strategies/` holds one file for each. `position` is what a checkpoint saves.
May import the ground only, and torch for `torch.utils.data.Sampler`.
"""

from ds_bert.sampling.arguments import MAX_SAMPLES, as_lengths
from ds_bert.sampling.batch_sampler import LengthBalancedBatchSampler
from ds_bert.sampling.cost import cost_table
from ds_bert.sampling.epoch import CarriedIndex
from ds_bert.sampling.plan import StepPlan
from ds_bert.sampling.strategies import STRATEGIES

__all__ = [
    "MAX_SAMPLES",
    "STRATEGIES",
    "CarriedIndex",
    "LengthBalancedBatchSampler",
    "StepPlan",
    "as_lengths",
    "cost_table",
]
