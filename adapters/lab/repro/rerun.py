"""Runs a recording again, on the core or through the hooks of its connector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvledger.adapters.core import composed_core
from kvledger.adapters.lab.repro.chosen import Chosen
from kvledger.adapters.lab.repro.core import CoreRun
from kvledger.adapters.lab.repro.outcome import Rerun
from kvledger.adapters.lab.repro.recording import NotRerunnable, Recording, read_recording
from kvledger.storage.extras import CONNECTOR, require


def rerun(
    recording: Recording | Path,
    *,
    handlers: Sequence[str] = (),
    connector: str = "",
    extra_config: Mapping[str, Any] | None = None,
    run_recorded: bool = False,
) -> Rerun:
    """Make the recorded hook calls again, on kvledger's connector or on a connector that a recorder wrapped.

    A recorder's log names the connector, which is code. This code runs only if the caller names the connector, too, or
    accepts the name in the log. Paths, addresses and other names of code are never taken from a log.

    Args:
        recording: the recording, or the path of the log that has it.
        handlers: your own state handlers, as "module:Class", if the engine had any.
        connector: for a recorder's log, the connector to call: "module:Class", or a name that vLLM registers.
        extra_config: keys of that connector's `kv_connector_extra_config`, which override the log's keys.
        run_recorded: whether to import the modules and classes that a recorder's log names.

    Raises:
        NotRerunnable: the log is damaged, the choice of a connector is missing or does not fit the log, or the
            connector cannot be created here.
        ModuleNotFoundError: vLLM is not installed.
    """
    require("driving the real connector", *CONNECTOR)
    from kvledger.adapters.lab.repro.hooks import LedgerRun  # noqa: PLC0415 -- vLLM is imported only if it is driven
    from kvledger.adapters.lab.repro.wrapped import WrappedRun  # noqa: PLC0415 -- as above

    recording = recording if isinstance(recording, Recording) else read_recording(recording)
    chosen = Chosen(connector, extra_config or {}, run_recorded)
    if recording.wrapped is not None:
        return WrappedRun(recording, recording.wrapped, chosen, handlers).run()
    if not chosen.is_empty:
        raise NotRerunnable(
            "the log is of kvledger's own connector; leave out connector, extra_config and run_recorded, which are "
            "only for a recorder's log"
        )
    return LedgerRun(recording, handlers).run()


def rerun_core(recording: Recording | Path, *, handlers: Sequence[str] = ()) -> Rerun:
    """Give the recorded observations to a new ledger, without vLLM. For `recording` and `handlers` see `rerun`."""
    recording = recording if isinstance(recording, Recording) else read_recording(recording)
    return CoreRun(recording, composed_core(handlers)).run()
