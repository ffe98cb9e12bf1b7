"""From an observation to decisions: the only function in the core that may refuse.

Used by the live ledger and by replay alike, so that a recorded decision can be made again. It holds no state;
everything it looks at has been folded from the log.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvledger.lifecycle import events as e
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.decisions import MADE, NOTHING, Decisions
from kvledger.lifecycle.decisions.reports import ask_after, check_report, give_up_silent, settle
from kvledger.lifecycle.handler_contract import Checked, DecisionRefused
from kvledger.lifecycle.handlers import HandlerRegistry, StateHandler
from kvledger.lifecycle.handlers.finished import release_if_settled
from kvledger.lifecycle.machine import TABLE, CompiledTable
from kvledger.lifecycle.projections.tracker import RequestRecord
from kvledger.lifecycle.projections.transfers import Job, JobKind
from kvledger.lifecycle.rules import Rule
from kvledger.lifecycle.states import RequestState

Decide = Callable[[Any, int, RequestState | None], Decisions | None]
"""(observation, its sequence number, state before) -> decisions; None says at once that there are none."""

_Methods = dict[RequestState, tuple[Callable[..., Decisions], ...]]
"""The methods of one name that decide anything, by the state that they are asked in."""


class Decider:
    """Routes each observation to the handlers of the state that its request was in."""

    def __init__(self, projections: Projections, handlers: HandlerRegistry, table: CompiledTable = TABLE) -> None:
        self._projections = projections
        self._tracker = projections.tracker
        self._transfers = projections.transfers
        self._max_silent_steps = projections.configuration.max_silent_steps
        self._max_silent_ns = projections.configuration.max_silent_ms * 1_000_000
        self._table = table
        self._scheduled = self._methods(handlers, "tokens_scheduled")
        self._settled = self._methods(handlers, "tokens_settled")
        self._transfer_settled = self._methods(handlers, "transfer_settled")
        self._after: dict[type[e.Event], Decide] = {
            e.RequestArrived: self._after_arrival,
            e.StepScheduled: self._after_step,
            e.TransferReported: self._after_report,
            e.HookFailed: self._after_hook_failure,
            e.LoadErrorsObserved: self._after_load_errors,
            e.DecisionWithheld: self._after_withheld,
        }
        self._deciders = {event_class: self._decider_of(event_class, handlers) for event_class in e.VOCABULARY.values()}

    def state_of(self, event: e.Event) -> RequestState | None:
        """The state of the event's request now; to be asked before the event is folded."""
        if isinstance(event, e.RequestEvent):
            record = self._tracker.get(event.request_id)
            return None if record is None else record.state
        return None

    def decide(self, event: e.Event, cause: int, state_before: RequestState | None) -> Decisions:
        """The decisions that follow from a folded observation; `cause` is its sequence number.

        Each decision must be folded before the next one is asked for.
        """
        decide = self._deciders[type(event)]
        return NOTHING if decide is None else decide(event, cause, state_before) or NOTHING

    def decider_of(self, event_class: type[e.Event]) -> Decide | None:
        """What `decide` does with the observations of a class, for who decides many; None where nothing follows."""
        return self._deciders[event_class]

    def _decider_of(self, event_class: type[e.Event], handlers: HandlerRegistry) -> Decide | None:
        after = self._after.get(event_class)
        if after is not None or event_class.is_decision or not issubclass(event_class, e.RequestEvent):
            return after
        # Legal states only; nothing follows where no handler has a method of that name, or one that does nothing.
        methods = self._methods(handlers, event_class.handler_method)
        plan = {state: methods[state] for state in RequestState if (state, event_class) in self._table}
        return partial(self._after_request_event, plan)

    def _after_request_event(
        self,
        plan: _Methods,
        event: e.RequestEvent,
        cause: int,
        state_before: RequestState | None,
    ) -> Decisions | None:
        if state_before is None:
            return self._illegal(event, cause, "an unknown request")
        methods = plan.get(state_before)
        if not methods:
            return None if methods is not None else self._illegal(event, cause, f"a request in state {state_before}")
        record = self._tracker.get(event.request_id)
        if record is None:
            return None
        return self._guarded(methods, record, cause, event, record, self._projections)

    def _illegal(self, event: e.RequestEvent, cause: int, what: str) -> Decisions:
        rule = Rule.LEGAL_TRANSITION.value
        yield e.InvariantViolated(
            rule=rule, request_id=event.request_id, detail=f"{event.id} happened to {what}", cause=cause
        )
        if self._tracker.get(event.request_id) is not None:
            yield e.RequestQuarantined(request_id=event.request_id, reason=rule, cause=cause)

    def _after_arrival(self, event: e.RequestArrived, cause: int, state_before: RequestState | None) -> Decisions:
        if state_before is not None and state_before is not RequestState.FINISHED:
            rule = Rule.LEGAL_TRANSITION.value
            detail = f"{event.id} happened to a request in state {state_before}"
            yield e.InvariantViolated(rule=rule, request_id=event.request_id, detail=detail, cause=cause)

    def _after_hook_failure(self, event: e.HookFailed, cause: int, _state: RequestState | None) -> Decisions:
        # A failure that names no request may have kept a whole step from being recorded: nobody's block table can
        # be trusted then.
        for record in tuple(self._tracker):
            concerned = record.request_id == event.request_id or (not event.request_id and record.holds_blocks)
            if concerned and not record.quarantined:
                yield e.RequestQuarantined(request_id=record.request_id, reason=f"{event.hook} failed", cause=cause)

    def _after_withheld(self, event: e.DecisionWithheld, cause: int, _state: RequestState | None) -> Decisions:
        if not event.rule:
            return
        yield e.InvariantViolated(rule=event.rule, request_id=event.request_id, detail=event.detail, cause=cause)
        record = self._tracker.get(event.request_id)
        if record is not None and not record.quarantined:
            yield e.RequestQuarantined(request_id=event.request_id, reason=event.rule, cause=cause)

    def _after_load_errors(self, event: e.LoadErrorsObserved, cause: int, _state: RequestState | None) -> Decisions:
        # The scheduler recomputes the owner, but a sharer may go on with what is not there (vllm#49250, #55297).
        unfilled = frozenset(event.block_ids)
        for record in tuple(self._tracker):
            if not unfilled.isdisjoint(self._projections.blocks.held(record.request_id)):
                reason = "holds blocks that could not be filled"
                yield e.RequestQuarantined(request_id=record.request_id, reason=reason, cause=cause)

    def _after_step(self, event: e.StepScheduled, cause: int, _state: RequestState | None) -> Decisions | None:
        if not event.advanced and not event.settled and not self._unheard(event):
            return None
        return self._step_decisions(event, cause)

    def _step_decisions(self, event: e.StepScheduled, cause: int) -> Decisions:
        projections, record_of = self._projections, self._tracker.by_ordinal
        # Every progress and every save begins here: as in `_guarded`, without another generator for each.
        methods_of = self._scheduled
        for advanced in event.advanced:
            record = record_of(advanced[0])
            if record is not None:
                try:
                    for method in methods_of[record.state]:
                        yield from method(record, projections, cause)
                except Exception as error:  # noqa: BLE001 -- as in `_guarded`
                    yield from self._raised(error, record, cause)
        methods_of = self._settled
        for ordinal, first_chunk, num_settled_tokens in event.settled:
            record = record_of(ordinal)
            if record is not None:
                try:
                    for method in methods_of[record.state]:
                        yield from method(record, first_chunk, num_settled_tokens, projections, cause)
                except Exception as error:  # noqa: BLE001 -- as in `_guarded`
                    yield from self._raised(error, record, cause)
        unheard = self._unheard(event)
        if unheard:
            yield from self._after_silence(unheard, cause)

    def _after_silence(self, unheard: list[Job], cause: int) -> Decisions:
        for job in unheard:
            if job.is_asked_after:
                yield from give_up_silent(job, self._projections, cause)
                yield from self._after_settled(job, cause)
            else:
                yield from ask_after(job, cause, before_forward=False)

    def _unheard(self, event: e.StepScheduled) -> list[Job]:
        overdue_step = self._tracker.num_steps - self._max_silent_steps
        return self._transfers.unheard(overdue_step, event.time_ns - self._max_silent_ns)

    def _after_report(self, event: e.TransferReported, cause: int, _state: RequestState | None) -> Decisions | None:
        transfers = self._transfers
        job = transfers.get(event.job_id)
        if job is None or job.told_twice or event.ranks_failed or event.ranks_done != transfers.all_ranks:
            return self._after_odd_report(event, job, cause)
        if job.kind is JobKind.SAVE and not job.ranks_failed and not job.is_doubtful:
            # The completion of a save moves no state. So nothing more follows where nobody waits for jobs now.
            record = self._tracker.by_ordinal(job.ordinal)
            if record is None or not self._transfer_settled[record.state]:
                return iter((e.SaveCompleted(job.request_id, job.generation, job.job_id, cause),))
        return self._settle(job, cause)

    def _after_odd_report(self, event: e.TransferReported, job: Job | None, cause: int) -> Decisions:
        yield from check_report(event, self._projections, cause)
        if job is not None:
            yield from self._settle(job, cause)

    def _settle(self, job: Job, cause: int) -> Decisions:
        if self._transfers.is_reported(job):
            yield from settle(job, self._projections, cause)
            yield from self._after_settled(job, cause)

    def _after_settled(self, job: Job, cause: int) -> Decisions:
        record = self._tracker.by_ordinal(job.ordinal)
        if record is not None and (methods := self._transfer_settled[record.state]):
            yield from self._guarded(methods, record, cause, job, record, self._projections)

    def _guarded(
        self, methods: tuple[Callable[..., Decisions], ...], record: RequestRecord, cause: int, *arguments: object
    ) -> Decisions:
        """The decisions of methods, and what follows where one of them raises."""
        if len(methods) > 1:
            return self._one_after_another(methods, record, cause, arguments)
        try:
            decisions = methods[0](*arguments, cause)
        except Exception as error:  # noqa: BLE001 -- any handler's failure costs its request the cache, nothing else
            return self._raised(error, record, cause)
        return decisions if type(decisions) is MADE else self._watched(decisions, record, cause)

    def _one_after_another(
        self,
        methods: tuple[Callable[..., Decisions], ...],
        record: RequestRecord,
        cause: int,
        arguments: tuple[object, ...],
    ) -> Decisions:
        try:
            for method in methods:
                yield from method(*arguments, cause)
        except Exception as error:  # noqa: BLE001 -- as in `_guarded`
            yield from self._raised(error, record, cause)

    def _watched(self, decisions: Decisions, record: RequestRecord, cause: int) -> Decisions:
        try:
            yield from decisions
        except Exception as error:  # noqa: BLE001 -- as in `_guarded`
            yield from self._raised(error, record, cause)

    def _raised(self, error: Exception, record: RequestRecord, cause: int) -> Decisions:
        if isinstance(error, DecisionRefused):
            rule, detail = Rule.HANDLER_CONTRACT.value, str(error)
        else:
            rule, detail = Rule.HANDLER_RAISED.value, f"{type(error).__name__}: {error}"
        yield e.InvariantViolated(rule=rule, request_id=record.request_id, detail=detail, cause=cause)
        yield e.RequestQuarantined(request_id=record.request_id, reason=rule, cause=cause)
        if record.state is RequestState.FINISHED and self._tracker.get(record.request_id) is record:
            yield from release_if_settled(record, self._projections, cause)

    def _methods(self, handlers: HandlerRegistry, name: str) -> _Methods:
        found: _Methods = {}
        decides_nothing = getattr(StateHandler, name, None)
        for state in RequestState:
            methods = (getattr(handler, name, None) for handler in handlers.of(state))
            found[state] = tuple(
                Checked.unless_own(method, self._projections, self._table)
                for method in methods
                if method is not None and getattr(method, "__func__", method) is not decides_nothing
            )
        return found
