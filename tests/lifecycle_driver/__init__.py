"""Drives the pure core in tests: a memory sink, a short-hand for observations, a small world.

It knows `kvledger.lifecycle`, and what reads its events: totals and reasons. Nothing here runs vLLM, copies tensors or
reads a clock.
"""

from lifecycle_driver.driver import Driver, keys_of
from lifecycle_driver.invariants import check_invariants, check_slots
from lifecycle_driver.sink import MemorySink
from lifecycle_driver.world import World, play_seed

__all__ = ["Driver", "MemorySink", "World", "check_invariants", "check_slots", "keys_of", "play_seed"]
