"""Runs a recording again: on the core, or through the hooks of the connector that it is about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvledger.adapters.core import composed_core
from kvledger.adapters.repro.core import CoreRun
from kvledger.adapters.repro.outcome import Rerun
from kvledger.adapters.repro.recording import Recording, read_recording
from kvledger.storage.extras import CONNECTOR, require


def rerun(recording: Recording | Path, *, handlers: Sequence[str] = ()) -> Rerun:
    """Make the recorded hook calls again, to kvledger's connector or to the one that a recorder was around.

    Args:
        recording: what was seen, or a log with it.
        handlers: state handlers of one's own, as "module:Class", if the engine had any.

    Raises:
        NotRerunnable: the log is not whole, or the connector that was recorded cannot be made here.
        ModuleNotFoundError: vLLM is not here.
    """
    require("driving the real connector", *CONNECTOR)
    from kvledger.adapters.repro.hooks import LedgerRun  # noqa: PLC0415 -- vLLM is imported only if it is driven
    from kvledger.adapters.repro.wrapped import WrappedRun  # noqa: PLC0415 -- as above

    recording = recording if isinstance(recording, Recording) else read_recording(recording)
    if recording.wrapped is not None:
        return WrappedRun(recording, recording.wrapped).run()
    return LedgerRun(recording, handlers).run()


def rerun_core(recording: Recording | Path, *, handlers: Sequence[str] = ()) -> Rerun:
    """Give the recorded observations to a new ledger; arguments as of `rerun`."""
    recording = recording if isinstance(recording, Recording) else read_recording(recording)
    return CoreRun(recording, composed_core(handlers)).run()
