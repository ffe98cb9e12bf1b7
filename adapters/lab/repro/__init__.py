"""Incidents as tests: a log's observations, run again on the core or on the real connector.

`kvledger repro` writes a test that imports from here. vLLM is imported by `rerun` only; tests written by hand find the
connector without an engine in `connector.py`.
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
