"""The four ways to fill batches, by their names in the configuration."""

from ds_bert.sampling.plan import Strategy
from ds_bert.sampling.strategies.balanced import Balanced
from ds_bert.sampling.strategies.local_sort import LocalSort
from ds_bert.sampling.strategies.random import Random
from ds_bert.sampling.strategies.stratified import Stratified

STRATEGIES: dict[str, type[Strategy]] = {
    "random": Random,
    "local_sort": LocalSort,
    "stratified": Stratified,
    "balanced": Balanced,
}

__all__ = ["STRATEGIES"]
