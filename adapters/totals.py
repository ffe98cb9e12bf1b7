"""Totals of a log that are counted live: the connector counts while it serves requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvledger.adapters.figures import ADDS, About, Add, Figures, State, add_row, decoded, encoded
from kvledger.lifecycle import Projections, Subject, raise_if_unstoppable
from kvledger.lifecycle import events as e


class Totals:
    """Counts each event right before `projections` fold it: it adds what the request and the copy were until then.

    A refused observation is not counted, and nothing is called for events that change no figure.

    Args:
        projections: those that fold the log.
        state: the totals so far; default: none, before the first event.
        is_complete: False if events before the first that is counted are missing in `state`.
        on_failed: called once if counting raises, which then ends. Default: it raises into the fold.
    """

    def __init__(
        self,
        projections: Projections,
        state: State | None = None,
        *,
        is_complete: bool = True,
        on_failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._tracker = projections.tracker
        self._jobs = projections.jobs
        self.state = State() if state is None else state
        self.figures = self.state.figures
        """The sums of what was counted."""
        self._is_complete = is_complete
        self._on_failed = on_failed
        counts: dict[type[e.Event], Callable[[Any, int, Subject], None]] = {
            **{event_class: self._count_by(add) for event_class, add in ADDS.items()},
            e.StepScheduled: self._step_scheduled,
            e.TransferReported: self._reported,
        }
        if on_failed is not None:
            counts = {event_class: self._safe(count) for event_class, count in counts.items()}
        projections.follow(counts)

    @classmethod
    def continued(cls, projections: Projections, stored: bytes) -> Totals:
        """Totals that go on from what `stored` returned; not complete if that is empty or this code cannot use it."""
        state = decoded(stored)
        return cls(projections, state, is_complete=state is not None)

    @property
    def complete_figures(self) -> Figures | None:
        """The same; None if events are missing in them."""
        return self.state.figures if self._is_complete else None

    def stored(self) -> bytes:
        """The totals as bytes for `continued`; empty if events are missing in them."""
        return encoded(self.state) if self._is_complete else b""

    def _count_by(self, add: Add) -> Callable[[Any, int, Subject], None]:
        def count(event: e.Event, _sequence: int, subject: Subject) -> None:
            request = subject.request
            add(self.state, event, About(request, None if request is None else request.answer, subject.copy))

        return count

    def _step_scheduled(self, event: e.StepScheduled, _sequence: int, _subject: Subject) -> None:
        for row in event.advanced:
            request = self._tracker.of(row[0])
            if request is not None:
                add_row(self.state, event, row, request)

    def _reported(self, event: e.TransferReported, _sequence: int, _subject: Subject) -> None:
        copy = next(filter(None, map(self._jobs.get, event.job_ids)), None)
        ADDS[e.TransferReported](self.state, event, About(copy=copy))

    def _safe(self, count: Callable[[Any, int, Subject], None]) -> Callable[[Any, int, Subject], None]:
        def counted(event: e.Event, sequence: int, subject: Subject) -> None:
            if not self._is_complete:
                return
            try:
                count(event, sequence, subject)
            except BaseException as error:  # noqa: BLE001 -- a wrong figure must cost no request anything
                raise_if_unstoppable(error)
                self._is_complete = False
                if self._on_failed is not None:
                    self._on_failed(error)

        return counted
