"""CURSOR_LE_FRONTIER: the save cursor moves with what has settled, and with nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.jobs import JobsInFlight
from kvledger.lifecycle.audit.model.lives import Lives
from kvledger.lifecycle.audit.model.moment import Check, Moment
from kvledger.lifecycle.audit.model.start import Start
from kvledger.lifecycle.states import BlocksRegion

_AT_THE_BEGINNING = (0, 0)


class CursorLeFrontier:
    """Where a step says that chunks of a request have settled, it goes on exactly where the last such step ended.

    Verifies: the first chunk not dealt with, as each step tells it, against a cursor of the checker's own, which only
    settled chunks move and which a preemption, a failed load of the present generation, a rollback, a next turn and a
    reset take back; and that it is at most the settled tokens of that step.
    Does not verify: that the chunks between were saved (STORE_CONTIGUOUS).
    """

    rule: ClassVar[str] = "CURSOR_LE_FRONTIER"

    def __init__(self) -> None:
        self._chunk_size = 0
        self._jobs: JobsInFlight
        self._lives: Lives
        self._cursors: dict[str, tuple[int, int]] = {}
        """Request id -> (number of chunks dealt with, sequence of the step that told)."""

    def begin(self, start: Start) -> None:
        """Take over the cursors."""
        self._cursors.update((request_id, (num_chunks, 0)) for request_id, num_chunks in start.cursors.items())

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._chunk_size, self._jobs, self._lives = model.configuration.chunk_size, model.jobs, model.lives
        model.forgotten.at((*LIFE, e.RequestPreempted, e.RequestFinished), self._cursors)
        return [
            (e.StepScheduled, self._step_scheduled),
            (e.CacheReset, self._reset),
            (e.SessionContinued, self._cut),
            (e.TokensRolledBack, self._cut),
            (e.LoadFailed, self._restart),
        ]

    def _step_scheduled(self, event: e.StepScheduled, moment: Moment) -> list[Violation] | None:
        return self._check_step(event, moment) if event.settled else None

    def _reset(self, _event: e.CacheReset, _moment: Moment) -> None:
        self._cursors.clear()

    def _restart(self, event: e.LoadFailed, moment: Moment) -> None:
        if self._lives.in_generation(event) is not None:
            self._cursors.pop(event.request_id, None)

    def _cut(self, event: e.SessionContinued | e.TokensRolledBack, _moment: Moment) -> None:
        num_chunks, sequence = self._cursors.get(event.request_id, (0, 0))
        cut = event.num_computed_tokens // self._chunk_size
        if num_chunks > cut:
            self._cursors[event.request_id] = (cut, sequence)

    def _check_step(self, event: e.StepScheduled, moment: Moment) -> list[Violation] | None:
        found = None
        cursors, life_of, chunk_size = self._cursors, self._lives.of, self._chunk_size
        is_any_loading, told_at = bool(self._jobs.loads), moment.sequence
        for ordinal, first_chunk, num_settled_tokens in event.settled:
            life = life_of(ordinal)
            if life is None:
                continue
            request_id = life.request_id
            num_chunks, sequence = cursors.get(request_id, _AT_THE_BEGINNING)
            end_chunk = num_settled_tokens // chunk_size
            if first_chunk != num_chunks or first_chunk > end_chunk:
                detail = (
                    f"the cursor stands at chunk {first_chunk}, {num_chunks} chunks had been dealt with "
                    f"and {end_chunk} are settled"
                )
                broken = violation(self.rule, moment, detail, sequence, request_id=request_id)
                found = [*(found or ()), broken]
            # Until a load has arrived, what was computed on top of it may be wrong too.
            if not is_any_loading or life.blocks is not BlocksRegion.LOADING:
                cursors[request_id] = (end_chunk, told_at)
        return found
