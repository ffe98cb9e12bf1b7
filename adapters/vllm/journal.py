"""The ledger as the hooks use it: a clock, an outbox of jobs, and what happens when recording itself fails."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path

from kvledger.adapters.vllm.deliveries import Deliveries
from kvledger.adapters.vllm.event_log import OpenedLog
from kvledger.adapters.vllm.messages import messages
from kvledger.lifecycle import HandlerRegistry, Ledger, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.ledger import LedgerCorrupt

Job = e.LoadIssued | e.SaveIssued | e.TailSaveIssued | e.TransferAwaited
"""A decision that a worker carries out."""


class Journal:
    """Observes events, keeps the jobs they lead to until a step takes them, and tells people of broken rules.

    A corrupt ledger disables it: nothing is decided any more, what fails is still written to the log.
    """

    def __init__(
        self,
        configuration: LedgerConfiguration,
        log: OpenedLog,
        *,
        handlers: HandlerRegistry | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.ledger = Ledger(configuration, log.store, handlers=handlers)
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
        self.deliveries = Deliveries(configuration.num_ranks)

    @property
    def has_jobs(self) -> bool:
        """Whether a job waits for a step, a step's job for its report, or vLLM for a word."""
        in_flight = not self.is_disabled and len(self.projections.transfers) > 0
        return in_flight or bool(self._outbox) or self.deliveries.is_owing

    def now(self) -> int:
        """Nanoseconds since the log was opened."""
        return self._clock() - self._opened_ns

    def observe(self, event: e.Event) -> list[e.Event]:
        """Record an observation and return the decisions.

        Raises:
            LedgerCorrupt: a projection failed; to be told to `hook_failed`.
        """
        if self.is_disabled:
            return []
        decisions = self.ledger.observe(event)
        if decisions or not isinstance(event, e.StepScheduled):
            self.figures_changed = True
        for decision in decisions:
            self.deliveries.take_up(decision)
            if isinstance(decision, Job):
                self._outbox.append(decision)
            elif isinstance(decision, e.InvariantViolated):
                self.messages.error(
                    "rule broken, the request recomputes",
                    rule=decision.rule,
                    request_id=decision.request_id,
                    detail=decision.detail,
                    sequence=decision.cause,
                )
        return decisions

    def take_jobs(self) -> list[Job]:
        """The jobs issued since the last call."""
        jobs, self._outbox = self._outbox, []
        return jobs

    def commit(self) -> None:
        """Write what was recorded since the last commit, as one frame."""
        try:
            self.ledger.commit()
            if self.log.snapshots is not None and not self.is_disabled:
                self.log.snapshots.after_commit(self.ledger)
        except Exception as error:  # noqa: BLE001 -- a log that cannot be written must not stop the engine
            self.messages.error("events could not be written", error=str(error))

    def decline(self, reason: str) -> None:
        """Serve nobody, and say why: to the log, and to people."""
        self.ledger.record_unfolded(e.LogNote(f"declined: {reason}", self.now()))
        self.messages.warning("the model is not served, requests run as without a connector", reason=reason)
        self._stand_aside()

    def hook_failed(self, hook: str, request_id: str, error: Exception) -> None:
        """Tell the people, tell the log, and let the request recompute."""
        described = f"{type(error).__name__}: {error}"
        self.messages.error("hook failed, the request recomputes", hook=hook, request_id=request_id, error=described)
        event = e.HookFailed(hook, request_id, _without_secrets(error), self.now())
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
        self._outbox = [job for job in self._outbox if isinstance(job, e.LoadIssued) or _is_async_save(job)]


def _without_secrets(error: Exception) -> str:
    """What the log may know of an error: hooks are given prompts and salts, and a message may quote them."""
    if isinstance(error, LedgerCorrupt):
        return f"LedgerCorrupt: {error}"  # the core sees only events, so its messages are as harmless as they
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__
    last = frames[-1]
    return f"{type(error).__name__} in {last.name}, {Path(last.filename).name}:{last.lineno}"


def _is_async_save(job: Job) -> bool:
    return isinstance(job, e.SaveIssued) and job.is_async
