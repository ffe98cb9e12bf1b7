"""Lives: in which states a request may be, which life of an id an event is about, and when a life is over."""

from __future__ import annotations

from typing import Any

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.moment import Visits
from kvledger.lifecycle.reader.records import Copy, Life
from kvledger.lifecycle.states import BlocksRegion, RequestState

_OF_NO_REQUEST = (e.ChunksEvicted, e.ChunksTainted, e.InvariantViolated, e.ExtensionStopped)
_OF_A_JOB = (e.LoadCompleted, e.LoadFailed, e.SaveCompleted, e.SaveFailed, e.TransferAwaited)


class LegalTransition(Checker):
    """LEGAL_TRANSITION: every event is allowed in its request's state, and every decision names its cause.

    Verifies: for every request event, and for every request that a step schedules, the transition tables of `phase` and
    `blocks` have a row that begins at the request's state. A step schedules only requests that exist. The step's field
    `paused` names only steady requests. A request id arrives again only after its earlier life has finished. Every
    decision names the last observation before it as its cause.
    Does not verify: that kvledger's own state changes as the transition tables say (every audit compares it with
    reference state machines); observations about a request that is already quarantined; whether decisions about jobs of
    an earlier life of a request id are allowed (GEN_ISOLATION); that the transition tables are right.
    """

    rule = "LEGAL_TRANSITION"

    def visits(self) -> Visits:
        """Return the marked methods, and `_look` for every event of a request except arrivals."""
        events = [event for event in self.model.request_events if event is not e.RequestArrived]
        return [*super().visits(), *((event, self._look) for event in events)]

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived) -> None:
        if not self.moment.is_legal:
            self.broken(f"{event.id} happened to a request in state {self.moment.state_before}")

    @on(e.StepScheduled)
    def _step_scheduled(self, _event: e.StepScheduled) -> None:
        for ordinal in self.moment.unknown_rows:
            self.broken(f"the step names life {ordinal}, which does not exist, or pauses it although it is not steady")
        for life, state, blocks in self.moment.refused_rows:
            if not life.quarantined:
                self.broken(_detail("tokens.scheduled", state, blocks), request_id=life.request_id)

    def _look(self, event: e.RequestEvent) -> None:
        if event.is_decision:
            self._look_at_cause(event)
        if not self.moment.is_legal:
            self._explain(event)

    @on(*_OF_NO_REQUEST)
    def _look_at_cause(self, event: Any) -> None:  # noqa: ANN401 -- of any class
        if event.cause != self.moment.cause and self.moment.cause:
            detail = f"{event.id} names {event.cause} as its cause, but the last observation is {self.moment.cause}"
            self.broken(detail, self.moment.cause)

    def _explain(self, event: e.RequestEvent) -> None:
        life = self.moment.life
        if isinstance(event, _OF_A_JOB) and (life is None or life.ordinal != event.ordinal):
            return  # about a job of another life
        if life is None:
            self.broken(f"{event.id} happened to an unknown request")
        elif event.is_decision or not life.quarantined:
            self.broken(_detail(event.id, self.moment.state_before, self.moment.blocks_before))


def _detail(trigger: str, state: RequestState | None, blocks: BlocksRegion | None) -> str:
    return f"{trigger} happened to a request in state {state}, blocks {blocks}"


_OfAJob = e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed | e.TransferAwaited
_OfThePresent = (
    (e.LookupAnswered | e.LookupDeferred | e.LoadIssued | e.BlocksHeld)
    | (e.PrefillAdvanced | e.PrefillCompleted | e.RequestQuarantined)
)  # fmt: skip
_OfBlocks = e.SaveIssued | e.TailSaveIssued | e.SaveDeclined | e.ChunksEvicted


class GenIsolation(Checker):
    """GEN_ISOLATION: a decision about one generation of a request does not reach another generation.

    Verifies: a decision about a job in flight names the life (request, ordinal, generation) for which the job was
    issued. Other decisions name the present generation of the present life. While a request is preempted, decisions
    about its lost blocks (saves, declined saves, and evictions for these saves) name the generation before the
    preemption.
    Does not verify: releases of requests (RELEASE_ALL); decisions of extensions; that an event of another generation
    leaves the request's state unchanged (every audit compares it with reference state machines); that the bytes went to
    the blocks of the right generation.
    """

    rule = "GEN_ISOLATION"

    @on(_OfThePresent)
    def _of_the_present(self, event: _OfThePresent) -> None:
        life = self.moment.life
        if life is not None and (event.generation != life.generation or event.ordinal != life.ordinal):
            self._named_another(event, life)

    @on(e.SaveIssued, e.TailSaveIssued, e.SaveDeclined)
    def _of_blocks(self, event: _OfBlocks) -> None:
        """Check that the event names the generation of its blocks: the one before a preemption, or the present one."""
        if self.moment.life is not None:
            self._of_blocks_of(self.moment.life, event)

    @on(e.ChunksEvicted)
    def _evicted(self, event: e.ChunksEvicted) -> None:
        life = self.lives.get(event.request_id)
        if life is not None:
            self._of_blocks_of(life, event)
        else:
            self.broken(f"{event.id} names {_words(_life(event))}, but no request has this id", event.cause)

    def _of_blocks_of(self, life: Life, event: _OfBlocks) -> None:
        generation = life.generation - (life.state is RequestState.PREEMPTED)
        if event.ordinal != life.ordinal or event.generation != generation:
            self._named_another(event, life)

    def _named_another(self, event: _OfThePresent | _OfBlocks, life: Life) -> None:
        detail = f"{event.id} names {_words(_life(event))}, but the request is in {_words(life.name)}"
        self.broken(detail, event.cause)

    @on(e.TransferAwaited)
    def _awaited(self, event: e.TransferAwaited) -> None:
        self._of_job(event, self.copies.get(event.job_id))

    @on(e.LoadCompleted, e.LoadFailed, e.SaveCompleted, e.SaveFailed)
    def _settled(self, event: _OfAJob) -> None:
        self._of_job(event, self.copies.current)

    def _of_job(self, event: _OfAJob, job: Copy | None) -> None:
        if job is not None and _life(event) != job.life:
            issued = f"but the job was issued for {_words(job.life)}"
            detail = f"{event.id} for job {job.job_id} names {_words(_life(event))}, {issued}"
            self.broken(detail, job.sequence, event.cause)


def _life(event: e.RequestDecision | e.ChunksEvicted) -> tuple[str, int, int]:
    return event.request_id, event.ordinal, event.generation


def _words(life: tuple[str, int, int]) -> str:
    request_id, ordinal, generation = life
    return f"generation {generation} of life {ordinal} of {request_id!r}"


class FinishIsLast(Checker):
    """FINISH_IS_LAST: no job is issued for a finished request, except the save that the request's end causes.

    Verifies: after a request has finished, no load and no tail save is issued for it. The only save of chunks that is
    issued for it is the one that the request's end causes.
    Does not verify: what the engine does with the request after its end.
    """

    rule = "FINISH_IS_LAST"

    @on(e.LoadIssued, e.SaveIssued, e.TailSaveIssued)
    def _issued(self, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued) -> None:
        before = self.moment.state_before
        if before is not None and before is not RequestState.FINISHED:
            return
        finished_at = 0 if self.moment.life is None else self.moment.life.finished_at
        if isinstance(event, e.SaveIssued) and event.cause == finished_at:
            return
        detail = f"{event.id} begins job {event.job_id} after the request had finished"
        self.broken(detail, finished_at, event.cause)


class ReleaseAll(Checker):
    """RELEASE_ALL: a request is released if and only if it has finished and has no job in flight.

    Verifies: a release names the present life and generation of the request id, and no job of this life is in flight.
    When a request has finished and none of its jobs is in flight any more, it is released before the next step.
    Does not verify: that projections forget the request (the projections' own tests check that); what kvledger's
    adapter for vLLM, or the engine, keeps about the request.
    """

    rule = "RELEASE_ALL"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._finished: set[int] = set()
        """Ordinals of lives that have finished and are not released."""

    def begin(self) -> None:
        """Read from the audit's model which requests have finished and are not released."""
        self._finished.update(life.ordinal for life in self.lives if life.state is RequestState.FINISHED)

    @on(e.RequestFinished)
    def _request_finished(self, _event: e.RequestFinished) -> None:
        if self.moment.life is not None:
            self._finished.add(self.moment.life.ordinal)

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased) -> None:
        self._finished.discard(event.ordinal)
        finished_at = 0 if self.moment.life is None else self.moment.life.finished_at
        left = self.lives.get(event.request_id)
        if left is not None:
            detail = (
                f"generation {event.generation} of life {event.ordinal} is released, but {_words(left.name)} is not"
            )
        elif self.copies.owes(event.ordinal):
            jobs = [job.job_id for job in self.copies.of_life(event.ordinal)]
            detail = f"the request is released, but its jobs {jobs} are in flight"
        else:
            return
        self.broken(detail, finished_at, event.cause)

    @on(e.StepScheduled)
    def _step_scheduled(self, _event: e.StepScheduled) -> None:
        for ordinal in [ordinal for ordinal in self._finished if not self.copies.owes(ordinal)]:
            self._finished.discard(ordinal)
            life = self.lives.of(ordinal)
            if life is not None:
                detail = "the request has finished and has no copy in flight, but was not released before the next step"
                self.broken(detail, life.finished_at, request_id=life.request_id)
