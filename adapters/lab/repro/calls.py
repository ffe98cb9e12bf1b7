"""Groups observations into the hook calls that recorded them.

A call first records the changes that it notices (chunk keys, preemptions, rollbacks), then its main event. The table in
`docs/hooks.md` lists the events of each hook. This module finds the hook that recorded given events, and depends on
events only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import attrs

from kvledger.adapters.lab.repro.recording import reported_by_workers
from kvledger.lifecycle import SequencedEvent
from kvledger.lifecycle import events as e

_MAIN: dict[type[e.Event], str] = {
    e.RequestArrived: "on_new_request",
    e.LookupRequested: "get_num_new_matched_tokens",
    e.BlocksAllocated: "update_state_after_alloc",
    e.StepScheduled: "build_connector_meta",
    e.RequestFinished: "request_finished",
}
"""Class of a call's main event → hook."""

_HOOK_OF_FAILURE = {"claim": "update_state_after_alloc", "record_step": "build_connector_meta"}
"""Part of a hook, as `HookFailed` names it → hook."""
_PARTS_AT_THE_END = {
    "promised_blocks": "update_state_after_alloc",
    "update_state_after_alloc": "update_state_after_alloc",
    "build_connector_meta": "build_connector_meta",
}
"""Part that runs after the main event was recorded → hook. Its failure follows that event in the log."""


_Event = TypeVar("_Event", bound=e.Event)


@attrs.frozen
class HookCall:
    """One call of a hook. `main` is the event that the call is about."""

    hook: str
    sequence: int
    """Sequence number of `main`."""
    request_id: str
    """Id of the request that the call is about; empty if the call is about no single request."""
    main: e.Event
    observed: tuple[SequencedEvent, ...]
    """All observations of the call, in order. They include `main`, and a `HookFailed` if the hook failed."""

    def noticed(self, event_class: type[_Event]) -> list[_Event]:
        """Return the observed events of a class."""
        return [event for _, event in self.observed if isinstance(event, event_class)]


def is_withheld(event: e.Event) -> bool:
    """Whether the event records that the connector withheld a decision, or itself reported a job as failed.

    In a rerun, the code under test writes such events itself.
    """
    if isinstance(event, e.TransferReported):
        return bool(event.withheld)
    return isinstance(event, e.DecisionWithheld)


def to_vllm(event: e.EffectsDelivered) -> bool:
    """Whether the connector delivered something to vLLM itself, and not to the workers."""
    return bool(event.received or event.reported)


def could_not_be_written(event: e.Event) -> bool:
    """Whether the event records that the connector withheld something because its log could not be written."""
    if isinstance(event, e.TransferReported):
        return event.withheld == e.Withheld.UNWRITTEN
    return isinstance(event, e.DecisionWithheld) and not event.rule


def _continues_output(event: e.Event) -> bool:
    return isinstance(event, e.ExtensionNoted) and not reported_by_workers(event)


def hook_calls(observations: Sequence[SequencedEvent]) -> tuple[list[HookCall], list[SequencedEvent]]:
    """Return the hook calls in order, and the observations that belong to no call."""
    grouping = _Grouping(observations)
    grouping.run()
    return grouping.calls, grouping.left_over


class _Grouping:
    def __init__(self, observations: Sequence[SequencedEvent]) -> None:
        self._entries = observations
        self._at = 0
        self._noticed: list[SequencedEvent] = []
        self.calls: list[HookCall] = []
        self.left_over: list[SequencedEvent] = []

    def run(self) -> None:
        while self._at < len(self._entries):
            self._take(*self._entries[self._at])
        self.left_over += self._noticed

    def _take(self, sequence: int, event: e.Event) -> None:
        hook = _MAIN.get(type(event))
        if is_withheld(event) and self.calls and not self._noticed:
            self._add_to_last_call(sequence, event)
        elif isinstance(event, e.EffectsDelivered):
            self._delivered(sequence, event)
        elif hook is not None:
            self._call(hook, sequence, getattr(event, "request_id", ""), event, 1)
        elif isinstance(event, e.CacheReset):
            self._call("reset_cache", sequence, "", event, 1 + self._num_preempted_by_reset())
        elif isinstance(event, e.ExtensionNoted | e.LoadErrorsObserved | e.TransferReported | e.StepReported):
            self._call("update_connector_output", sequence, "", event, self._num_in_output(event))
        elif isinstance(event, e.HookFailed):
            self._failed(sequence, event)
        elif isinstance(event, e.LogNote):
            self._noted(sequence, event)
        elif isinstance(event, e.EndRefused | e.HooksExchanged):
            self._at += 1  # another connector's end, or counts; no call of kvledger's makes these again
        else:
            self._noticed.append((sequence, event))
            self._at += 1

    def _noted(self, sequence: int, event: e.LogNote) -> None:
        if event.text == e.SHUT_DOWN:
            self._call("shutdown", sequence, "", event, 1)
        else:
            if event.text != "connector started" and not event.text.startswith(e.LOG_BEFORE):
                self.left_over.append((sequence, event))
            self._at += 1

    def _delivered(self, sequence: int, event: e.EffectsDelivered) -> None:
        """Add a delivery to the call that made it. A delivery to vLLM can also become a call of its own.

        Only the previous call can have made it. Its hook must deliver to the same receiver (vLLM or the workers), and
        it must have no delivery yet.
        """
        hook = "update_connector_output" if to_vllm(event) else "build_connector_meta"
        last = self.calls[-1] if self.calls else None
        if last is not None and last.hook == hook and not self._noticed and not last.noticed(e.EffectsDelivered):
            self._add_to_last_call(sequence, event)
        elif to_vllm(event):
            self._call(hook, sequence, "", event, 1)
        else:
            self._leave_over(sequence, event)

    def _add_to_last_call(self, sequence: int, event: e.Event) -> None:
        last = self.calls[-1]
        self.calls[-1] = attrs.evolve(last, observed=(*last.observed, (sequence, event)))
        self._at += 1

    def _leave_over(self, sequence: int, event: e.Event) -> None:
        self.left_over.append((sequence, event))
        self._at += 1

    def _call(self, hook: str, sequence: int, request_id: str, main: e.Event, num_entries: int) -> None:
        observed = (*self._noticed, *self._entries[self._at : self._at + num_entries])
        self.calls.append(HookCall(hook, sequence, request_id, main, observed))
        self._noticed = []
        self._at += num_entries

    def _end_of_run(self, start: int, *kinds: type[e.Event]) -> int:
        while start < len(self._entries) and isinstance(self._entries[start][1], kinds):
            start += 1
        return start

    def _num_preempted_by_reset(self) -> int:
        """Return how many of the next observations the reset has recorded, and not the hook call after the reset."""
        end = self._end_of_run(self._at + 1, e.RequestPreempted, e.ChunkKeysObserved)
        run = [event for _, event in self._entries[self._at + 1 : end]]
        preempted = [event.request_id for event in run if isinstance(event, e.RequestPreempted)]
        follows = self._entries[end][1] if end < len(self._entries) else None
        if isinstance(follows, e.StepScheduled) and preempted == sorted(preempted):
            return 0
        return max((number for number, event in enumerate(run, 1) if isinstance(event, e.RequestPreempted)), default=0)

    def _num_in_output(self, event: e.Event) -> int:
        """Return how many observations, from the current one on, belong to one output of the workers.

        An output is recorded in this order: failed loads and their rollbacks, reports about copies, reports about
        steps. No two reports about copies are equal.
        """
        end = self._at
        if isinstance(event, e.ExtensionNoted):  # from a recorder: the workers' report comes first
            end += 1
            while end < len(self._entries) and _continues_output(self._entries[end][1]):
                end += 1
            return self._end_of_run(self._end_of_run(end, e.LoadErrorsObserved), e.TokensRolledBack) - self._at
        if isinstance(event, e.LoadErrorsObserved):
            end = self._end_of_run(end + 1, e.TokensRolledBack)
        seen: set[tuple[tuple[int, ...], bool, tuple[int, ...]]] = set()
        for _, report in self._entries[end:]:
            if not isinstance(report, e.TransferReported) or is_withheld(report):
                break
            copied = (report.job_ids, report.is_repeated, report.moments)
            if copied in seen:
                break
            seen.add(copied)
        return self._end_of_run(end + len(seen), e.StepReported) - self._at

    def _failed(self, sequence: int, event: e.HookFailed) -> None:
        hook = _HOOK_OF_FAILURE.get(event.hook, event.hook)
        if event.hook == "chunk_keys" or self._is_tried_again(event):  # the call goes on
            self._noticed.append((sequence, event))
            self._at += 1
        elif self._belongs_to_last_call(hook, event):
            self._add_to_last_call(sequence, event)
        else:  # the next call will notice again what this one noticed
            self.left_over += [entry for entry in self._noticed if isinstance(entry[1], e.HookFailed)]
            self._noticed = [entry for entry in self._noticed if not isinstance(entry[1], e.HookFailed)]
            self._leave_over(sequence, event)

    def _belongs_to_last_call(self, hook: str, event: e.HookFailed) -> bool:
        """Whether the hook failed in the newest call of `calls`, after this call had recorded its main event."""
        if not self.calls or self._noticed or not self._at:
            return False
        last, before = self.calls[-1], self._entries[self._at - 1]
        if event.hook in _PARTS_AT_THE_END:
            return last.hook == _PARTS_AT_THE_END[event.hook]
        is_next = bool(last.observed) and last.observed[-1] is before
        if not is_next or last.hook != hook or last.request_id != event.request_id:
            return False
        # A step that could not be recorded follows the step before. Only after LedgerCorrupt was it recorded itself.
        return event.hook != "record_step" or "LedgerCorrupt" in event.error

    def _is_tried_again(self, event: e.HookFailed) -> bool:
        """Whether the same call tried again after this failure, and then recorded that the request finished."""
        follows = self._entries[self._at + 1][1] if self._at + 1 < len(self._entries) else None
        is_end = event.hook == "request_finished" and isinstance(follows, e.RequestFinished)
        return is_end and follows.request_id == event.request_id  # type: ignore[union-attr]


def end_of_call(observations: Sequence[SequencedEvent], sequence: int) -> int:
    """Return the sequence number of the last observation in the hook call that recorded the event `sequence`."""
    calls, _ = hook_calls(observations)
    ends = [call.observed[-1][0] for call in calls if call.observed[0][0] <= sequence]
    return ends[-1] if ends else sequence
