"""Jobs in flight: which pages move where, for whom, and which ranks have reported.

A job is known by its id, never by its request: a request may be preempted, finished or its id used again
while bytes still move. It must not know what a completed job means for chunks; see `chunk_index.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT, trigger_of
from kvledger.lifecycle.geometry import Geometry
from kvledger.lifecycle.machine import Tables
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections.base import Projection, Subject
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.ranges import (
    BlockId,
    ChunkNumber,
    Count,
    Generation,
    Int64,
    JobId,
    Ordinal,
    Sequence,
    Slot,
    TimeNs,
)
from kvledger.lifecycle.states import SourceRegion, WorkRegion


class JobKind(enum.StrEnum):
    """The direction of the bytes."""

    LOAD = "load"
    SAVE = "save"


class Job(msgspec.Struct, gc=False):
    """One load or save that has not been settled."""

    job_id: JobId
    kind: JobKind
    request_id: str
    ordinal: Ordinal
    generation: Generation
    chunks: tuple[ChunkNumber, ...]
    keys: tuple[bytes, ...]
    earlier_keys: tuple[tuple[ChunkNumber, bytes], ...]
    """(chunk, key) of chunks that end earlier inside the blocks of a save: its images contain them too."""
    slots: tuple[Slot, ...]
    block_ids: tuple[BlockId, ...]
    epoch: Count
    is_async: bool
    asked_step: Count
    """When it was issued, or asked after."""
    asked_ns: TimeNs
    work: WorkRegion = WorkRegion.ISSUED
    """How far it is. This and the next move as `table.py` says."""
    source: SourceRegion = SourceRegion.OWNED
    ranks_done: tuple[Int64, ...] = ()
    """Ascending, as all ranks here."""
    ranks_failed: tuple[Int64, ...] = ()
    repeated_ranks: tuple[Int64, ...] = ()
    """Ranks in the last report that had reported before, without being asked."""
    error: str = ""
    is_doubtful: bool = False
    """A save whose source blocks turned out not to hold what they should; its chunks are not offered."""

    @property
    def life(self) -> tuple[str, int, int]:
        """What a decision about it begins with: request id, ordinal, generation."""
        return self.request_id, self.ordinal, self.generation


class State(msgspec.Struct, forbid_unknown_fields=True):
    """By job id."""

    jobs: dict[JobId, Job] = {}
    given_up: dict[JobId, Job] = {}
    next_job_id: Sequence = 1
    epoch: Count = 0


class Transfers(Projection):
    """Job id -> job, as long as a rank owes a report.

    Reports and settlements concern a job, whatever has become of its life. A quarantine and blocks that could not be
    filled concern all jobs of a life.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        geometry: Geometry,
        tables: Tables,
        num_ranks: int = 1,
    ) -> None:
        self._tables = tables
        self._every_rank = range(num_ranks)
        self.all_ranks = tuple(self._every_rank)
        self._tracker = tracker
        self._geometry = geometry
        self.state = State()
        self.index()

    def check(self) -> None:
        """Jobs name the number that they are found by."""
        jobs = (*self.state.jobs.items(), *self.state.given_up.items())
        if any(job.job_id != job_id for job_id, job in jobs):
            raise ValueError("a job has another number than the one that it is kept for")

    def index(self) -> None:
        """Make anew what follows from the state."""
        # Asked several times for every event: the dicts' own methods.
        self.get: Callable[[int], Job | None] = self.state.jobs.get
        """The job, or None once it is settled."""
        self.given_up: Callable[[int], Job | None] = self.state.given_up.get
        """A save that was given up without a report: until every rank reports, it may still write its slots."""
        self.reported: list[tuple[int, Job | None]] = []
        """What the report at hand speaks of: job id, and the job in flight, or given up with ranks that owe their word.
        """
        self._of_ordinal: dict[int, set[int]] = {}
        self.async_loads: dict[int, Job] = {}
        """Job id -> load in flight outside of the steps."""
        self._loading: dict[int, int] = {}
        """Slot -> loads in flight that read it."""
        for job in self.state.jobs.values():
            self._of_ordinal.setdefault(job.ordinal, set()).add(job.job_id)
            if job.kind is JobKind.LOAD:
                self._read(job.slots)
                if job.is_async:
                    self.async_loads[job.job_id] = job

    @property
    def next_job_id(self) -> int:
        """The number of the next job."""
        return self.state.next_job_id

    @property
    def epoch(self) -> int:
        """How often everything cached was reset."""
        return self.state.epoch

    def __len__(self) -> int:
        return len(self.state.jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self.state.jobs.values())

    def is_reported(self, job: Job, event: e.TransferReported | None = None) -> bool:
        """Whether every rank has reported, counting `event` on top."""
        if job.ranks_done == self.all_ranks:
            return True
        ranks = {*job.ranks_done, *job.ranks_failed}
        if event is not None:
            ranks.update(event.ranks_done, event.ranks_failed)
        return ranks.issuperset(self.all_ranks)

    def overdue(self, overdue_step: int, overdue_ns: int) -> list[Job]:
        """Jobs that were issued, or asked after, before both."""
        overdue = []
        for job in self.state.jobs.values():
            if job.asked_step < overdue_step and job.asked_ns < overdue_ns:
                overdue.append(job)
            elif job.work is WorkRegion.ISSUED and job.source is SourceRegion.OWNED:
                break  # those behind it were issued later
        return overdue

    def of_life(self, ordinal: int) -> list[Job]:
        """The jobs in flight of that life of a request, in the order in which they were issued."""
        return [self.state.jobs[job_id] for job_id in sorted(self._of_ordinal.get(ordinal, ()))]

    def reads_blocks_of(self, ordinal: int) -> list[Job]:
        """Saves in flight out of blocks that this life of a request still has."""
        if ordinal not in self._of_ordinal:
            return []
        return [
            job
            for job in self.of_life(ordinal)
            if job.kind is JobKind.SAVE and job.is_async and job.source is SourceRegion.OWNED
        ]

    def saving(self, key: bytes) -> Job | None:
        """The save in flight that will commit the chunk, or None."""
        saves = (job for job in self.state.jobs.values() if job.kind is JobKind.SAVE and self.is_current(job))
        return next((job for job in saves if key in job.keys), None)

    def is_current(self, job: Job) -> bool:
        """Whether no reset has come since it was issued."""
        return job.epoch == self.epoch

    def owes(self, ordinal: int) -> bool:
        """Whether a job of that life of a request is in flight."""
        return ordinal in self._of_ordinal

    def is_loading_async(self, ordinal: int, generation: int) -> bool:
        """Whether a load of this generation of that life is asynchronous: then the request is in none."""
        return any(
            job.kind is JobKind.LOAD and job.is_async and job.generation == generation for job in self.of_life(ordinal)
        )

    def relies_on_load(self, save: Job) -> bool:
        """Whether what was saved was computed on top of a load that has not been settled."""
        if self._of_ordinal.get(save.ordinal) == {save.job_id}:  # as with most saves
            return False
        return any(
            job.kind is JobKind.LOAD and job.job_id < save.job_id and job.generation == save.generation
            for job in self.of_life(save.ordinal)
        )

    def is_any_read(self, slots: Iterable[int]) -> bool:
        """Whether a load in flight reads one of the slots."""
        return bool(self._loading) and not self._loading.keys().isdisjoint(slots)

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued, _sequence: int, subject: Subject) -> None:
        num_known = 0 if subject.request is None else len(subject.request.keys)
        chunks = self._geometry.chunks_of_load(event.first_token, event.num_tokens, num_known)
        self._read(event.slots)
        self._start(event, subject.request, JobKind.LOAD, tuple(chunks), event.is_async)
        if event.is_async:
            self.async_loads[event.job_id] = self.state.jobs[event.job_id]

    @on(e.SaveIssued)
    def _save_issued(self, event: e.SaveIssued, _sequence: int, subject: Subject) -> None:
        self._start(event, subject.request, JobKind.SAVE, event.chunks, event.is_async)

    @on(e.TailSaveIssued)
    def _tail_save_issued(self, event: e.TailSaveIssued, _sequence: int, subject: Subject) -> None:
        self._start(event, subject.request, JobKind.SAVE, (), False)  # noqa: FBT003 -- keywords cost, and every save comes by here

    def _start(
        self,
        event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued,
        record: RequestRecord | None,
        kind: JobKind,
        chunks: tuple[int, ...],
        is_async: bool,  # noqa: FBT001
    ) -> None:
        tracker, job_id, request_id, ordinal = self._tracker, event.job_id, event.request_id, event.ordinal
        keys = () if record is None else record.keys_of(chunks)
        earlier = self.state.jobs.get(job_id)
        if earlier is not None:  # a log may use a number twice
            self._leave(earlier)
        self.state.jobs[job_id] = Job(
            job_id,
            kind,
            request_id,
            ordinal,
            event.generation,
            chunks,
            keys,
            self._earlier_keys(record, chunks) if self._geometry.chunks_share_blocks and record is not None else (),
            event.slots,
            event.block_ids,
            self.state.epoch,
            is_async,
            tracker.num_steps,
            tracker.time_ns,
        )
        siblings = self._of_ordinal.get(ordinal)
        if siblings is None:
            self._of_ordinal[ordinal] = {job_id}
        else:
            siblings.add(job_id)
        if job_id >= self.state.next_job_id:
            self.state.next_job_id = job_id + 1

    def _earlier_keys(self, record: RequestRecord, chunks: tuple[int, ...]) -> tuple[tuple[int, bytes], ...]:
        earlier = self._geometry.earlier_chunks(chunks, len(record.keys))
        return tuple((chunk, record.keys[chunk]) for chunk in earlier)

    @on(e.TransferAwaited)
    def _awaited(self, event: e.TransferAwaited, _sequence: int, _subject: Subject) -> None:
        job = self.state.jobs.get(event.job_id)
        if job is not None:
            job.asked_step, job.asked_ns = self._tracker.num_steps, self._tracker.time_ns
            self._move(job, trigger_of(event))

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported, _sequence: int, _subject: Subject) -> None:
        self.reported = [(job_id, self._report(job_id, event)) for job_id in dict.fromkeys(event.job_ids)]

    def _report(self, job_id: int, event: e.TransferReported) -> Job | None:
        job = self.state.jobs.get(job_id)
        if job is None:
            job = self.state.given_up.get(job_id)
            if job is not None and self.is_reported(job, event):
                self._move(job, "transfer.reported/whole")
                del self.state.given_up[job_id]
        if job is not None:
            # The first report of a rank counts; a later one about the same job changes nothing.
            if not job.ranks_done and not job.ranks_failed and event.ranks_done == self.all_ranks:
                job.ranks_done = self.all_ranks
            else:
                self._add_report(job, event)
            if event.error and not job.error:
                job.error = event.error
        return job

    def _add_report(self, job: Job, event: e.TransferReported) -> None:
        known = {*job.ranks_done, *job.ranks_failed}
        reported = {*event.ranks_done, *event.ranks_failed}
        job.repeated_ranks = () if event.is_repeated else tuple(sorted(known & reported))
        owing = {rank for rank in reported - known if rank in self._every_rank}
        done = owing.intersection(event.ranks_done)
        failed = owing.intersection(event.ranks_failed) - done
        job.ranks_done = tuple(sorted({*job.ranks_done, *done}))
        job.ranks_failed = tuple(sorted({*job.ranks_failed, *failed}))

    @on(e.LoadCompleted, e.SaveCompleted, e.SaveFailed)
    def _settled(
        self, event: e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed, _sequence: int, _subject: Subject
    ) -> None:
        job = self.state.jobs.pop(event.job_id, None)
        if job is None:
            return
        self._move(job, trigger_of(event))
        if job.work is WorkRegion.GIVEN_UP:
            self.state.given_up[job.job_id] = job
        self._leave(job)

    def _leave(self, job: Job) -> None:
        """Take a job out of what follows from the jobs in flight."""
        siblings = self._of_ordinal.get(job.ordinal)
        if siblings is not None:
            siblings.discard(job.job_id)
            if not siblings:
                del self._of_ordinal[job.ordinal]
        if job.kind is JobKind.LOAD:
            self._read_no_more(job.slots)
            self.async_loads.pop(job.job_id, None)

    def _move(self, job: Job, trigger: str) -> None:
        job.work = self._tables.work[trigger].get(job.work, job.work)
        source = self._tables.source.get(trigger)
        if source is not None:
            job.source = source[job.source]

    def _read(self, slots: tuple[int, ...]) -> None:
        loading = self._loading
        for slot in slots:
            if slot != NO_SLOT:
                loading[slot] = loading.get(slot, 0) + 1

    def _read_no_more(self, slots: tuple[int, ...]) -> None:
        loading = self._loading
        for slot in slots:
            left = loading.get(slot, 0) - 1
            if left > 0:
                loading[slot] = left
            else:
                loading.pop(slot, None)

    @on(e.LoadFailed)
    def _load_failed(self, event: e.LoadFailed, sequence: int, subject: Subject) -> None:
        for job in self.of_life(event.ordinal):  # on top of it, also where the request has ended long ago
            if job.kind is JobKind.SAVE and job.generation == event.generation and job.job_id > event.job_id:
                job.is_doubtful = True
        self._settled(event, sequence, subject)
        self._load_errors_observed(event, sequence, subject)

    @on(e.LoadErrorsObserved)
    def _load_errors_observed(
        self, _event: e.LoadErrorsObserved | e.LoadFailed, _sequence: int, _subject: Subject
    ) -> None:
        # A load may fail in the very step that saves what it should have brought, or what was computed on top of it.
        # Whoever did so may have ended since; whatever else it saved is as doubtful.
        for ordinal in {job.ordinal for job in self.state.jobs.values() if self._tracker.unfilled.spoil(job.block_ids)}:
            self._doubt_saves(ordinal)

    @on(e.RequestQuarantined)
    def _quarantined(self, event: e.RequestQuarantined, _sequence: int, _subject: Subject) -> None:
        self._doubt_saves(event.ordinal)

    def _doubt_saves(self, ordinal: int) -> None:
        for job_id in self._of_ordinal.get(ordinal, ()):
            self.state.jobs[job_id].is_doubtful = self.state.jobs[job_id].kind is JobKind.SAVE

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset, _sequence: int, _subject: Subject) -> None:
        self.state.epoch += 1
