"""DELIVERED_ONCE: a job is handed out once, and each end that vLLM waits for is reported once, to nobody else."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import on
from kvledger.lifecycle.audit.model.start import Start


class DeliveredOnce(Checker):
    """What leaves the ledger is owed, and leaves once.

    Verifies: jobs that are handed out are in flight and were not handed out before; reminders were decided; a load that
    is reported as in place or failed was asynchronous, claimed, and settled so; one reported as sent ended while
    a copy read its blocks, and none does any more; blocks are reported that a refused or withheld load was to fill.
    Does not verify: that all that is owed is handed over (the engine would wait); what was owed where an audit begins
    in the middle of a log.
    """

    rule = "DELIVERED_ONCE"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._first_ordinal = 0
        """Of the lives that are known from their beginning."""
        self._first_job = 0
        self._handed_out: set[int] = set()
        self._reminders: set[int] = set()
        self._promised: set[int] = set()
        self._waiting: dict[int, str] = {}
        """Life that waits for the end of a load -> "", "received" or "failed"."""
        self._kept: set[int] = set()
        """Ended lives whose blocks vLLM keeps for a copy."""
        self._loads: dict[int, tuple[int, ...]] = {}
        """Loads within a step that were not handed out -> their blocks."""
        self._unfilled: set[int] = set()

    def begin(self, start: Start) -> None:
        """Nothing is known of what was handed over before."""
        self._first_ordinal = start.num_arrived
        self._first_job = 1 + start.last_job_id

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        (self._promised.add if event.is_async else self._promised.discard)(event.ordinal)

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        if self.moment.life is not None and self.moment.life.ordinal in self._promised:
            self._promised.discard(self.moment.life.ordinal)
            if event.num_external_tokens:
                self._waiting[self.moment.life.ordinal] = ""

    @on(e.LoadRefused)
    def _refused(self, event: e.LoadRefused) -> None:
        life = self.lives.get(event.request_id)
        ordinal = e.NO_LIFE if life is None else life.ordinal
        if ordinal in self._promised or ordinal in self._waiting:
            self._promised.discard(ordinal)
            self._waiting[ordinal] = "failed"
        else:
            self._unfilled.update(event.block_ids)

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        if not event.is_async:
            self._loads[event.job_id] = event.block_ids

    @on(e.TransferAwaited)
    def _awaited(self, event: e.TransferAwaited) -> None:
        self._reminders.add(event.job_id)

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported) -> None:
        blocks = self._loads.pop(event.job_id, ())
        if event.withheld and event.withheld != e.Withheld.CONTRACT:
            self._unfilled.update(blocks)
        job = self.jobs.current
        if job is not None and job.is_load and self.jobs.every_rank <= job.ranks_done | job.ranks_failed:
            self._ended(job.ordinal, "failed" if job.ranks_failed else "received")

    @on(e.LoadCompleted)
    def _load_completed(self, event: e.LoadCompleted) -> None:
        self._settled(event)
        self._ended(event.ordinal, "received")

    @on(e.LoadFailed)
    def _load_failed(self, event: e.LoadFailed) -> None:
        self._unfilled.update(self._loads.pop(event.job_id, ()))
        self._settled(event)
        self._ended(event.ordinal, "failed")

    def _ended(self, ordinal: int, end: str) -> None:
        if not self._waiting.get(ordinal, end):
            self._waiting[ordinal] = end

    @on(e.SaveCompleted, e.SaveFailed)
    def _settled(self, event: e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed) -> None:
        self._handed_out.discard(event.job_id)
        self._reminders.discard(event.job_id)

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished) -> None:
        life = self.moment.life
        if life is not None and self.jobs.reads_blocks_of(life.ordinal):
            self._kept.add(life.ordinal)

    @on(e.BlocksHeld)
    def _held(self, event: e.BlocksHeld) -> None:
        self._kept.add(event.ordinal)

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased) -> None:
        self._promised.discard(event.ordinal)

    def _is_read(self, ordinal: int) -> bool:
        return any(
            job.is_async and not job.is_load and not self.jobs.every_rank <= job.ranks_done | job.ranks_failed
            for job in self.jobs.of_life(ordinal)
        )

    @on(e.EffectsDelivered)
    def _jobs_handed_out(self, event: e.EffectsDelivered) -> None:
        for job_id in event.job_ids:
            if job_id in self._handed_out:
                self.broken(f"job {job_id} is handed out a second time")
            elif self.jobs.get(job_id) is None:
                self.broken(f"job {job_id} is handed out, but no such job is in flight")
            self._handed_out.add(job_id)
            self._loads.pop(job_id, None)
        for job_id in event.awaited:
            if job_id not in self._reminders and job_id >= self._first_job:
                self.broken(f"workers are reminded of job {job_id}, which nobody decided")
            self._reminders.discard(job_id)

    @on(e.EffectsDelivered)
    def _loads_reported(self, event: e.EffectsDelivered) -> None:
        for end_reported, ordinals in (("received", event.received), ("failed", event.failed)):
            for ordinal in ordinals:
                end = self._waiting.pop(ordinal, None)
                if ordinal >= self._first_ordinal and end != end_reported:
                    came_to = "waits for no load" if end is None else f"waits for a load that came to {end or 'no end'}"
                    self.broken(f"life {ordinal} is reported as {end_reported}, but it {came_to}")

    @on(e.EffectsDelivered)
    def _frees_reported(self, event: e.EffectsDelivered) -> None:
        for ordinal in event.sent:
            if self._is_read(ordinal):
                self.broken(f"life {ordinal} is reported as sent, but a copy still reads its blocks")
            elif ordinal not in self._kept and ordinal >= self._first_ordinal:
                self.broken(f"life {ordinal} is reported as sent, but its blocks are not kept for a copy")
            self._kept.discard(ordinal)

    @on(e.EffectsDelivered)
    def _blocks_reported(self, event: e.EffectsDelivered) -> None:
        unknown = sorted(set(event.block_ids) - self._unfilled)
        if unknown and not self._first_job:
            self.broken(f"blocks {unknown} are reported as not filled, but no load was to")
        self._unfilled.difference_update(event.block_ids)
