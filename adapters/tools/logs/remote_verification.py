"""Verifies a log in another process, while this process reads the log for another purpose.

This module must not know that purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import attrs

from kvledger.adapters.tools.logs.log import Batch, Place, StoredLog
from kvledger.adapters.tools.logs.processes import ProcessLost, SeparateProcesses
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.verification import Findings, Outcome, Verification

MIN_BYTES = 4 << 20
"""Size in bytes of the smallest log for which another process is worth its start."""

OpenLog = Callable[[Path], StoredLog]
"""Opens a log with the code and the options that the user has chosen. It can be sent to another process."""


@attrs.frozen
class RemoteVerification:
    """A verification that another process makes. Use `take` and `findings` as for a `Verification`."""

    _log: StoredLog
    _selection: Selection
    _end: Place
    _outcome: Future[Outcome]

    def take(self, _batch: Batch) -> None:
        """Ignore the batch, because the other process reads the log itself."""

    def findings(self) -> Findings:
        """Wait for the other process, and return all findings. Call this after the log was read.

        If the other process was killed, this process verifies the log. It also does so if the oldest segments were
        retired before the other process opened the log.
        """
        log = self._log
        try:
            outcome = self._outcome.result()
            is_same_part = (outcome.start_sequence, outcome.last_sequence) == (log.start_sequence, log.last_sequence)
        except ProcessLost:
            is_same_part = False
        if not is_same_part:
            outcome = _outcome(log, self._selection, self._end)
        return Findings.of(log, self._selection, outcome)


def begin_verification(
    log: StoredLog, selection: Selection, end: Place, others: SeparateProcesses, open_log: OpenLog
) -> Verification | RemoteVerification:
    """Begin to verify a log up to `end`. One of the processes `others` verifies a large log, this process a small log.

    Pass every batch to the result's method `take`. After the last batch, call `findings`.
    """
    if log.is_smaller_than(MIN_BYTES):
        return Verification(log, selection)
    outcome = others.submit(_outcome_in_other_process, open_log, log.path, selection, end)
    return RemoteVerification(log, selection, end, outcome)


def _outcome_in_other_process(open_log: OpenLog, path: Path, selection: Selection, end: Place) -> Outcome:
    return _outcome(open_log(path), selection, end)


def _outcome(log: StoredLog, selection: Selection, end: Place) -> Outcome:
    verification = Verification(log, selection)
    for batch in log.batches_so_far(selection.last_sequence, end):
        verification.take(batch)
    return verification.outcome()
