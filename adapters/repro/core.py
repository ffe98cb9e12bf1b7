"""Re-enacts a recording on the core alone: observations into a `Ledger`. No vLLM, milliseconds.

Sees what decisions and projections do. What the adapter makes of hook calls is re-enacted in `hooks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvledger.adapters.core import composed_core
from kvledger.adapters.repro.adaptation import Adaptation
from kvledger.adapters.repro.calls import HookCall, hook_calls, to_vllm
from kvledger.adapters.repro.recording import JOB_ISSUED, Recording, changed, report
from kvledger.adapters.repro.reenactment import Reenactment
from kvledger.lifecycle import Channel, Core, Ledger, LedgerCorrupt, SequencedEvent
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import EventDecoder, vocabulary_header


class _Sink:
    """Hands out what was committed, as a reader of the log would see it."""

    def __init__(self, core: Core) -> None:
        self.next_sequence = 1
        self._decoder = EventDecoder(core, vocabulary_header(core))
        self._events: list[SequencedEvent] = []

    def append(self, payload: bytes, num_events: int, *, expected_sequence: int | None = None) -> int:  # noqa: ARG002
        """One frame."""
        first_sequence = self.next_sequence
        self._events += enumerate(self._decoder.decode(payload), first_sequence)
        self.next_sequence += num_events
        return first_sequence

    def take(self) -> list[SequencedEvent]:
        """The events since the last call."""
        taken, self._events = self._events, []
        return taken


def reenact_core(recording: Recording, *, until: int | None = None, handlers: Sequence[str] = ()) -> Reenactment:
    """Give the recorded observations to a new ledger.

    Args:
        recording: what was seen.
        until: end with this event of the recorded log.
        handlers: state handlers of one's own, as "module:Class", if the engine had any.
    """
    return _CoreRun(recording.until(until), handlers).run()


class _CoreRun:
    def __init__(self, recording: Recording, handlers: Sequence[str]) -> None:
        self._recording = recording
        self._configuration = recording.configuration
        core = composed_core(handlers)
        self._sink = _Sink(core)
        self._ledger = Ledger(core, self._configuration, self._sink)
        self._adaptation = Adaptation(recording)
        self._outcome = Reenactment(self._configuration, core)
        self._ordinals: dict[str, int] = {}
        self._missing: dict[int, int] = {}
        self._overdue: list[int] = []
        self._hook, self._sequence = "", 0
        self._is_corrupt = False

    def run(self) -> Reenactment:
        """All calls, then the audit's last look."""
        calls, left_over = hook_calls(self._recording.observations)
        self._outcome.left_out += [f"event {sequence} ({event.id})" for sequence, event in left_over]
        for call in calls:
            self._hook, self._sequence = call.hook, call.sequence
            if self._is_corrupt:
                break
            self._reenact(call)
        self._outcome.finish(self._hook, self._sequence)
        return self._outcome

    def _reenact(self, call: HookCall) -> None:
        if isinstance(call.main, e.HookFailed):
            self._outcome.left_out.append(f"the call of {call.hook} that failed before event {call.sequence}")
        for sequence, event in call.observed:
            if isinstance(event, e.StepScheduled):
                self._report_overdue(event.time_ns)
            adapted = None if isinstance(event, e.HookFailed) else self._adapted(event)
            if adapted is not None:
                self._observe(sequence, adapted)

    def _observe(self, sequence: int, event: e.Event) -> None:
        try:
            self._ledger.observe(event)
        except Exception as error:  # noqa: BLE001 -- told as the adapter's guard tells it
            self._tell(error, getattr(event, "request_id", ""), getattr(event, "time_ns", 0))
        self._ledger.commit()
        events = self._sink.take()
        self._outcome.take(events, self._hook, self._sequence)
        for _, made in events:
            if isinstance(made, JOB_ISSUED):
                self._adaptation.issued(made, sequence)
            elif isinstance(made, e.LookupAnswered):
                self._adaptation.answered(made.request_id, sequence, made.num_external_tokens)
            elif isinstance(made, e.LookupDeferred):
                self._adaptation.answered(made.request_id, sequence, 0)

    def _tell(self, error: Exception, request_id: str, time_ns: int) -> None:
        failed = e.HookFailed(self._hook, request_id, f"{type(error).__name__}: {error}", time_ns)
        self._is_corrupt = isinstance(error, LedgerCorrupt)
        self._ledger.observe(failed)

    def _delivered(self, recorded: e.EffectsDelivered) -> e.EffectsDelivered | None:
        """What this ledger owes where the recorded one handed over."""
        if not to_vllm(recorded):
            return self._ledger.ready(Channel.WORKERS).delivered()
        ready = self._ledger.ready(Channel.VLLM)
        told = self._ledger.projections.obligations.state.told
        return ready._replace(heard=tuple(ordinal for ordinal in recorded.heard if ordinal in told)).delivered()

    def _adapted(self, event: e.Event) -> e.Event | None:
        if isinstance(event, e.EffectsDelivered):
            return self._delivered(event)
        if isinstance(event, e.RequestArrived):
            self._ordinals[event.request_id] = event.ordinal
        elif isinstance(event, e.BlocksAllocated):
            taken = self._adaptation.taken_up(event.request_id, event.num_external_tokens)
            if taken != event.num_external_tokens:
                self._missing[self._ordinals.get(event.request_id, -1)] = event.num_external_tokens - taken
                return changed(event, num_external_tokens=taken)
        elif isinstance(event, e.RequestPreempted):
            self._missing.pop(self._ordinals.get(event.request_id, -1), None)
        elif isinstance(event, e.StepScheduled) and self._missing:
            return self._computing_more(event)
        elif isinstance(event, e.TransferReported):
            job_id = self._adaptation.job(event.job_id)
            return None if job_id is None else changed(event, job_id=job_id)
        return event

    def _computing_more(self, step: e.StepScheduled) -> e.StepScheduled:
        """The step in which requests compute what they were not given."""
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

    def _report_overdue(self, time_ns: int) -> None:
        """Jobs that were not issued then are done one step after they were handed out."""
        ranks = tuple(range(self._configuration.num_ranks))
        for job_id in self._overdue:
            self._observe(self._sequence, report(job_id, time_ns, ranks_done=ranks))
        self._overdue = self._adaptation.take_unrecorded_jobs()
