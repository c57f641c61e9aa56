"""Predictions for a cluster one does not have."""

from ds_bert.planning.imbalance import StrategyReport, recommend, simulate
from ds_bert.planning.lengths import read_lengths
from ds_bert.planning.plot import plot_balance

__all__ = ["StrategyReport", "plot_balance", "read_lengths", "recommend", "simulate"]
