"""Which samples each rank trains on, and in which order: planned from lengths alone, never from the data."""

from ds_bert.sampling.batch_sampler import MAX_SAMPLES, LengthBalancedBatchSampler, as_lengths
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
