"""Searching the values of a DeepSpeed configuration with real trainings."""

from ds_bert.sweep.space import Parameter, parse_parameter
from ds_bert.sweep.sweep import Sweep, SweepSettings

__all__ = ["Parameter", "Sweep", "SweepSettings", "parse_parameter"]
