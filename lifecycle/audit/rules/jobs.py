"""Jobs: how copies are reported, settled and handed out."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.copies import Settled
from kvledger.lifecycle.reader.records import Copy


class CompletionOnce(Checker):
    """COMPLETION_ONCE: each rank reports a job once, and a job is settled once.

    Verifies: of jobs:

    - Each job id is issued once.
    - A report is about a job in flight, or about a save that was given up. It comes from ranks that exist and have not
      reported the job before. If the workers were asked to report a job again, the report may also be about a settled
      job, and may come from ranks that have reported it before. A load that was given up counts as settled, because its
      blocks may already belong to another request.
    - `load.completed` and `load.failed` settle a load in flight. `save.completed` and `save.failed` settle a save in
      flight.
    - No other connector of a `MultiConnector` reports an end that vLLM must not get (`end.refused`). While an
      asynchronous load of kvledger fills a block, none reports this block as not filled. kvledger's own workers never
      report blocks of asynchronous loads.

    Does not verify: whether a job was settled too early, and whether it completed or failed (RANK_AGREEMENT); jobs that
    are never settled (LIVENESS).
    """

    rule = "COMPLETION_ONCE"

    @on(e.EndRefused)
    def _end_refused(self, event: e.EndRefused) -> None:
        jobs = self.copies.of_life(event.ordinal)
        job = next((job for job in jobs if job.is_load is (event.field == "finished_recving")), None)
        why = "for which vLLM does not wait"
        if job is not None:
            why = f"while {'load' if job.is_load else 'save'} {job.job_id} is in flight"
        elif event.ordinal != e.NO_LIFE:
            why = "before kvledger asked its workers to report it"
        detail = f"another connector reports {event.field} of {event.request_id!r}, {why}"
        self.broken(detail, 0 if job is None else job.sequence)

    @on(e.LoadErrorsObserved)
    def _load_errors(self, event: e.LoadErrorsObserved) -> None:
        filled_by = self.copies.filled_by
        for job_id in sorted({filled_by[block] for block in event.block_ids if block in filled_by}):
            job = self.copies.get(job_id)
            if job is not None and job.is_async and not job.lost_at:
                blocks = sorted({*event.block_ids} & {*job.filled})
                detail = f"another connector reports blocks {blocks} as not filled while load {job_id} still fills them"
                self.broken(detail, job.sequence, request_id=job.request_id)

    @on(e.LoadIssued, e.SaveIssued, e.TailSaveIssued)
    def _issued(self, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued) -> None:
        if not self.copies.is_new:
            detail = f"job {event.job_id} is issued, but a new job id must be greater than {self.copies.last_id}"
            self.broken(detail, event.cause)

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported) -> None:
        ranks = [*event.ranks_done, *event.ranks_failed]
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        foreign = sorted(set(ranks) - self.copies.every_rank)
        for job_id, job, ranks_before in self.copies.reported:
            again = [] if event.is_repeated else sorted(ranks_before.intersection(ranks))
            if job is None:
                if not event.is_repeated:
                    self.broken(f"job {job_id} was reported, but no such job is in flight")
                continue
            if twice or again:
                detail = f"job {job.job_id} was reported more than once by ranks {again or twice}"
                self.broken(detail, job.sequence, request_id=job.request_id)
            if foreign:
                detail = (
                    f"job {job.job_id} was reported by ranks {foreign}, "
                    f"but there are only {len(self.copies.every_rank)} ranks"
                )
                self.broken(detail, job.sequence, request_id=job.request_id)

    @on(e.LoadCompleted, e.LoadFailed)
    def _load_settled(self, event: e.LoadCompleted | e.LoadFailed) -> None:
        self._check_settlement(event, is_load=True)

    @on(e.SaveCompleted, e.SaveFailed)
    def _save_settled(self, event: e.SaveCompleted | e.SaveFailed) -> None:
        self._check_settlement(event, is_load=False)

    def _check_settlement(self, event: Settled, *, is_load: bool) -> None:
        job = self.copies.current
        if job is None:
            self.broken(f"{event.id} for job {event.job_id}, which is not in flight", event.cause)
        elif job.is_load is not is_load:
            detail = f"{event.id} for job {event.job_id}, which is a {'load' if job.is_load else 'save'}"
            self.broken(detail, job.sequence, event.cause)


class RankAgreement(Checker):
    """RANK_AGREEMENT: a job is settled when every rank has reported it, and it fails if one rank failed.

    Verifies: a job completes only if every rank has reported it as done. If a report makes a load fail, every rank has
    reported the load. The slots of a failed save are free if and only if every rank has reported the save, because a
    rank without a report may still write into them. A report in which no rank failed contains no error.
    Does not verify: that every rank got the same jobs; loads that were given up because a rank did not report.
    """

    rule = "RANK_AGREEMENT"

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported) -> None:
        if event.error and not event.ranks_failed:
            self.broken(f"jobs {list(event.job_ids)} are reported as done, but with an error: {event.error}")

    @on(e.LoadCompleted, e.SaveCompleted)
    def _completed(self, event: e.LoadCompleted | e.SaveCompleted) -> None:
        job = self.copies.current
        if job is not None and job.ranks_done != self.copies.every_rank:
            self._disagreed(event, job)

    @on(e.LoadFailed)
    def _load_failed(self, event: e.LoadFailed) -> None:
        job = self.copies.current
        if job is not None and event.cause == self.copies.report_sequence and self._is_owing(job):
            self._disagreed(event, job)

    @on(e.SaveFailed)
    def _save_failed(self, event: e.SaveFailed) -> None:
        job = self.copies.current
        if job is not None and event.quiet is self._is_owing(job):
            self._disagreed(event, job)

    def _is_owing(self, job: Copy) -> bool:
        return bool(self.copies.every_rank - job.ranks_done - job.ranks_failed)

    def _disagreed(self, event: Settled, job: Copy) -> None:
        detail = (
            f"{event.id} for job {event.job_id}, but of {len(self.copies.every_rank)} ranks, "
            f"{len(job.ranks_done)} reported it as done and {len(job.ranks_failed)} as failed"
        )
        self.broken(detail, job.sequence, event.cause)


class Liveness(Checker):
    """LIVENESS: workers are asked about an overdue copy, and the copy fails if it stays unreported.

    A job is overdue if more than `max_silent_steps` steps and more than `max_silent_ms` milliseconds have passed since
    the job was issued. Both counts restart when a step has to wait for the job because the job's blocks were taken, and
    when the workers are asked about the job for the first time.

    Verifies: if a job is overdue at a step, then before the next step it is settled, or the workers are asked about it.
    If the workers had been asked about the job before, it is settled, for example because kvledger gives it up.
    Does not verify: jobs that were not overdue yet at the last recorded step. An engine that only waits records few
    steps. RECORDED reports that a job was given up.
    """

    rule = "LIVENESS"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._overdue: list[tuple[int, int]] = []
        """(job id, `Copy.since_step`) of each job that was overdue at the last step."""
        self._named: set[int] = set()
        """Jobs in flight for which a violation was reported, so that each is reported once."""
        self._max_silent_steps = model.configuration.max_silent_steps
        self._max_silent_ns = model.configuration.max_silent_ms * 1_000_000

    @on(e.StepScheduled)
    def _step_scheduled(self, _event: e.StepScheduled) -> None:
        for job_id, since_step in self._overdue:
            self._check_overdue(job_id, since_step)
        self._overdue = self._find_overdue()

    def _find_overdue(self) -> list[tuple[int, int]]:
        overdue_step = self.lives.num_steps - self._max_silent_steps
        overdue_ns = self.moment.time_ns - self._max_silent_ns
        self._named.intersection_update(job_id for job_id, _ in self.copies)
        return [
            (job_id, job.since_step)
            for job_id, job in self.copies
            if job.since_step < overdue_step and job.since_ns < overdue_ns and job_id not in self._named
        ]

    def _check_overdue(self, job_id: int, since_step: int) -> None:
        job = self.copies.get(job_id)
        if job is not None and job.since_step == since_step:
            self._named.add(job_id)
            what = (
                "it did not fail after workers were asked" if job.is_asked_after else "workers were not asked about it"
            )
            detail = f"job {job_id} has had no report since step {since_step}, but {what}"
            self.broken(detail, job.sequence, request_id=job.request_id)


class DeliveredOnce(Checker):
    """DELIVERED_ONCE: a job is handed out once, and each end for which vLLM waits is reported to vLLM once.

    Verifies: of everything that the connector hands out:

    - A job that is handed out is in flight and was not handed out before. Each reminder that is handed out was decided.
    - If a request is reported to vLLM as received or failed, it waited for an asynchronous load with this result.
    - A request is reported as sent only if it ended while a copy read its blocks, and if no copy reads them any more.
    - A block is reported as not filled only if its load was refused (`load.refused`) or not handed out.
    - If the log has `hooks.exchanged`, an end is reported before the second step after the end became due.
    - kvledger refuses no load that it has issued. This is not checked if a hook failed after the load was issued.

    Does not verify: that jobs and reminders are handed out at all (COPY_IN_TIME, LIVENESS); deliveries that became due
    before the audit's start, after kvledger declined to serve the model, or after the ledger became corrupt.
    """

    rule = "DELIVERED_ONCE"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._first_ordinal = 0
        """First ordinal of the lives that are known from their beginning."""
        self._first_job = 0
        self._handed_out: set[int] = set()
        self._reminders: set[int] = set()
        self._promised: set[int] = set()
        self._waiting: dict[int, str] = {}
        """Ordinal of a life that waits for the end of a load → "received" or "failed"; empty: the load is not over."""
        self._load_of: dict[int, int] = {}
        """Ordinal of a life in `_waiting` → job id of the load. Reports of the life's earlier loads do not count."""
        self._kept: set[int] = set()
        """Ordinals of ended lives whose blocks vLLM keeps for a copy."""
        self._loads: dict[int, tuple[int, ...]] = {}
        """Job id of a load within a step → its blocks, until the load is handed out or reported."""
        self._unfilled: set[int] = set()
        self._held: set[int] = set()
        """Ordinals of ended lives whose blocks kvledger asked vLLM to keep."""
        self._due: dict[int, tuple[str, int, int]] = {}
        """Ordinal of a life with an end that is due → (the end, number of steps when it became due, sequence number of
        the event that made it due)."""
        self._claimed_for = e.NO_LIFE
        """Ordinal of the life for which the current hook issued a load."""
        self._is_own = False
        """Whether the log is of kvledger's own connector. A recorder records an end only when vLLM gets it."""
        self._is_over = False

    def begin(self) -> None:
        """Check only lives and jobs that begin after the audit's start."""
        self._first_ordinal = self.lives.num_arrived
        self._first_job = 1 + self.copies.last_id

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        (self._promised.add if event.is_async else self._promised.discard)(event.ordinal)

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        self._claimed_for = e.NO_LIFE
        if self.moment.life is not None and self.moment.life.ordinal in self._promised:
            self._promised.discard(self.moment.life.ordinal)
            if event.num_external_tokens:
                self._waiting[self.moment.life.ordinal] = ""

    @on(e.LoadRefused)
    def _refused(self, event: e.LoadRefused) -> None:
        life = self.lives.get(event.request_id)
        ordinal = e.NO_LIFE if life is None else life.ordinal
        if life is not None and ordinal == self._claimed_for:
            self.broken("the load of the request is refused after it was issued", request_id=event.request_id)
        elif ordinal in self._promised or ordinal in self._waiting:
            self._promised.discard(ordinal)
            self._waiting[ordinal] = "failed"
            self._owe(ordinal, "failed")
        else:
            self._unfilled.update(event.block_ids)

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        self._claimed_for = event.ordinal
        if event.is_async and self._waiting.get(event.ordinal) == "":
            self._load_of.setdefault(event.ordinal, event.job_id)
        if not event.is_async:
            self._loads[event.job_id] = event.block_ids

    @on(e.TransferAwaited)
    def _awaited(self, event: e.TransferAwaited) -> None:
        self._reminders.add(event.job_id)

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported) -> None:
        for job_id in event.job_ids:
            blocks = self._loads.pop(job_id, ())
            if event.withheld and event.withheld != e.Withheld.CONTRACT:
                self._unfilled.update(blocks)
            job = self.copies.get(job_id)
            if job is not None and self.copies.every_rank <= job.ranks_done | job.ranks_failed:
                if job.is_load:
                    self._ended(job.ordinal, job_id, "failed" if job.ranks_failed else "received")
                else:
                    self._owe_held(job.ordinal)

    @on(e.LoadCompleted)
    def _load_completed(self, event: e.LoadCompleted) -> None:
        self._settled(event)
        self._ended(event.ordinal, event.job_id, "received")

    @on(e.LoadFailed)
    def _load_failed(self, event: e.LoadFailed) -> None:
        self._unfilled.update(self._loads.pop(event.job_id, ()))
        self._settled(event)
        self._ended(event.ordinal, event.job_id, "failed")

    def _ended(self, ordinal: int, job_id: int, end: str) -> None:
        if self._load_of.get(ordinal) == job_id and not self._waiting.get(ordinal, end):
            self._waiting[ordinal] = end
            self._owe(ordinal, end)

    def _owe(self, ordinal: int, end: str) -> None:
        self._due.setdefault(ordinal, (end, self.lives.num_steps, self.moment.sequence))

    def _owe_held(self, ordinal: int) -> None:
        if ordinal in self._held and not self._is_read(ordinal):
            self._owe(ordinal, "sent")

    @on(e.SaveCompleted, e.SaveFailed)
    def _save_settled(self, event: e.SaveCompleted | e.SaveFailed) -> None:
        self._settled(event)
        self._owe_held(event.ordinal)

    def _settled(self, event: Settled) -> None:
        self._handed_out.discard(event.job_id)
        self._reminders.discard(event.job_id)

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished) -> None:
        life = self.moment.life
        if life is not None and self.copies.reads_blocks_of(life.ordinal):
            self._kept.add(life.ordinal)

    @on(e.BlocksHeld)
    def _blocks_held(self, event: e.BlocksHeld) -> None:
        self._kept.add(event.ordinal)
        self._held.add(event.ordinal)
        self._owe_held(event.ordinal)

    @on(e.StepScheduled)
    def _step_scheduled(self, _event: e.StepScheduled) -> None:
        self._claimed_for = e.NO_LIFE
        if self._due and self._is_own and not self._is_over:
            overdue = [each for each in self._due.items() if each[1][1] + 1 < self.lives.num_steps]
            for ordinal, (end, _, sequence) in overdue:
                del self._due[ordinal]
                self.broken(f"life {ordinal} must be reported as {end}, but no step has done so", sequence)

    @on(e.HooksExchanged)
    def _exchanged(self, _event: e.HooksExchanged) -> None:
        self._is_own = True

    @on(e.HookFailed)
    def _hook_failed(self, event: e.HookFailed) -> None:
        self._claimed_for = e.NO_LIFE
        self._due = {
            ordinal: (end, self.lives.num_steps, sequence) for ordinal, (end, _, sequence) in self._due.items()
        }
        self._is_over |= event.error.startswith(e.CORRUPT)

    @on(e.LogNote)
    def _noted(self, event: e.LogNote) -> None:
        self._is_over |= event.text.startswith(e.DECLINED)

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased) -> None:
        self._promised.discard(event.ordinal)

    def _is_read(self, ordinal: int) -> bool:
        return any(
            job.is_async and not job.is_load and not self.copies.every_rank <= job.ranks_done | job.ranks_failed
            for job in self.copies.of_life(ordinal)
        )

    @on(e.EffectsDelivered)
    def _jobs_handed_out(self, event: e.EffectsDelivered) -> None:
        for job_id in event.job_ids:
            if job_id in self._handed_out:
                self.broken(f"job {job_id} is handed out a second time")
            elif self.copies.get(job_id) is None:
                self.broken(f"job {job_id} is handed out, but no such job is in flight")
            self._handed_out.add(job_id)
            self._loads.pop(job_id, None)
        for job_id in event.awaited:
            if job_id not in self._reminders and job_id >= self._first_job:
                self.broken(f"workers are reminded of job {job_id}, but no reminder was decided")
            self._reminders.discard(job_id)

    @on(e.EffectsDelivered)
    def _loads_reported(self, event: e.EffectsDelivered) -> None:
        for end_reported, ordinals in (("received", event.received), ("failed", event.failed)):
            for ordinal in ordinals:
                end = self._waiting.pop(ordinal, None)
                self._load_of.pop(ordinal, None)
                self._due.pop(ordinal, None)
                if ordinal >= self._first_ordinal and end != end_reported:
                    load = (
                        "no load"
                        if end is None
                        else f"a load that ended as {end}"
                        if end
                        else "a load that has not ended"
                    )
                    self.broken(f"life {ordinal} is reported as {end_reported}, but it waits for {load}")

    @on(e.EffectsDelivered)
    def _frees_reported(self, event: e.EffectsDelivered) -> None:
        for ordinal in event.sent:
            if self._is_read(ordinal):
                self.broken(f"life {ordinal} is reported as sent, but a copy still reads its blocks")
            elif ordinal not in self._kept and ordinal >= self._first_ordinal:
                self.broken(f"life {ordinal} is reported as sent, but its blocks are not kept for a copy")
            self._kept.discard(ordinal)
            self._held.discard(ordinal)
            self._due.pop(ordinal, None)

    @on(e.EffectsDelivered)
    def _blocks_reported(self, event: e.EffectsDelivered) -> None:
        unknown = sorted(set(event.block_ids) - self._unfilled)
        if unknown and not self._first_job:
            self.broken(f"blocks {unknown} are reported as not filled, but no load was to fill them")
        self._unfilled.difference_update(event.block_ids)
