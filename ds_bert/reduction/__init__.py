"""Gradients clipped bucket by bucket before they are averaged over ranks, while the backward pass goes on."""

from ds_bert.reduction.plan import BucketPlan
from ds_bert.reduction.reducer import OverlappedReducer, attach
from ds_bert.reduction.statistics import ReductionStatistics

__all__ = ["BucketPlan", "OverlappedReducer", "ReductionStatistics", "attach"]
