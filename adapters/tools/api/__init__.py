"""Python API for reading logs. The package `kvledger` exports the names of this module, and loads it on first use.

The API reads logs as the commands do, and prints nothing. `kvledger.lifecycle.events` describes the events.
"""

from kvledger.adapters.tools.api.errors import (
    Error,
    LogNotFound,
    LogUnreadable,
    RequestAmbiguous,
    RequestNotFound,
)
from kvledger.adapters.tools.api.log import Log, Request, open_log
from kvledger.adapters.tools.api.records import (
    Advance,
    Copy,
    Entry,
    Eviction,
    Life,
    Lookup,
    Reason,
    Start,
    Step,
)
from kvledger.adapters.tools.api.report import Damage, Divergence, Finding, LogReport, Report, Verdict, Violation
from kvledger.adapters.tools.reasons import Reason as ReasonCode

__all__ = [
    "Advance",
    "Copy",
    "Damage",
    "Divergence",
    "Entry",
    "Error",
    "Eviction",
    "Finding",
    "Life",
    "Log",
    "LogNotFound",
    "LogReport",
    "LogUnreadable",
    "Lookup",
    "Reason",
    "ReasonCode",
    "Report",
    "Request",
    "RequestAmbiguous",
    "RequestNotFound",
    "Start",
    "Step",
    "Verdict",
    "Violation",
    "open_log",
]
