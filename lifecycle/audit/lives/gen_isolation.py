"""GEN_ISOLATION: what belongs to one generation of a request does not reach another."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model.jobs import InFlight
from kvledger.lifecycle.audit.model.lives import Life
from kvledger.lifecycle.audit.model.moment import on
from kvledger.lifecycle.states import RequestState

_OfAJob = e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed | e.TransferAwaited
_OfThePresent = (
    (e.LookupAnswered | e.LookupDeferred | e.LoadIssued | e.BlocksHeld)
    | (e.PrefillAdvanced | e.PrefillCompleted | e.RequestQuarantined)
)  # fmt: skip
_OfBlocks = e.SaveIssued | e.TailSaveIssued | e.SaveDeclined | e.ChunkEvicted
_PREEMPTED = RequestState.PREEMPTED


class GenIsolation(Checker):
    """Jobs are known by their id, and what is decided names the life that it concerns.

    Verifies: what is decided about a job names the life (request, ordinal, generation) it was issued for; every other
    decision the present one; a save of what a preemption took, what it declines and whom it evicts, the one before.
    Does not verify: that an event of another generation leaves the request in its state, which the reference machines
    show that every audit walks along; that the bytes went to the right generation's blocks.
    """

    rule = "GEN_ISOLATION"

    @on(_OfThePresent)
    def _of_the_present(self, event: _OfThePresent) -> None:
        life = self.moment.life
        if life is not None and (event.generation != life.generation or event.ordinal != life.ordinal):
            self._named_another(event, life)

    @on(e.SaveIssued, e.TailSaveIssued, e.SaveDeclined)
    def _of_blocks(self, event: _OfBlocks) -> None:
        """What is about blocks concerns those that a preemption has just taken, or those that the request has."""
        if self.moment.life is not None:
            self._of_blocks_of(self.moment.life, event)

    @on(e.ChunkEvicted)
    def _evicted(self, event: e.ChunkEvicted) -> None:
        life = self.lives.get(event.request_id)
        if life is not None:
            self._of_blocks_of(life, event)
        else:
            self.broken(f"{event.id} names {_words(_life(event))}, but no request has this id", event.cause)

    def _of_blocks_of(self, life: Life, event: _OfBlocks) -> None:
        if event.ordinal != life.ordinal or event.generation != life.generation - (life.state is _PREEMPTED):
            self._named_another(event, life)

    def _named_another(self, event: _OfThePresent | _OfBlocks, life: Life) -> None:
        detail = f"{event.id} names {_words(_life(event))}, the request is in {_words(life.name)}"
        self.broken(detail, event.cause)

    @on(e.TransferAwaited)
    def _awaited(self, event: e.TransferAwaited) -> None:
        self._of_job(event, self.jobs.get(event.job_id))

    @on(e.LoadCompleted, e.LoadFailed, e.SaveCompleted, e.SaveFailed)
    def _settled(self, event: _OfAJob) -> None:
        self._of_job(event, self.jobs.current)

    def _of_job(self, event: _OfAJob, job: InFlight | None) -> None:
        if job is not None and _life(event) != job.life:
            issued = f"the job was issued for {_words(job.life)}"
            detail = f"{event.id} for job {job.job_id} names {_words(_life(event))}, {issued}"
            self.broken(detail, job.sequence, event.cause)


def _life(event: e.RequestDecision | e.ChunkEvicted) -> tuple[str, int, int]:
    return event.request_id, event.ordinal, event.generation


def _words(life: tuple[str, int, int]) -> str:
    request_id, ordinal, generation = life
    return f"generation {generation} of life {ordinal} of {request_id!r}"
