"""What is owed outside: jobs to the workers; to vLLM one end of each asynchronous load and of each delayed free.

vLLM knows the ends by request id alone and asserts on a second one, so nothing else decides about them. They follow
from observations wherever possible: ranks are counted here, so that requests end their waiting also where nothing is
decided any more. Folds first, asks no other projection, admits no extension. It must not know what a job means for the
cache, nor how anything is handed over.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections.base import Projection
from kvledger.lifecycle.ranges import MAX_COUNT, BlockId, Int64, JobId, LifeOrdinal, Ordinal, Sequence

PageJob = e.LoadIssued | e.SaveIssued | e.TailSaveIssued
"""A copy of pages, which a worker carries out."""


class Channel(enum.StrEnum):
    """To whom something is owed."""

    WORKERS = "workers"
    VLLM = "vllm"


class Ready(NamedTuple):
    """What is owed now on one channel; lives are ordinals, with their request ids."""

    jobs: tuple[PageJob, ...] = ()
    """In the order in which they were issued."""
    late: tuple[PageJob, ...] = ()
    """Jobs of a step that went without them: to be reported as failed, never to be handed out."""
    awaited: tuple[e.TransferAwaited, ...] = ()
    block_ids: tuple[int, ...] = ()
    """Blocks that vLLM counts on and that nothing will fill."""
    failed: Mapping[int, str] = {}
    """Lives whose asynchronous load failed; each worker reports them to vLLM."""
    sent: Mapping[int, str] = {}
    """Ended lives whose blocks nobody reads any more; each worker reports them to vLLM."""
    received: Mapping[int, str] = {}
    """Lives whose asynchronous load is in place; the connector itself reports it to vLLM."""
    reported: tuple[int, ...] = ()
    """Lives whose end vLLM has by now from the workers."""

    def delivered(self) -> e.EffectsDelivered | None:
        """What is recorded when this is handed over; None where it is nothing."""
        if not any((self.jobs, self.awaited, self.block_ids, self.failed, self.sent, self.received, self.reported)):
            return None
        return e.EffectsDelivered(
            tuple([job.job_id for job in self.jobs]),
            tuple([awaited.job_id for awaited in self.awaited]),
            self.block_ids,
            tuple(self.failed),
            tuple(self.sent),
            tuple(self.received),
            self.reported,
        )


NOTHING = Ready()
NOT_ISSUED = 0
"""The load of a life whose answer was claimed."""
ENDED = -1
"""The load of a life whose end is known."""
_LoadOrEnd = Annotated[int, msgspec.Meta(ge=ENDED, le=MAX_COUNT)]


class InFlight(msgspec.Struct, gc=False):
    """An asynchronous job, until every rank has reported it."""

    request_id: str
    ordinal: Ordinal
    is_load: bool
    ranks: tuple[Int64, ...] = ()
    """Those that have reported."""
    has_failed: bool = False
    is_fenced: bool = False
    """Whether its blocks were taken, and a step waits for it."""


class State(msgspec.Struct, forbid_unknown_fields=True):
    """Lives are ordinals; where a dict has strings, they are request ids."""

    present: dict[str, LifeOrdinal] = {}
    """Request id -> its present life, until it ends."""
    jobs: dict[JobId, tuple[Sequence, PageJob]] = {}
    """Job id -> sequence and job that no worker has been given."""
    awaited: dict[JobId, tuple[Sequence, e.TransferAwaited]] = {}
    """Job id -> sequence and last reminder that no worker has been given."""
    in_flight: dict[JobId, InFlight] = {}
    promised: dict[Ordinal, None] = {}
    """Lives that were answered last with an asynchronous load."""
    receiving: dict[Ordinal, _LoadOrEnd] = {}
    """Lives that wait for the end of their load, or for vLLM to have it -> job, `NOT_ISSUED` or `ENDED`."""
    held: dict[Ordinal, str] = {}
    """Ended lives out of whose blocks a copy reads, which `request_finished` answers with True."""
    coming_back: dict[Ordinal, str] = {}
    """Ended lives whose blocks vLLM keeps until it has the end of a copy."""
    failed: dict[Ordinal, str] = {}
    sent: dict[Ordinal, str] = {}
    received: dict[Ordinal, str] = {}
    to_report: dict[Ordinal, str] = {}
    """Lives whose end the workers report to vLLM, which does not have it yet."""
    block_ids: list[BlockId] = []
    closed: Sequence = 0
    """Sequence: what was issued before belonged to a step that went without it."""


class Obligations(Projection):
    """Total over everything that may stand in a log; each end is owed once."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.state = State()

    # --- what is owed --------------------------------------------------------------------------

    def ready(self, channel: Channel) -> Ready:
        """What is owed; it is owed until its `EffectsDelivered` is folded."""
        state = self.state
        if channel is Channel.VLLM:
            return Ready(received=dict(state.received)) if state.received else NOTHING
        if not (state.jobs or state.awaited or state.block_ids or state.failed or state.sent):
            return NOTHING
        return Ready(
            jobs=tuple([job for sequence, job in state.jobs.values() if sequence > state.closed]),
            late=tuple([job for sequence, job in state.jobs.values() if sequence <= state.closed]),
            awaited=tuple([awaited for _, awaited in state.awaited.values()]),
            block_ids=tuple(state.block_ids),
            failed=dict(state.failed),
            sent=dict(state.sent),
        )

    def issued_since(self, sequence: int) -> list[PageJob]:
        """Jobs from that sequence number on which no worker has been given."""
        return [job for issued, job in self.state.jobs.values() if issued >= sequence]

    def lost_fences(self) -> list[int]:
        """Jobs that a step was to wait for and did not, as no worker had it; asked when the next step is observed."""
        state = self.state
        return [
            job_id
            for job_id, (sequence, awaited) in state.awaited.items()
            if awaited.before_forward and sequence <= state.closed
        ]

    def reported(self, request_ids: Iterable[str]) -> tuple[int, ...]:
        """The lives among those whose end the workers were to report."""
        to_report = self.state.to_report
        if not to_report:
            return ()
        known = set(request_ids)
        return tuple([ordinal for ordinal, request_id in to_report.items() if request_id in known])

    def early_receipt(self, request_id: str) -> int:
        """The life of that request whose load has not ended, or whose failure no worker was asked to report yet.

        `NO_LIFE` if there is none. An end of it that somebody reports now is not ours.
        """
        state = self.state
        if not state.receiving:
            return e.NO_LIFE
        lives = (self.present(request_id), *_lives_of(request_id, state.coming_back))
        waiting = (life for life in lives if life in state.receiving)
        return next((life for life in waiting if life not in state.received and life not in state.to_report), e.NO_LIFE)

    def early_release(self, request_id: str) -> int:
        """The ended life of that request whose blocks a copy uses, or whose end no worker was asked to report yet.

        `NO_LIFE` if there is none.
        """
        state = self.state
        lives = _lives_of(request_id, state.coming_back)
        return next((life for life in lives if life not in state.to_report), e.NO_LIFE)

    @property
    def is_owing(self) -> bool:
        """Whether something waits to be handed over."""
        state = self.state
        return bool(state.jobs or state.awaited or state.failed or state.sent or state.received)

    @property
    def is_waiting(self) -> bool:
        """Whether vLLM waits for an end, or will, when an asynchronous job in flight is reported."""
        state = self.state
        return bool(state.in_flight or state.receiving or state.coming_back)

    @property
    def is_freeing(self) -> bool:
        """Whether blocks of a request that has ended will be free when vLLM hears of the end of a copy."""
        return bool(self.state.coming_back)

    def present(self, request_id: str) -> int:
        """The life that the request is in; `NO_LIFE` where it is unknown or has ended."""
        return self.state.present.get(request_id, e.NO_LIFE)

    def is_named(self, request_id: str) -> bool:
        """Whether vLLM still gets an end of that request."""
        state = self.state
        named = (state.held, state.coming_back, state.failed, state.sent, state.received, state.to_report)
        return any(request_id in lives.values() for lives in named)

    def is_held(self, ordinal: int) -> bool:
        """Whether the blocks of that life, which ends now, are to be kept."""
        return ordinal in self.state.held or ordinal in self.state.sent

    # --- folds ---------------------------------------------------------------------------------

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived, _sequence: int) -> None:
        self.state.promised.pop(self.present(event.request_id), None)  # whom it displaces takes nothing up any more
        self.state.present[event.request_id] = event.ordinal

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered, _sequence: int) -> None:
        if event.is_async:
            self.state.promised[event.ordinal] = None
        else:
            self.state.promised.pop(event.ordinal, None)

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated, _sequence: int) -> None:
        ordinal, state = self.present(event.request_id), self.state
        if ordinal in state.promised:
            del state.promised[ordinal]
            if event.num_external_tokens:
                state.receiving.setdefault(ordinal, NOT_ISSUED)

    @on(e.LoadRefused)
    def _refused(self, event: e.LoadRefused, _sequence: int) -> None:
        ordinal, state = self.present(event.request_id), self.state
        if ordinal in state.promised:  # the allocation was not recorded
            del state.promised[ordinal]
            state.receiving.setdefault(ordinal, NOT_ISSUED)
        job_id = state.receiving.get(ordinal)
        if job_id is None:
            state.block_ids.extend(event.block_ids)
        elif job_id == NOT_ISSUED:  # else its job is recorded, and will come to an end
            state.receiving[ordinal] = ENDED
            state.failed[ordinal] = event.request_id

    @on(e.LoadIssued, e.SaveIssued, e.TailSaveIssued)
    def _issued(self, event: PageJob, sequence: int) -> None:
        self.state.jobs[event.job_id] = sequence, event
        if isinstance(event, e.TailSaveIssued) or not event.is_async:
            return
        is_load = isinstance(event, e.LoadIssued)
        self.state.in_flight[event.job_id] = InFlight(event.request_id, event.ordinal, is_load)
        if is_load and self.state.receiving.get(event.ordinal) == NOT_ISSUED:
            self.state.receiving[event.ordinal] = event.job_id

    @on(e.TransferAwaited)
    def _awaited(self, event: e.TransferAwaited, sequence: int) -> None:
        before = self.state.awaited.get(event.job_id)
        if before is None or not before[1].before_forward:
            self.state.awaited[event.job_id] = sequence, event
        job = self.state.in_flight.get(event.job_id)
        if job is not None:
            job.is_fenced |= event.before_forward

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported, _sequence: int) -> None:
        state = self.state
        for job_id in event.job_ids:
            if job_id in state.jobs:
                # What breaks vLLM's contract may name blocks of others; those that were promised are refused by name.
                self._never_given(job_id, is_counted_on=bool(event.withheld) and event.withheld != e.Withheld.CONTRACT)
            job = state.in_flight.get(job_id)
            if job is not None:
                self._count(job_id, job, event)

    def _count(self, job_id: int, job: InFlight, event: e.TransferReported) -> None:
        known, every_rank = set(job.ranks), range(self._num_ranks)
        failed = set(event.ranks_failed).difference(event.ranks_done, known)  # the first report of a rank counts
        job.has_failed |= any(rank in every_rank for rank in failed)
        known.update(rank for rank in (*event.ranks_done, *event.ranks_failed) if rank in every_rank)
        job.ranks = tuple(sorted(known))
        if len(known) == self._num_ranks:
            self._ended(job_id, job)

    @on(e.LoadFailed, e.SaveFailed)
    def _given_up(self, event: e.LoadFailed | e.SaveFailed, _sequence: int) -> None:
        state, job_id = self.state, event.job_id
        if job_id in state.jobs:
            self._never_given(job_id, is_counted_on=True)
        state.awaited.pop(job_id, None)
        job = state.in_flight.get(job_id)
        if job is not None:
            job.has_failed = True
            self._ended(job_id, job)

    def _never_given(self, job_id: int, *, is_counted_on: bool) -> None:
        _, job = self.state.jobs.pop(job_id)
        if is_counted_on and isinstance(job, e.LoadIssued) and not job.is_async:
            self.state.block_ids.extend(job.block_ids)

    def _ended(self, job_id: int, job: InFlight) -> None:
        state, ordinal = self.state, job.ordinal
        del state.in_flight[job_id]
        if job.is_load:
            if state.receiving.get(ordinal) == job_id:
                state.receiving[ordinal] = ENDED
                (state.failed if job.has_failed else state.received)[ordinal] = job.request_id
        elif ordinal in state.held and not self._saves(ordinal):
            state.sent[ordinal] = state.held.pop(ordinal)

    def _saves(self, ordinal: int) -> list[InFlight]:
        return [job for job in self.state.in_flight.values() if job.ordinal == ordinal and not job.is_load]

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished, _sequence: int) -> None:
        state = self.state
        ordinal = state.present.pop(event.request_id, e.NO_LIFE)
        state.promised.pop(ordinal, None)
        if ordinal in state.receiving:
            # VLLM keeps the blocks anyway until the load has ended, and hears of one end only.
            state.coming_back[ordinal] = event.request_id
        else:
            self._hold(ordinal, event.request_id)

    @on(e.BlocksHeld)
    def _held(self, event: e.BlocksHeld, _sequence: int) -> None:
        self._hold(event.ordinal, event.request_id)  # for a copy that its end has led to

    def _hold(self, ordinal: int, request_id: str) -> None:
        state = self.state
        is_read = bool(state.in_flight) and not all(job.is_fenced for job in self._saves(ordinal))
        if is_read and ordinal not in state.coming_back:
            state.held[ordinal] = state.coming_back[ordinal] = request_id

    @on(e.HookFailed)
    def _hook_failed(self, event: e.HookFailed, sequence: int) -> None:
        if event.hook == "build_connector_meta":
            self.state.closed = sequence

    @on(e.EffectsDelivered)
    def _delivered(self, event: e.EffectsDelivered, _sequence: int) -> None:
        state = self.state
        jobs = state.jobs
        for job_id in event.job_ids:
            jobs.pop(job_id, None)
        for job_id in event.awaited:
            state.awaited.pop(job_id, None)
        if event.block_ids:
            del state.block_ids[: len(event.block_ids)]
        for ends, owed in ((event.failed, state.failed), (event.sent, state.sent)):
            for ordinal in ends:
                request_id = owed.pop(ordinal, None)
                if request_id is not None:
                    state.to_report[ordinal] = request_id
        for ends, owed in ((event.reported, state.to_report), (event.received, state.received)):
            for ordinal in ends:
                for waiting in (owed, state.receiving, state.coming_back):
                    waiting.pop(ordinal, None)


def _lives_of(request_id: str, lives: Mapping[int, str]) -> tuple[int, ...]:
    return tuple([ordinal for ordinal, each in lives.items() if each == request_id])
