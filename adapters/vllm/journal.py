"""The ledger as the hooks use it: a clock, what may leave towards the workers, and what happens when recording fails.

A job goes to the workers when the frame that it stands in is written, and when it keeps to vLLM's contract. One that
does not go is reported as failed, so that what the ledger knows stays true.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvledger.adapters.vllm import contract
from kvledger.adapters.vllm.event_log import OpenedLog
from kvledger.adapters.vllm.messages import messages
from kvledger.lifecycle import (
    Channel,
    Core,
    Ledger,
    LedgerConfiguration,
    LedgerCorrupt,
    PageJob,
    Ready,
    Rule,
    described,
    raise_if_unstoppable,
    without_secrets,
)
from kvledger.lifecycle import events as e

NOT_WRITTEN = "the event log could not be written"
"""Why an answer or a job is withheld with which nothing is wrong, for people to read."""


class Journal:
    """Observes events, withholds jobs that may not leave, and logs broken rules for people.

    A corrupt ledger disables it: nothing is decided any more, what is owed still comes to its end.
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
        self.owed = self.projections.owed
        self.tracker = self.projections.tracker
        self.is_disabled = False
        self.figures_changed = True
        self.messages = messages.bind(log=str(log.directory or "memory"))
        self._clock = clock
        self._opened_ns = clock()
        self._num_steps_disabled = 0
        self._disabled_ns = 0
        self.is_behind: Callable[[], bool] = lambda: log.is_behind
        """Whether events that were handed over are not in the log yet."""
        self.is_written = True
        """Whether everything was in the log after the last commit."""
        self.follow: Callable[[e.Event, Sequence[e.Event]], None] | None = None
        """Called with each observation and what was decided on it; must not raise."""
        self.before_step: Callable[[], None] = lambda: None
        """Called before a step is recorded; must not raise."""
        self.loads_must_not_fail = False
        """Whether vLLM delivers a wrong token where a load within a step fails."""

    @property
    def has_jobs(self) -> bool:
        """Whether a job waits for a step, a step's job for its report, or vLLM for an end.

        Where nothing is decided any more a job is waited for as long as it may be silent, and no longer.
        """
        if self.owed.is_owing:
            return True
        if not self.is_disabled:
            return len(self.projections.jobs) > 0
        return self.owed.is_waiting and not self._is_overdue

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
            LedgerCorrupt: a projection failed; give it to `hook_failed`.
        """
        try:
            decisions = self.ledger.observe(event)
        except LedgerCorrupt as error:
            self._judge(event, error.decisions)
            raise
        if decisions or not isinstance(event, e.StepScheduled):
            self.figures_changed = True
        if self.follow is not None:
            self.follow(event, decisions)
        refused = self._judge(event, decisions) if decisions else ()
        return [decision for decision in decisions if decision not in refused] if refused else decisions

    def _judge(self, event: e.Event, decisions: Sequence[e.Event]) -> list[PageJob]:
        """Withhold jobs that break vLLM's contract, and return them."""
        refused: list[tuple[PageJob, str]] = []
        has_load = False
        for decision in decisions:
            if isinstance(decision, PageJob):
                breach = self._breach_of(decision, event, decisions, has_load=has_load)
                if breach:
                    refused.append((decision, breach))
                else:
                    has_load |= isinstance(decision, e.LoadIssued)
            elif isinstance(decision, e.InvariantViolated):
                self.messages.error(
                    "a rule is broken, the request recomputes; `kvledger verify` on this log shows by which events",
                    rule=decision.rule,
                    request_id=decision.request_id,
                    detail=decision.detail,
                    sequence=decision.cause,
                )
            elif isinstance(decision, e.ExtensionStopped):
                self.messages.error(
                    "an extension raised and takes no part until the engine restarts with it mended or left out",
                    extension=decision.extension,
                    where=decision.where,
                    error=decision.error,
                    sequence=decision.cause,
                )
        for job, breach in refused:
            self.withhold(job.request_id, Rule.VLLM_CONTRACT.value, breach)
            self._withhold_job(job, e.Withheld.CONTRACT, breach)
        return [job for job, _ in refused]

    def _breach_of(self, job: PageJob, event: e.Event, decisions: Sequence[e.Event], *, has_load: bool) -> str:
        try:
            if not isinstance(job, e.LoadIssued):
                return contract.breach_of_save(job, decisions, self.projections)
            if has_load:
                return "a second load for one allocation"
            return contract.breach_of_load(job, event, self.projections)
        except BaseException as error:  # noqa: BLE001 -- what cannot be judged does not leave
            raise_if_unstoppable(error)
            return f"it cannot be judged: {type(error).__name__}"

    def withhold(self, request_id: str, rule: str, detail: str) -> None:
        """Record that what was decided does not leave; with a rule, it is what that would have broken."""
        self.observe(e.DecisionWithheld(request_id, rule, detail, self.now()))

    def _withhold_job(self, job: PageJob, withheld: e.Withheld, detail: str) -> None:
        self._fail(job.job_id, job.request_id, withheld, f"not handed out: {detail}")

    def _fail(self, job_id: int, request_id: str, withheld: e.Withheld, error: str) -> None:
        """Report a job as failed in the place of all workers."""
        try:
            self.observe(
                e.TransferReported(
                    job_ids=(job_id,),
                    ranks_done=(),
                    ranks_failed=tuple(range(self.configuration.num_ranks)),
                    is_repeated=False,
                    num_bytes=(0,),
                    duration_ns=0,
                    error=error,
                    withheld=withheld.value,
                    time_ns=self.now(),
                )
            )
        except BaseException as failure:  # noqa: BLE001 -- as in any hook
            raise_if_unstoppable(failure)
            self.hook_failed("withhold", request_id, failure)

    def ready(self) -> Ready:
        """What the workers are given with this step. Jobs that a step went without are reported as failed."""
        ready = self.ledger.ready(Channel.WORKERS)
        if not ready.late:
            return ready
        for job in ready.late:
            self._withhold_job(job, e.Withheld.HOOK_FAILED, "build_connector_meta failed")
        return self.ledger.ready(Channel.WORKERS)

    def commit(self) -> bool:
        """Write what was recorded since the last commit, as one frame, before vLLM acts on it.

        Returns whether all of it is in the log. If not, no new copy begins: jobs that only this frame records are
        withheld, but for loads that vLLM would deliver a wrong token without: it has been promised them in writing.
        """
        first_sequence = self.ledger.next_sequence - self.ledger.num_uncommitted
        try:
            self.ledger.commit()
        except BaseException as error:  # noqa: BLE001 -- a log that cannot be written must not stop the engine
            raise_if_unstoppable(error)
            self.is_written = False
            self.messages.error("events could not be written, report it with this log", error=described(error))
        else:
            self.is_written = not self.is_behind()
        if not self.is_written:
            for job in self.owed.issued_since(first_sequence):
                is_promised = self.loads_must_not_fail and isinstance(job, e.LoadIssued) and not job.is_async
                if not is_promised:
                    self._withhold_job(job, e.Withheld.UNWRITTEN, NOT_WRITTEN)
        return self.is_written

    def decline(self, reason: str) -> None:
        """Serve nobody, and say why: to the log, and to people."""
        self._disable()
        self.messages.warning("the model is not served, requests run as without a connector", reason=reason)
        try:
            self.observe(e.LogNote(f"{e.DECLINED}{reason}", self.now()))
        except LedgerCorrupt as error:
            self.hook_failed("decline", "", error)

    def hook_failed(self, hook: str, request_id: str, error: BaseException) -> None:
        """Log it for people, record it, and let the request recompute."""
        text = described(error)
        self.messages.error(
            "a hook failed, the request recomputes; report it with this log",
            hook=hook,
            request_id=request_id,
            error=text,
        )
        # The core sees only events, so what it says is as harmless as they.
        logged = text if isinstance(error, LedgerCorrupt) else without_secrets(error)
        event = e.HookFailed(hook, request_id, logged, self.now())
        is_sound = False
        try:
            self.observe(event)
            is_sound = not self.ledger.is_corrupt
        except BaseException as again:  # noqa: BLE001 -- reporting a failure must not become one
            raise_if_unstoppable(again)
        if not is_sound and not self.is_disabled:
            self._stop_deciding()

    def _stop_deciding(self) -> None:
        """Decide nothing any more. What vLLM waits for goes out all the same, other saves do not."""
        self._disable()
        self.messages.error(
            "the ledger is corrupt, caching is off: restart the engine when it suits, and report it with this log"
        )
        for job in self.owed.issued_since(0):
            if not (isinstance(job, e.LoadIssued) or (isinstance(job, e.SaveIssued) and job.is_async)):
                self._withhold_job(job, e.Withheld.HOOK_FAILED, "the ledger is corrupt")

    def _disable(self) -> None:
        self.is_disabled = True
        self._disabled_ns = self.now()

    @property
    def _is_overdue(self) -> bool:
        """Whether what has not been reported since nothing is decided any more is waited for no longer."""
        silent_ns = self.now() - self._disabled_ns
        return (
            self._num_steps_disabled >= self.configuration.max_silent_steps
            and silent_ns >= self.configuration.max_silent_ms * 1_000_000
        )

    def pass_step(self) -> None:
        """A step goes out although nothing is decided any more: whoever waits for a copy that is overdue waits no more.

        Nobody can decide that it failed, so the connector reports it. Saves, too: vLLM keeps blocks for them.
        """
        self._num_steps_disabled += 1
        if self._is_overdue:
            for copy in self.owed.under_way():
                error = "nobody reported it, and nothing is decided any more"
                self._fail(copy.job_id, copy.request_id, e.Withheld.OVERDUE, error)
