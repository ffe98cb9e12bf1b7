"""The recorder's ledger: it records and commits events, and never affects the recorded connector.

If recording fails, the ledger logs the reason and records nothing more. Calls are forwarded as before. This module must
not know vLLM's hooks.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvledger.adapters.recorded.extension import Recorder
from kvledger.adapters.vllm.event_log import OpenedLog
from kvledger.adapters.vllm.messages import messages
from kvledger.lifecycle import Core, Ledger, LedgerConfiguration, described, raise_if_unstoppable, without_secrets
from kvledger.lifecycle import events as e

STOPPED = "recording stopped in "
"""First words of the note that ends a recording early."""


class RecorderLog:
    """The log of the scheduler's side, or of one worker."""

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
        """Return the nanoseconds since the log was opened."""
        return self._clock() - self._opened_ns

    def observe(self, event: e.Event) -> list[e.Event]:
        """Record an observation. Return the decisions that the core made because of it."""
        return self.ledger.observe(event)

    def note(self, payload: msgspec.Struct, request_id: str | None = None) -> None:
        """Record one of the recorder's own events. It is about a request, or without `request_id` about the engine."""
        if request_id is None:
            self.observe(Recorder.noted(payload, self.now()))
        else:
            self.observe(Recorder.observed(request_id, payload, self.now()))

    def commit(self) -> None:
        """Write the events since the last commit as one frame."""
        if self.is_ended:
            return
        try:
            self.ledger.commit()
        except BaseException as error:  # noqa: BLE001 -- what waits in the ledger is written with the next commit
            raise_if_unstoppable(error)
            self.messages.error("events could not be written", error=described(error))

    def hook_failed(self, hook: str, request_id: str, error: BaseException) -> None:
        """Record that the wrapped connector raised."""
        if not self.is_ended:
            logged = without_secrets(error)
            self.observe(e.HookFailed(hook, request_id, logged, self.now()))

    def end(self, hook: str, error: BaseException) -> None:
        """Log why recording failed, and stop recording."""
        if self.is_ended:
            return
        self.messages.error(
            "kvledger's recorder has stopped; the connector continues", hook=hook, error=described(error)
        )
        try:
            self.observe(e.LogNote(f"{STOPPED}{hook}: {without_secrets(error)}", self.now()))
        except BaseException as again:  # noqa: BLE001 -- nothing is left that could be said
            raise_if_unstoppable(again)
            self.messages.error("the log does not contain the reason why the recorder stopped", error=described(again))
        self.commit()
        self.is_ended = True

    def close(self) -> None:
        """Write the last events and close the log."""
        try:
            if not self.is_ended:
                self.observe(e.LogNote("recorder shut down", self.now()))
                self.commit()
        finally:
            self.is_ended = True
            self.log.close(self.ledger.next_sequence)
