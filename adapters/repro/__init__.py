"""Incidents as tests: a log's observations, driven once more into the core or into the real connector.

`kvledger repro` writes a test that imports from here; so may tests written by hand. vLLM is imported by `reenact` and
`ConnectorUnderTest` only.
"""

from kvledger.adapters.repro.connector import ConnectorUnderTest, ScheduledRequest, Step
from kvledger.adapters.repro.core import reenact_core
from kvledger.adapters.repro.driving import reenact
from kvledger.adapters.repro.from_log import record
from kvledger.adapters.repro.recording import (
    NotReenactable,
    Recording,
    Wrapped,
    quiet_steps,
    report,
    step,
    transfers_ended,
    workers_reported,
)
from kvledger.adapters.repro.reenactment import HOOK_FAILED, Reenactment, Trouble

__all__ = [
    "HOOK_FAILED",
    "ConnectorUnderTest",
    "NotReenactable",
    "Recording",
    "Reenactment",
    "ScheduledRequest",
    "Step",
    "Trouble",
    "Wrapped",
    "quiet_steps",
    "record",
    "reenact",
    "reenact_core",
    "report",
    "step",
    "transfers_ended",
    "workers_reported",
]
