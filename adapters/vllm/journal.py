"""The ledger as the hooks use it: a clock, an outbox of jobs, and what happens when recording itself fails.

A job goes to the workers when the frame that it stands in is written, and when it keeps to vLLM's contract. One that
does not go is reported as failed, so that what the ledger knows stays true.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvledger.adapters.vllm import contract
from kvledger.adapters.vllm.deliveries import Deliveries
from kvledger.adapters.vllm.event_log import OpenedLog
from kvledger.adapters.vllm.messages import messages
from kvledger.adapters.vllm.metadata import JobReport
from kvledger.lifecycle import Core, Ledger, LedgerConfiguration, LedgerCorrupt, Rule, without_secrets
from kvledger.lifecycle import events as e

_PageJob = e.LoadIssued | e.SaveIssued | e.TailSaveIssued
"""A copy of pages: it may break vLLM's contract, and it can fail."""
Job = _PageJob | e.TransferAwaited
"""A decision that a worker carries out: a copy, or waiting for one."""
_Judged = _PageJob | e.RequestFinished
NOT_WRITTEN = "the event log could not be written"
"""Why an answer or a job is withheld with which nothing is wrong, for people to read."""


class Journal:
    """Observes events, keeps the jobs they lead to until a step takes them, and tells people of broken rules.

    A corrupt ledger disables it: nothing is decided any more, what fails is still written to the log.
    """

    def __init__(
        self,
        core: Core,
        configuration: LedgerConfiguration,
        log: OpenedLog,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.ledger = Ledger(core, configuration, log.store)
        self.log = log
        self.configuration = configuration
        self.projections = self.ledger.projections
        self.tracker = self.projections.tracker
        self.is_disabled = False
        self.figures_changed = True
        self.messages = messages.bind(log=str(log.directory or "memory"))
        self._clock = clock
        self._opened_ns = clock()
        self._outbox: list[Job] = []
        self._unwritten: list[Job] = []
        """Jobs that no frame of the log has yet."""
        self.is_behind: Callable[[], bool] = lambda: log.is_behind
        """Whether events that were handed over are not in the log yet."""
        self.is_written = True
        """Whether everything was in the log after the last commit."""
        self.loads_must_not_fail = False
        """Whether vLLM delivers a wrong token where a load within a step fails."""
        self.deliveries = Deliveries(configuration.num_ranks)

    @property
    def has_jobs(self) -> bool:
        """Whether a job waits for a step, a step's job for its report, or vLLM for a word."""
        in_flight = not self.is_disabled and len(self.projections.transfers) > 0
        return in_flight or bool(self._outbox or self._unwritten) or self.deliveries.is_owing

    @property
    def is_whole(self) -> bool:
        """Whether the log lacks nothing but what no commit has tried to write."""
        return self.is_written and not self.is_behind()

    def now(self) -> int:
        """Nanoseconds since the log was opened."""
        return self._clock() - self._opened_ns

    def observe(self, event: e.Event) -> list[e.Event]:
        """Record an observation and return the decisions, without jobs that break vLLM's contract.

        Raises:
            LedgerCorrupt: a projection failed; to be told to `hook_failed`.
        """
        if self.is_disabled:
            return []
        try:
            decisions = self.ledger.observe(event)
        except LedgerCorrupt as error:
            self._take_up(event, error.decisions)
            raise
        if decisions or not isinstance(event, e.StepScheduled):
            self.figures_changed = True
        refused = self._take_up(event, decisions)
        if not refused:
            return decisions
        for decision, breach in refused:
            self.withhold(decision.request_id, Rule.VLLM_CONTRACT.value, breach)
            if not isinstance(decision, e.RequestFinished):
                self._fail(decision, e.Withheld.CONTRACT, breach)
        return [decision for decision in decisions if not any(decision is other for other, _ in refused)]

    def _take_up(self, event: e.Event, decisions: Sequence[e.Event]) -> list[tuple[_Judged, str]]:
        """Keep what is to be handed out; returns what may not be, and why."""
        refused: list[tuple[_Judged, str]] = []
        has_load = False
        for decision in decisions:
            if isinstance(decision, _PageJob):
                breach = self._breach_of(decision, event, decisions, has_load=has_load)
                if breach:
                    refused.append((decision, breach))
                    continue
                has_load |= isinstance(decision, e.LoadIssued)
            if isinstance(decision, Job):
                self._unwritten.append(decision)
            elif isinstance(decision, e.InvariantViolated):
                self.messages.error(
                    "rule broken, the request recomputes",
                    rule=decision.rule,
                    request_id=decision.request_id,
                    detail=decision.detail,
                    sequence=decision.cause,
                )
            elif isinstance(decision, e.ExtensionStopped):
                self.messages.error(
                    "extension stopped, it takes no part until the engine restarts",
                    extension=decision.extension,
                    where=decision.where,
                    error=decision.error,
                    sequence=decision.cause,
                )
            self.deliveries.take_up(decision)
        if isinstance(event, e.RequestFinished) and self._is_read(event.request_id):
            refused.append((event, "a copy reads the blocks of a request that ended, and they were not held"))
            self.deliveries.keep(event.request_id)
        return refused

    def _breach_of(self, job: _PageJob, event: e.Event, decisions: Sequence[e.Event], *, has_load: bool) -> str:
        if not isinstance(job, e.LoadIssued):
            return contract.breach_of_save(job, decisions, self.projections)
        return "a second load for one allocation" if has_load else contract.breach_of_load(job, event, self.projections)

    def _is_read(self, request_id: str) -> bool:
        """Whether a copy beside the steps goes on reading blocks of a request that ended, and nobody held them."""
        record = self.tracker.get(request_id)
        if record is None or self.deliveries.is_held(request_id):
            return False
        return bool(self.projections.transfers.reads_blocks_of(record.ordinal))

    def withhold(self, request_id: str, rule: str, detail: str) -> None:
        """Record that what was decided does not leave; with a rule, it is what that would have broken."""
        self.observe(e.DecisionWithheld(request_id, rule, detail, self.now()))

    def give_up(self, jobs: Sequence[Job], error: str) -> None:
        """Report jobs that a failing hook could not hand out; one that waits for another is none of them."""
        for job in jobs:
            if isinstance(job, _PageJob):
                self._fail(job, e.Withheld.HOOK_FAILED, error)

    def _fail(self, job: _PageJob, withheld: e.Withheld, detail: str) -> None:
        """Report a job that no worker is given, in the place of all of them."""
        ranks, error = tuple(range(self.configuration.num_ranks)), f"not handed out: {detail}"
        self.deliveries.count([JobReport(job.job_id, rank, False, 0, 0, error) for rank in ranks])  # noqa: FBT003
        try:
            self.observe(
                e.TransferReported(
                    job_id=job.job_id,
                    ranks_done=(),
                    ranks_failed=ranks,
                    is_repeated=False,
                    num_bytes=0,
                    duration_ns=0,
                    error=error,
                    withheld=withheld.value,
                    time_ns=self.now(),
                )
            )
        except Exception as failure:  # noqa: BLE001 -- as in any hook
            self.hook_failed("withhold", job.request_id, failure)
        if self.is_disabled:
            self.deliveries.settle_counted()

    def take_jobs(self) -> list[Job]:
        """The jobs issued since the last call."""
        jobs, self._outbox = self._outbox, []
        return jobs

    def commit(self) -> bool:
        """Write what was recorded since the last commit, as one frame, before vLLM is told of it.

        Returns whether all of it is in the log. If not, no new copy begins: jobs that only this frame tells of are
        withheld, but for those that wait for a copy, and for loads that vLLM would deliver a wrong token without: it
        has been promised them in writing.
        """
        try:
            self.ledger.commit()
        except Exception as error:  # noqa: BLE001 -- a log that cannot be written must not stop the engine
            self.is_written = False
            self.messages.error("events could not be written", error=str(error))
        else:
            self.is_written = not self.is_behind()
            if self.log.snapshots is not None and not self.is_disabled:
                self.log.snapshots.after_commit(self.ledger)
        unwritten, self._unwritten = self._unwritten, []
        for job in unwritten:
            is_promised = self.loads_must_not_fail and isinstance(job, e.LoadIssued) and not job.is_async
            if isinstance(job, _PageJob) and not self.is_written and not is_promised:
                self._fail(job, e.Withheld.UNWRITTEN, NOT_WRITTEN)
            else:
                self._outbox.append(job)
        return self.is_written

    def decline(self, reason: str) -> None:
        """Serve nobody, and say why: to the log, and to people."""
        note = e.LogNote(f"declined: {reason}", self.now())
        try:
            self.ledger.observe(note)
        except LedgerCorrupt:
            self.ledger.record_unfolded(note)
        self.messages.warning("the model is not served, requests run as without a connector", reason=reason)
        self._stand_aside()

    def hook_failed(self, hook: str, request_id: str, error: Exception) -> None:
        """Tell the people, tell the log, and let the request recompute."""
        described = f"{type(error).__name__}: {error}"
        self.messages.error("hook failed, the request recomputes", hook=hook, request_id=request_id, error=described)
        # The core sees only events, so what it says is as harmless as they.
        logged = described if isinstance(error, LedgerCorrupt) else without_secrets(error)
        event = e.HookFailed(hook, request_id, logged, self.now())
        try:
            if isinstance(error, LedgerCorrupt):
                self._disable(event)
            else:
                self.observe(event)
        except Exception:  # noqa: BLE001 -- telling of a failure must not become one
            self._disable(event)

    def _disable(self, event: e.HookFailed) -> None:
        if not self.is_disabled:
            self.messages.error("the ledger is corrupt; caching is off until the engine restarts")
        self._stand_aside()
        self.ledger.record_unfolded(event)

    def _stand_aside(self) -> None:
        self.is_disabled = True
        # What the scheduler was promised is still delivered, also the end of a save for which it keeps blocks.
        for jobs in (self._outbox, self._unwritten):
            jobs[:] = [job for job in jobs if isinstance(job, e.LoadIssued) or _is_async_save(job)]


def _is_async_save(job: Job) -> bool:
    return isinstance(job, e.SaveIssued) and job.is_async
