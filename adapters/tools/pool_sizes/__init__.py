"""Estimates from one reading of a log how many tokens host pools of other sizes would have loaded."""

from kvledger.adapters.tools.pool_sizes.estimate import FACTORS, Estimate, PoolSize
from kvledger.adapters.tools.pool_sizes.lru_stack import LruStack
from kvledger.adapters.tools.pool_sizes.visitor import PoolSizes, of_log

__all__ = ["FACTORS", "Estimate", "LruStack", "PoolSize", "PoolSizes", "of_log"]
