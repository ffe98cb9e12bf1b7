"""Copies in flight: the lives and chunks to which they belong, and whether their contents are right.

`owed.py` keeps the copies, their progress, and the pending deliveries. A report or a settlement concerns one copy, even
if the copy's life has changed since. A quarantine, or blocks that could not be filled, concern all copies of a life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.geometry import Geometry, keys_at
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections.base import Projection, Subject
from kvledger.lifecycle.projections.copies import Copy, CopyKind
from kvledger.lifecycle.projections.owed import Owed
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.ranges import Count, Sequence
from kvledger.lifecycle.states import SourceRegion, WorkRegion

IN_FLIGHT = (WorkRegion.ISSUED, WorkRegion.OVERDUE)


class State(msgspec.Struct, forbid_unknown_fields=True):
    """The part of the state that does not belong to one copy."""

    next_job_id: Sequence = 1
    epoch: Count = 0


class Jobs(Projection):
    """The copies that are not settled, by job id and by life."""

    def __init__(self, owed: Owed, tracker: RequestTracker, geometry: Geometry) -> None:
        self._owed = owed
        self._tracker = tracker
        self._geometry = geometry
        self.all_ranks = owed.all_ranks
        self.state = State()
        self.index()

    def index(self) -> None:
        """Recompute everything derived from the copies."""
        copies = self._owed.state.copies.values()
        self._in_flight = {copy.job_id: copy for copy in copies if copy.work in IN_FLIGHT}
        self.given_up = {copy.job_id: copy for copy in copies if copy.work is WorkRegion.GIVEN_UP}
        """Job id → save given up without a report. Until every rank reports, its slots may still be written."""
        # Called several times per event, so `get` is the dict's own method.
        self.get: Callable[[int], Copy | None] = self._in_flight.get
        """Returns the copy, or None once it is settled or given up."""
        self._of_ordinal: dict[int, set[int]] = {}
        self.async_loads: dict[int, Copy] = {}
        """Job id → asynchronous load in flight."""
        for copy in self._in_flight.values():
            self._enter(copy)

    @property
    def next_job_id(self) -> int:
        """Id of the next job."""
        return self.state.next_job_id

    @property
    def epoch(self) -> int:
        """Number of cache resets."""
        return self.state.epoch

    @property
    def late_ends(self) -> list[Copy]:
        """Saves that had been given up. The current report completes them: every rank has now reported."""
        return self._owed.late_ends

    def __len__(self) -> int:
        return len(self._in_flight)

    def __iter__(self) -> Iterator[Copy]:
        return iter(self._in_flight.values())

    def is_reported(self, copy: Copy) -> bool:
        """Whether every rank has reported the copy."""
        return len(copy.ranks_done) + len(copy.ranks_failed) == len(self.all_ranks)

    def overdue(self, overdue_step: int, overdue_ns: int) -> list[Copy]:
        """Return the copies in flight that were issued, or last asked about, before this step and before this time."""
        overdue = []
        for copy in self._in_flight.values():
            if copy.asked_step < overdue_step and copy.asked_ns < overdue_ns:
                overdue.append(copy)
            elif copy.work is WorkRegion.ISSUED and copy.source is SourceRegion.OWNED:
                break  # the copies after it were issued later
        return overdue

    def of_life(self, ordinal: int) -> list[Copy]:
        """Return the copies in flight of this life, in order of issue."""
        return [self._in_flight[job_id] for job_id in sorted(self._of_ordinal.get(ordinal, ()))]

    def reads_blocks_of(self, ordinal: int) -> list[Copy]:
        """Return the life's asynchronous saves in flight, if the life has not lost the blocks that they read."""
        if ordinal not in self._of_ordinal:
            return []
        return [
            copy
            for copy in self.of_life(ordinal)
            if copy.kind is CopyKind.SAVE and copy.is_async and copy.source is SourceRegion.OWNED
        ]

    def saving(self, key: bytes) -> Copy | None:
        """Return the save in flight that will commit the chunk, or None."""
        saves = (copy for copy in self if copy.kind is CopyKind.SAVE and self.is_current(copy))
        return next((copy for copy in saves if key in copy.keys), None)

    def is_current(self, copy: Copy) -> bool:
        """Whether the copy was issued after the last cache reset, if there was one."""
        return copy.epoch == self.state.epoch

    def owes(self, ordinal: int) -> bool:
        """Whether a copy of this life is in flight."""
        return ordinal in self._of_ordinal

    def is_loading_async(self, ordinal: int, generation: int) -> bool:
        """Whether an asynchronous load of this generation is in flight. If so, no step schedules the request."""
        return any(
            copy.kind is CopyKind.LOAD and copy.is_async and copy.generation == generation
            for copy in self.of_life(ordinal)
        )

    def relies_on_load(self, save: Copy) -> bool:
        """Whether the tokens of the save were computed on top of a load that is not settled."""
        if self._of_ordinal.get(save.ordinal) == {save.job_id}:  # most saves
            return False
        return any(
            copy.kind is CopyKind.LOAD and copy.job_id < save.job_id and copy.generation == save.generation
            for copy in self.of_life(save.ordinal)
        )

    # --- folds ---------------------------------------------------------------------------------

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued, _sequence: int, subject: Subject) -> None:
        num_known = 0 if subject.request is None else len(subject.request.keys)
        chunks = self._geometry.chunks_of_load(event.first_token, event.num_tokens, num_known)
        self._begin(event.job_id, subject.request, tuple(chunks))

    @on(e.SaveIssued)
    def _save_issued(self, event: e.SaveIssued, _sequence: int, subject: Subject) -> None:
        self._begin(event.job_id, subject.request, event.chunks)

    @on(e.TailSaveIssued)
    def _tail_save_issued(self, event: e.TailSaveIssued, _sequence: int, subject: Subject) -> None:
        self._begin(event.job_id, subject.request, ())

    def _begin(self, job_id: int, record: RequestRecord | None, chunks: tuple[int, ...]) -> None:
        earlier = self._in_flight.get(job_id)
        if earlier is not None:  # a log may use a job id twice
            self._leave(earlier)
        copy = self._in_flight[job_id] = self._owed.state.copies[job_id]
        copy.epoch, copy.asked_step, copy.asked_ns = self.state.epoch, self._tracker.num_steps, self._tracker.time_ns
        copy.chunks = chunks
        if record is not None and chunks:
            copy.keys = keys_at(chunks, record.keys)
            if self._geometry.chunks_share_blocks:
                earlier_chunks = self._geometry.earlier_chunks(chunks, len(record.keys))
                copy.earlier_keys = tuple((chunk, record.keys[chunk]) for chunk in earlier_chunks)
        self._enter(copy)
        if job_id >= self.state.next_job_id:
            self.state.next_job_id = job_id + 1

    @on(e.TransferAwaited)
    def _awaited(self, event: e.TransferAwaited, _sequence: int, _subject: Subject) -> None:
        copy = self._in_flight.get(event.job_id)
        if copy is not None:
            copy.asked_step, copy.asked_ns = self._tracker.num_steps, self._tracker.time_ns

    @on(e.TransferReported)
    def _reported(self, _event: e.TransferReported, _sequence: int, _subject: Subject) -> None:
        for copy in self._owed.late_ends:
            self.given_up.pop(copy.job_id, None)

    @on(e.LoadCompleted, e.SaveCompleted, e.SaveFailed)
    def _settled(
        self, event: e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed, _sequence: int, _subject: Subject
    ) -> None:
        copy = self._in_flight.pop(event.job_id, None)
        if copy is None:
            return
        if copy.work is WorkRegion.GIVEN_UP:
            self.given_up[copy.job_id] = copy
        self._leave(copy)

    def _enter(self, copy: Copy) -> None:
        siblings = self._of_ordinal.get(copy.ordinal)
        if siblings is None:
            self._of_ordinal[copy.ordinal] = {copy.job_id}
        else:
            siblings.add(copy.job_id)
        if copy.kind is CopyKind.LOAD and copy.is_async:
            self.async_loads[copy.job_id] = copy

    def _leave(self, copy: Copy) -> None:
        siblings = self._of_ordinal.get(copy.ordinal)
        if siblings is not None:
            siblings.discard(copy.job_id)
            if not siblings:
                del self._of_ordinal[copy.ordinal]
        self.async_loads.pop(copy.job_id, None)

    @on(e.LoadFailed)
    def _load_failed(self, event: e.LoadFailed, sequence: int, subject: Subject) -> None:
        for copy in self.of_life(event.ordinal):  # saves of tokens on top of the load, even if the request has ended
            if copy.kind is CopyKind.SAVE and copy.generation == event.generation and copy.job_id > event.job_id:
                copy.is_doubtful = True
        self._settled(event, sequence, subject)
        self._load_errors_observed(event, sequence, subject)

    @on(e.LoadErrorsObserved)
    def _load_errors_observed(
        self, _event: e.LoadErrorsObserved | e.LoadFailed, _sequence: int, _subject: Subject
    ) -> None:
        # A load may fail in the step that saves its tokens, or tokens computed on top of them, and its request may
        # have ended since. All other saves of that life are as doubtful.
        unfilled = self._tracker.unfilled
        if unfilled.blocks:
            for ordinal in {copy.ordinal for copy in self if unfilled.spoil(copy.block_ids)}:
                self._doubt_saves(ordinal)

    @on(e.RequestQuarantined)
    def _quarantined(self, event: e.RequestQuarantined, _sequence: int, _subject: Subject) -> None:
        self._doubt_saves(event.ordinal)

    def _doubt_saves(self, ordinal: int) -> None:
        for copy in self.of_life(ordinal):
            copy.is_doubtful = copy.kind is CopyKind.SAVE

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset, _sequence: int, _subject: Subject) -> None:
        self.state.epoch += 1
