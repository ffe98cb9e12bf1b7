"""CURSOR_LE_FRONTIER: the save cursor moves with what has settled, and with nothing else."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.moment import on
from kvledger.lifecycle.audit.model.start import Start
from kvledger.lifecycle.states import BlocksRegion

_AT_THE_BEGINNING = (0, 0)


class CursorLeFrontier(Checker):
    """Where a step says that chunks of a request have settled, it goes on exactly where the last such step ended.

    Verifies: the first chunk not dealt with, as each step tells it, against a cursor of the checker's own, which only
    settled chunks move and which a preemption, a failed load of the present generation, a rollback, a next turn and a
    reset take back; and that it is at most the settled tokens of that step.
    Does not verify: that the chunks between were saved (STORE_CONTIGUOUS).
    """

    rule = "CURSOR_LE_FRONTIER"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._cursors: dict[str, tuple[int, int]] = {}
        """Request id -> (number of chunks dealt with, sequence of the step that says so)."""
        self._chunk_size = model.configuration.chunk_size
        model.forgotten.at((*LIFE, e.RequestPreempted, e.RequestFinished), self._cursors)

    def begin(self, start: Start) -> None:
        """Take over the cursors."""
        self._cursors.update((request_id, (num_chunks, 0)) for request_id, num_chunks in start.cursors.items())

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        if event.settled:
            self._check_step(event)

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        self._cursors.clear()

    @on(e.LoadFailed)
    def _restart(self, event: e.LoadFailed) -> None:
        if self.lives.in_generation(event) is not None:
            self._cursors.pop(event.request_id, None)

    @on(e.SessionContinued, e.TokensRolledBack)
    def _cut(self, event: e.SessionContinued | e.TokensRolledBack) -> None:
        num_chunks, sequence = self._cursors.get(event.request_id, (0, 0))
        cut = event.num_computed_tokens // self._chunk_size
        if num_chunks > cut:
            self._cursors[event.request_id] = (cut, sequence)

    def _check_step(self, event: e.StepScheduled) -> None:
        cursors, life_of, chunk_size = self._cursors, self.lives.of, self._chunk_size
        is_any_loading, told_at = bool(self.jobs.loads), self.moment.sequence
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
                self.broken(detail, sequence, request_id=request_id)
            # Until a load has arrived, what was computed on top of it may be wrong too.
            if not is_any_loading or life.blocks is not BlocksRegion.LOADING:
                cursors[request_id] = (end_chunk, told_at)
