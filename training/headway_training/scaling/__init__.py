"""Scaling laws: pilots over sizes and amounts of data, the law that is fitted to them, and what it advises."""

from headway_training.scaling.law import ScalingLaw, fit_law
from headway_training.scaling.plan import Budget, parse_budget
from headway_training.scaling.study import run_scaling

__all__ = ["Budget", "ScalingLaw", "fit_law", "parse_budget", "run_scaling"]
