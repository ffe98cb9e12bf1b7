"""Incidents as tests: runs the observations of a log again, on the core or on the real connector.

The tests that `kvledger repro` writes import this package. vLLM is imported only when `rerun` is called. For tests that
you write yourself, `connector.py` has the connector without an engine.
"""

from kvledger.adapters.lab.repro.outcome import HOOK_FAILED, Rerun, Trouble
from kvledger.adapters.lab.repro.recording import NotRerunnable, Recording, read_recording, record
from kvledger.adapters.lab.repro.rerun import rerun, rerun_core

__all__ = [
    "HOOK_FAILED",
    "NotRerunnable",
    "Recording",
    "Rerun",
    "Trouble",
    "read_recording",
    "record",
    "rerun",
    "rerun_core",
]
