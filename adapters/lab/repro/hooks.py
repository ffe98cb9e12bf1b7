"""Runs a recording again on the real connector: makes every recorded hook call, with vLLM's own objects.

The connector reads more of a request than it records. This module derives the missing state. Token ids come from chunk
keys. Tokens in flight come from settled tokens. The requests of a step come from the step's event, and from the steady
requests, which the event leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvledger.adapters.lab.repro.calls import HookCall, could_not_be_written, is_withheld
from kvledger.adapters.lab.repro.connector import ConnectorUnderTest, SchedulerHalf
from kvledger.adapters.lab.repro.recording import JOB_ISSUED, Recording
from kvledger.adapters.lab.repro.requests import LiveRequests
from kvledger.adapters.lab.repro.run import Run
from kvledger.adapters.lab.repro.scheduler import Incarnation, ScheduledTokens, SchedulerModel, runs_async
from kvledger.adapters.lab.repro.vllm_objects import ScheduledRequest, Step
from kvledger.lifecycle import events as e

_UNRECORDED = "unrecorded request"
"""Request id for tokens in a step whose requests are not in the log."""


class HookRun(Run):
    """Runs a recording again by calling the hooks of a connector. The connector may be of any class."""

    def __init__(self, recording: Recording, connector: SchedulerHalf, *, is_async: bool) -> None:
        super().__init__(recording, connector.core)
        self._connector = connector
        self._record = SchedulerModel(is_async=is_async)
        self._ended: set[str] = set()
        self._admitted: dict[str, None] = {}
        self._preempted: set[str] = set()
        self._live = LiveRequests(recording, connector, self._record)
        self._calls: dict[str, Callable[[HookCall, Any], object]] = {
            "on_new_request": self._arrive,
            "get_num_new_matched_tokens": self._look_up,
            "update_state_after_alloc": self._allocate,
            "build_connector_meta": self._step,
            "update_connector_output": self._output,
            "request_finished": self._finish,
            "reset_cache": self._reset,
            "shutdown": lambda _call, _main: connector.shutdown(),
        }
        self._outcome.take(connector.take_events(), "the start", 1)

    def _make(self, call: HookCall) -> bool:
        make = self._calls.get(call.hook)
        if make is None:
            self._outcome.left_out.append(f"event {call.sequence}: {call.hook} is not a hook of this connector")
            return True
        self._connector.now_ns = max(getattr(event, "time_ns", 0) for _, event in call.observed)
        self._preempted.update(event.request_id for event in call.noticed(e.RequestPreempted))
        goes_on = self._calls_hook(make, call)
        self._take(call, self._connector.take_events())
        return goes_on

    def _calls_hook(self, make: Callable[[HookCall, Any], object], call: HookCall) -> bool:
        """Call the hook. Return whether the engine continues after the call."""
        raise NotImplementedError

    def _take(self, call: HookCall, events: Sequence[tuple[int, e.Event]]) -> None:
        self._outcome.take(events, call.hook, call.sequence)

    # --- hooks ------------------------------------------------------------------------------------

    def _arrive(self, _call: HookCall, main: e.RequestArrived) -> None:
        incarnation = self._record.arrived(main)
        self._connector.on_new_request(
            main.request_id,
            self._live.prompt(incarnation),
            skips_prefix_cache=main.skips_prefix_cache,
            is_salted=main.is_salted,
        )

    def _look_up(self, call: HookCall, main: e.LookupRequested) -> None:
        incarnation = self._known(call, main.num_tokens)
        self._live.notice(call)
        self._record.looked_up(incarnation, main)
        self._live.write_tokens(incarnation, main.num_tokens)
        answer, _ = self._connector.get_num_new_matched_tokens(main.request_id, main.num_computed_tokens)
        self._answered(main.request_id, call.sequence, answer)

    def _allocate(self, call: HookCall, main: e.BlocksAllocated) -> None:
        incarnation = self._known(call, len(main.block_ids) * self._recording.configuration.block_size)
        self._live.notice(call)
        for event in call.noticed(e.SessionContinued):
            self._live.next_turn(incarnation, event)
        taken = self._loadable(main)
        incarnation.num_missing_tokens += main.num_external_tokens - taken
        self._connector.update_state_after_alloc(main.request_id, main.block_ids, taken)
        self._record.allocated(incarnation, main)
        self._admitted.pop(main.request_id, None)
        self._admitted[main.request_id] = None

    def _step(self, call: HookCall, main: e.StepScheduled) -> None:
        self._before_step()
        zeroed = self._zeroed(call)
        self._live.notice(call)
        settled = {entry.ordinal: entry for entry in main.settled}
        observed = {event.request_id: event.block_ids for event in call.noticed(e.BlockTableObserved)}
        scheduled = [
            part
            for part in self._record.scheduled(main)
            if self._live.incarnation(part.incarnation.request_id) is part.incarnation
        ]
        block_tables: dict[str, Sequence[int]] = {}
        for part in scheduled:
            incarnation = part.incarnation
            self._live.prepare(part, settled.get(incarnation.ordinal))
            incarnation.block_ids = [*observed.get(incarnation.request_id, incarnation.block_ids), *part.new_block_ids]
            block_tables[incarnation.request_id] = incarnation.block_ids
        for incarnation in self._record.paused(main):  # the connector still checks whether they have filled a chunk
            if self._live.incarnation(incarnation.request_id) is incarnation:
                paused = ScheduledTokens(incarnation, self._record.num_computed_tokens(incarnation), 0, None, ())
                self._live.prepare(paused, settled.get(incarnation.ordinal))
        parts = self._in_order(main, scheduled)
        num_unknown = main.num_scheduled_tokens - sum(part.num_scheduled_tokens for part in parts)
        if num_unknown > 0:
            parts.append(ScheduledRequest(_UNRECORDED, 0, num_unknown))
        # A reset preempts between two steps. The next step names the requests, even if a lookup noticed it before.
        preempted, ended = frozenset(self._preempted), frozenset(self._ended)
        step = Step(parts, preempted, block_tables, zeroed, ended, tuple(self._admitted))
        self._preempted, self._ended, self._admitted = set(), set(), {}
        self._connector.build_connector_meta(step)
        self._record.stepped(main, scheduled)

    def _in_order(self, step: e.StepScheduled, scheduled: Sequence[ScheduledTokens]) -> list[ScheduledRequest]:
        """Return the scheduled requests in vLLM's order: new, running, resumed.

        Model runner V2 lists resumed requests among the new requests.
        """
        num_new = 0
        while num_new < len(scheduled) and scheduled[num_new].incarnation.is_admitted:
            num_new += 1
        rest = scheduled[num_new:]
        running = self._record.in_running_order(step, [part for part in rest if not part.incarnation.is_admitted])
        resumed = [part for part in rest if part.incarnation.is_admitted]
        return [
            ScheduledRequest(
                part.incarnation.request_id,
                part.num_computed_tokens,
                part.num_scheduled_tokens,
                part.new_block_ids,
                is_new=number < num_new,
                is_resumed=number >= num_new and part.incarnation.is_admitted,
            )
            for number, part in enumerate([*scheduled[:num_new], *running, *resumed])
        ]

    def _zeroed(self, call: HookCall) -> tuple[int, ...]:
        if not self._recording.zeroes_new_blocks:
            return ()
        lost = [event for event in call.noticed(e.RequestPreempted) if event.blocks_zeroed]
        incarnations = [
            incarnation for event in lost if (incarnation := self._record.get(event.request_id)) is not None
        ]
        return tuple(block_id for incarnation in incarnations for block_id in incarnation.block_ids)

    def _before_step(self) -> None:
        """Make calls that are not in the recording, but that must come before a step."""

    def _output(self, call: HookCall, main: Any) -> None:  # noqa: ANN401 -- of several kinds
        raise NotImplementedError

    def _finish(self, call: HookCall, main: e.RequestFinished) -> None:
        incarnation = self._known(call, main.num_tokens)
        self._live.notice(call)
        self._live.end(incarnation, main)
        self._ended.add(main.request_id)
        self._connector.request_finished(main.request_id, main.status, self._table_at_end(incarnation, main))
        self._record.finished(incarnation)
        del self._connector.requests[main.request_id]

    def _table_at_end(self, incarnation: Incarnation, _main: e.RequestFinished) -> Sequence[int]:
        return incarnation.block_ids

    def _reset(self, call: HookCall, _main: e.CacheReset) -> None:
        self._live.notice(call)
        self._connector.connector.reset_cache()

    def _known(self, call: HookCall, num_tokens: int) -> Incarnation:
        """Return the request that a call is about. If the log does not have its arrival, create the request."""
        incarnation = self._live.incarnation(call.request_id)
        if incarnation is None:
            incarnation = self._record.arrived(e.RequestArrived(call.request_id, -call.sequence, num_tokens, 0))
            self._connector.accept(call.request_id, self._live.prompt(incarnation))
        return incarnation


class LedgerRun(HookRun):
    """Calls the hooks of kvledger's own connector. If a hook fails, the engine continues."""

    def __init__(self, recording: Recording, handlers: Sequence[str]) -> None:
        connector = ConnectorUnderTest(
            recording.configuration,
            speculates=recording.speculates,
            zeroes_new_blocks=recording.zeroes_new_blocks,
            handlers=handlers,
        )
        self._ours = connector
        is_async = runs_async(recording.observations, recording.configuration.chunk_size)
        super().__init__(recording, connector, is_async=is_async)

    def _calls_hook(self, make: Callable[[HookCall, Any], object], call: HookCall) -> bool:
        if call.noticed(e.PrefixCacheReset):
            self._ours.note_reset()
        self._ours.is_log_written = not any(could_not_be_written(event) for _, event in call.observed)
        make(call, call.main)
        self._ours.is_log_written = True
        return True

    def _take(self, call: HookCall, events: Sequence[tuple[int, e.Event]]) -> None:
        """Take the events that the call wrote. Match new jobs and deliveries to those in the recording."""
        super()._take(call, events)
        waiting = list(call.observed)
        recorded: dict[int, int] = {}
        for sequence, event in events:
            if not event.is_decision:
                recorded[sequence] = _recorded_sequence(event, waiting, call.sequence)
                if isinstance(event, e.EffectsDelivered):
                    self._deliveries[recorded[sequence]] = sequence
            elif isinstance(event, JOB_ISSUED):
                self._issued(event, recorded.get(event.cause, call.sequence))

    def _before_step(self) -> None:
        overdue = self._overdue_reports(self._connector.now_ns)
        if overdue:
            self._ours.update_connector_output(overdue)

    def _output(self, call: HookCall, _main: e.Event) -> None:
        load_errors = [block_id for event in call.noticed(e.LoadErrorsObserved) for block_id in event.block_ids]
        if load_errors:
            self._live.take_back(call.noticed(e.TokensRolledBack))
        reported = [event for event in call.noticed(e.TransferReported) if not is_withheld(event)]
        reports = [report for event in reported if (report := self._of_present_jobs(event)) is not None]
        outputs = map(self._present_output, call.noticed(e.StepReported))
        steps = [step for step in outputs if step is not None]
        ends = [ordinal for delivered in call.noticed(e.EffectsDelivered) for ordinal in delivered.reported]
        self._ours.update_connector_output(reports, load_errors, ends, steps)

    def _table_at_end(self, incarnation: Incarnation, main: e.RequestFinished) -> Sequence[int]:
        configuration = self._recording.configuration
        num_blocks = -(-main.num_settled_tokens // configuration.block_size)
        return incarnation.block_ids[: num_blocks * len(configuration.windows)]


def _recorded_sequence(event: e.Event, waiting: list[tuple[int, e.Event]], otherwise: int) -> int:
    """Return the sequence number of the observation in `waiting` that `event` repeats. Remove this observation.

    If `event` repeats none of them, return `otherwise`.
    """
    request_id = getattr(event, "request_id", "")
    for place, (sequence, recorded) in enumerate(waiting):
        if type(recorded) is type(event) and getattr(recorded, "request_id", "") == request_id:
            del waiting[place]
            return sequence
    return otherwise
