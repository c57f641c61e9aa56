"""The four ways to fill batches, by their names in the configuration."""

from ds_bert.config import SamplingConfig
from ds_bert.sampling.plan import Strategy
from ds_bert.sampling.strategies.balanced import Balanced
from ds_bert.sampling.strategies.local_sort import LocalSort
from ds_bert.sampling.strategies.random import Random
from ds_bert.sampling.strategies.stratified import Stratified
from ds_bert.sampling.strategies.token_budget import TokenBudget

STRATEGIES: dict[str, type[Strategy]] = {
    "random": Random,
    "local_sort": LocalSort,
    "stratified": Stratified,
    "balanced": Balanced,
}


def strategy_class(options: SamplingConfig) -> type[Strategy]:
    """What plans for these options."""
    return TokenBudget if options.max_tokens_per_micro_batch else STRATEGIES[options.strategy]


__all__ = ["STRATEGIES", "strategy_class"]
