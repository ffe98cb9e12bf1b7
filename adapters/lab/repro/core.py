"""Runs a recording again on the core alone: gives its observations to a `Ledger`, without vLLM and in milliseconds.

This rerun covers decisions and projections. The rerun in `hooks.py` also covers the adapter.
"""

from __future__ import annotations

import msgspec

from kvledger.adapters.lab.repro.calls import HookCall, to_vllm
from kvledger.adapters.lab.repro.outcome import RECENT_BYTES, Written
from kvledger.adapters.lab.repro.recording import JOB_ISSUED, Recording, changed
from kvledger.adapters.lab.repro.run import Run
from kvledger.lifecycle import Channel, Core, Ledger, LedgerCorrupt, effects_delivered
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import EventDecoder, vocabulary_header
from kvledger.storage.events import MemoryEventStore


class CoreRun(Run):
    """Gives the recorded observations to a new ledger."""

    def __init__(self, recording: Recording, core: Core) -> None:
        super().__init__(recording, core)
        store = MemoryEventStore(max_bytes=RECENT_BYTES)
        self._written = Written(store, EventDecoder(core, vocabulary_header(core)))
        self._ledger = Ledger(core, recording.configuration, store)
        self._ordinals: dict[str, int] = {}
        self._missing: dict[int, int] = {}
        self._is_corrupt = False

    def _make(self, call: HookCall) -> bool:
        if isinstance(call.main, e.StepScheduled):
            for report in self._overdue_reports(call.main.time_ns):
                self._observe(call, call.sequence, report)
        for sequence, event in call.observed:
            adapted = None if isinstance(event, e.HookFailed) else self._adapted(event)
            if adapted is not None:
                if isinstance(adapted, e.EffectsDelivered):
                    self._deliveries[sequence] = self._ledger.next_sequence
                self._observe(call, sequence, adapted)
        return not self._is_corrupt

    def _observe(self, call: HookCall, sequence: int, event: e.Event) -> None:
        try:
            self._ledger.observe(event)
        except Exception as error:  # noqa: BLE001 -- written as the adapter's guard writes it
            self._is_corrupt = isinstance(error, LedgerCorrupt)
            text, request_id = f"{type(error).__name__}: {error}", getattr(event, "request_id", "")
            self._ledger.observe(e.HookFailed(call.hook, request_id, text, getattr(event, "time_ns", 0)))
        self._ledger.commit()
        events = self._written.take()
        self._outcome.take(events, call.hook, call.sequence)
        for _, made in events:
            if isinstance(made, JOB_ISSUED):
                self._issued(made, sequence)
            elif isinstance(made, e.LookupAnswered):
                self._answered(made.request_id, sequence, made.num_external_tokens)
            elif isinstance(made, e.LookupDeferred):
                self._answered(made.request_id, sequence, None)

    def _delivered(self, recorded: e.EffectsDelivered) -> e.EffectsDelivered | None:
        """Return this ledger's own delivery, to replace a recorded delivery. None if there is nothing to deliver."""
        if not to_vllm(recorded):
            return effects_delivered(self._ledger.ready(Channel.WORKERS))
        ready = self._ledger.ready(Channel.VLLM)
        ended = self._ledger.projections.owed.state.to_report
        reported = tuple(ordinal for ordinal in recorded.reported if ordinal in ended)
        return effects_delivered(msgspec.structs.replace(ready, reported=reported))

    def _adapted(self, event: e.Event) -> e.Event | None:
        if isinstance(event, e.EffectsDelivered):
            return self._delivered(event)
        if isinstance(event, e.RequestArrived):
            self._ordinals[event.request_id] = event.ordinal
        elif isinstance(event, e.BlocksAllocated):
            taken = self._loadable(event)
            if taken != event.num_external_tokens:
                self._missing[self._ordinals.get(event.request_id, -1)] = event.num_external_tokens - taken
                return changed(event, num_external_tokens=taken)
        elif isinstance(event, e.RequestPreempted):
            self._missing.pop(self._ordinals.get(event.request_id, -1), None)
        elif isinstance(event, e.StepScheduled) and self._missing:
            return self._computing_more(event)
        elif isinstance(event, e.TransferReported):
            return self._of_present_jobs(event)
        elif isinstance(event, e.StepReported):
            return self._present_output(event)
        return event

    def _computing_more(self, step: e.StepScheduled) -> e.StepScheduled:
        """Return the step with more tokens: in the rerun, requests compute the tokens that were not loaded."""
        advanced = []
        num_scheduled_tokens = step.num_scheduled_tokens
        starts: dict[int, int] = {}
        for ordinal, computed, scheduled, known in step.advanced:
            missing = self._missing.pop(ordinal, 0)
            advanced.append((ordinal, computed - missing, scheduled + missing, known))
            num_scheduled_tokens += missing
            if missing:
                starts[ordinal] = computed - missing
        settled = [entry for entry in step.settled if entry[2] <= starts.get(entry[0], entry[2])]
        return changed(
            step, num_scheduled_tokens=num_scheduled_tokens, advanced=tuple(advanced), settled=tuple(settled)
        )
