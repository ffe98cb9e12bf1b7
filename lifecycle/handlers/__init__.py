"""State handlers: one file per state. To extend, derive from the one of a state."""

from __future__ import annotations

from kvledger.lifecycle.handlers.base import StateHandler
from kvledger.lifecycle.handlers.chunked_prefill import ChunkedPrefill
from kvledger.lifecycle.handlers.finished import Finished
from kvledger.lifecycle.handlers.new import New
from kvledger.lifecycle.handlers.preempted import Preempted
from kvledger.lifecycle.handlers.recovering import Recovering
from kvledger.lifecycle.handlers.running import Running

__all__ = [
    "STANDARD_HANDLERS",
    "ChunkedPrefill",
    "Finished",
    "New",
    "Preempted",
    "Recovering",
    "Running",
    "StateHandler",
]

STANDARD_HANDLERS: tuple[StateHandler, ...] = (
    New(),
    ChunkedPrefill(),
    Running(),
    Preempted(),
    Recovering(),
    Finished(),
)
