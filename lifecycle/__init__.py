"""The lifecycle of a request as an event-sourced state machine: the pure core of kvledger.

Reads top to bottom: `states`, `events`, `table`, `machine`, `projections/`, `decisions/`, `handlers/`, `core`,
`standard`, `decider`, `ledger`, `divergences`, `replay`, `codec`. It knows no torch, no vLLM, no files and no clock.
"""

from kvledger.lifecycle.configuration import ConfigurationError, LedgerConfiguration
from kvledger.lifecycle.core import Core, CoreError
from kvledger.lifecycle.divergences import Divergence
from kvledger.lifecycle.handlers import StateHandler
from kvledger.lifecycle.ledger import EventSink, Ledger
from kvledger.lifecycle.replay import Replay, fold
from kvledger.lifecycle.states import RequestState

__all__ = [
    "ConfigurationError",
    "Core",
    "CoreError",
    "Divergence",
    "EventSink",
    "Ledger",
    "LedgerConfiguration",
    "Replay",
    "RequestState",
    "StateHandler",
    "fold",
]
