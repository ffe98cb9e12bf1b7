"""Makes the recorded calls of a wrapped connector again, on a new connector inside a recorder.

The recorder writes what the connector answers now. The new log is read and judged in the same way as the recorded log.
The rerun has no workers: their reports are part of the recording.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from kvledger.adapters.lab.repro.calls import HookCall
from kvledger.adapters.lab.repro.chosen import Chosen
from kvledger.adapters.lab.repro.connector import WrappedUnderTest
from kvledger.adapters.lab.repro.hooks import HookRun
from kvledger.adapters.lab.repro.recording import (
    Recording,
    ended_transfers,
    ends_of_connector,
    reported_by_workers,
    transferred,
)
from kvledger.adapters.recorded.payloads import RecordingStarted, ReportedBy, WorkersReported
from kvledger.lifecycle import events as e
from kvledger.lifecycle import raise_if_unstoppable

_Ends = TypeVar("_Ends", WorkersReported, ReportedBy)
_FIELDS_OF_ENDS = ("finished_sending", "finished_recving", "failed_recving")


class WrappedRun(HookRun):
    """Repeats what vLLM and the workers did. If the connector raises an error, the rerun ends, as an engine would."""

    def __init__(
        self, recording: Recording, wrapped: RecordingStarted, chosen: Chosen, handlers: Sequence[str] = ()
    ) -> None:
        connector = WrappedUnderTest(
            recording.configuration,
            wrapped,
            chosen.transfer(wrapped.kv_transfer),
            handlers,
            speculates=recording.speculates,
        )
        super().__init__(recording, connector, is_async=wrapped.async_scheduling)
        self._wrapped = connector
        self._now: dict[tuple[str, bool, int], str] = {}
        """(request, whether it is a load, number of such copies before) → the name that the copy has now."""
        self._counts: Counter[tuple[str, bool]] = Counter()
        self._arrived: set[str] = set()

    def _calls_hook(self, make: Callable[[HookCall, Any], object], call: HookCall) -> bool:
        try:
            make(call, call.main)
        except BaseException as error:  # noqa: BLE001 -- the recorder has written which; it is judged with the log
            raise_if_unstoppable(error)
            return False
        return True

    def _arrive(self, call: HookCall, main: e.RequestArrived) -> None:
        self._arrived.add(main.request_id)
        super()._arrive(call, main)

    def _take(self, call: HookCall, events: Sequence[tuple[int, e.Event]]) -> None:
        super()._take(call, events)
        known = set(self._now.values())
        for _, event in events:
            found = transferred(event)
            if found is not None and found[1].job not in known:
                request_id, copy = found
                place = self._counts[request_id, copy.is_load]
                self._counts[request_id, copy.is_load] += 1
                self._now[request_id, copy.is_load, place] = copy.job
                known.add(copy.job)

    def _output(self, call: HookCall, main: e.Event) -> None:
        reported = reported_by_workers(main)
        if reported is None:  # nothing that the workers reported to the connector
            return
        if call.noticed(e.LoadErrorsObserved):
            self._live.take_back(call.noticed(e.TokensRolledBack))
        found = [ends_of_connector(event) for _, event in call.observed]
        by_connector = [self._of_arrived(ends) for ends in found if ends is not None]
        ends = tuple(each for each in by_connector if any(_ends(each)))
        self._wrapped.workers_report(self._of_arrived(reported), self._completed(call), ends)

    def _of_arrived(self, reported: _Ends) -> _Ends:
        """Return the report without the requests whose arrival is not in the recording."""
        kept = [tuple(each for each in ids if each in self._arrived) for ids in _ends(reported)]
        return msgspec.structs.replace(reported, **dict(zip(_FIELDS_OF_ENDS, kept, strict=True)))

    def _completed(self, call: HookCall) -> list[str]:
        """Return the names that the completed copies have in this rerun. Leave out copies that it did not make."""
        copies = self._recording.copies
        ended = [job for _, event in call.observed for job in ended_transfers(event)]
        names = [self._now.get(copies[job]) if job in copies else job for job in ended]
        return [name for name in names if name is not None]


def _ends(reported: WorkersReported | ReportedBy) -> tuple[tuple[str, ...], ...]:
    """Return the request ids in each of `_FIELDS_OF_ENDS`."""
    return reported.finished_sending, reported.finished_recving, reported.failed_recving
