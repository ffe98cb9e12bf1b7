"""The recorder's ledger: observes, commits, and never stands in the way of what it records.

Where recording fails it ends, people are told once, and every call is still forwarded. It must not know vLLM's hooks.
"""

from __future__ import annotations

from collections.abc import Callable

from kvledger.adapters.vllm.event_log import OpenedLog
from kvledger.adapters.vllm.messages import messages
from kvledger.lifecycle import Core, Ledger, LedgerConfiguration, without_secrets
from kvledger.lifecycle import events as e


class RecorderLog:
    """Writes everything at once: what is asked before it is asked, what is answered before vLLM is told."""

    def __init__(
        self, core: Core, configuration: LedgerConfiguration, log: OpenedLog, clock: Callable[[], int]
    ) -> None:
        self.ledger = Ledger(core, configuration, log.store)
        self.log = log
        self.configuration = configuration
        self.projections = self.ledger.projections
        self.tracker = self.projections.tracker
        self.messages = messages.bind(log=str(log.directory or "memory"))
        self.is_ended = False
        self._clock = clock
        self._opened_ns = clock()

    def now(self) -> int:
        """Nanoseconds since the log was opened."""
        return self._clock() - self._opened_ns

    def observe(self, event: e.Event) -> list[e.Event]:
        """Record an observation and return what the handlers made of it."""
        return self.ledger.observe(event)

    def commit(self) -> None:
        """Write what was recorded since the last commit, as one frame."""
        if self.is_ended:
            return
        try:
            self.ledger.commit()
            if self.log.snapshots is not None:
                self.log.snapshots.after_commit(self.ledger)
        except Exception as error:  # noqa: BLE001 -- what waits in the ledger is written with the next commit
            self.messages.error("events could not be written", error=str(error))

    def hook_failed(self, hook: str, request_id: str, error: Exception) -> None:
        """The wrapped connector raised: whatever follows, the log says where."""
        if not self.is_ended:
            logged = without_secrets(error)
            self.observe(e.HookFailed(hook, request_id, logged, self.now()))

    def end(self, hook: str, error: Exception) -> None:
        """Recording failed: say so and record no more."""
        if self.is_ended:
            return
        self.messages.error("kvledger's recorder ends, the connector goes on", hook=hook, error=str(error))
        try:
            self.observe(e.LogNote(f"recording ends in {hook}: {without_secrets(error)}", self.now()))
        except Exception as again:  # noqa: BLE001 -- nothing is left that could be said
            self.messages.error("the reason could not be recorded", error=str(again))
        self.commit()
        self.is_ended = True
