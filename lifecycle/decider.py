"""From an observation to decisions: the only part of the core that may refuse.

Used by the live ledger and by replay alike, so that a recorded decision can be made again. It holds no state;
everything it looks at has been folded from the log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvledger.lifecycle import events as e
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.decisions.release import release_if_settled
from kvledger.lifecycle.decisions.reports import ask_after, check_report, give_up_silent, settle
from kvledger.lifecycle.handler_contract import Checked, DecisionRefused
from kvledger.lifecycle.handlers.base import StateHandler
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.tracker import RequestRecord
from kvledger.lifecycle.projections.transfers import Job
from kvledger.lifecycle.rules import Rule
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.turn import Decide, EngineTurn, Turn

Deciding = Callable[[Any, int, RequestState | None], None]
"""(observation, its sequence number, state before): makes all decisions that follow."""

_Methods = dict[RequestState, tuple[Callable[..., None], ...]]
"""The methods of one name that decide anything, by the state that they are asked in."""


class Decider:
    """Routes each observation to the handlers of the state that its request was in; `decide` takes each decision."""

    def __init__(self, core: Core, projections: Projections, decide: Decide) -> None:
        self._core = core
        self._projections = projections
        self._tracker = projections.tracker
        self._transfers = projections.transfers
        self._max_silent_steps = projections.configuration.max_silent_steps
        self._max_silent_ns = projections.configuration.max_silent_ms * 1_000_000
        self._decide = decide
        self._scheduled = self._methods("tokens_scheduled")
        self._settled = self._methods("tokens_settled")
        self._transfer_settled = self._methods("transfer_settled")
        engine: dict[type[e.Event], Deciding] = {
            e.RequestArrived: self._after_arrival,
            e.StepScheduled: self._after_step,
            e.TransferReported: self._after_report,
            e.HookFailed: self._after_hook_failure,
            e.LoadErrorsObserved: self._after_load_errors,
            e.DecisionWithheld: self._after_withheld,
        }
        self._of_requests: dict[type[e.Event], _Methods] = {}
        self.deciding: dict[type[e.Event], Deciding | None] = {}
        """Class of observations -> what is decided upon them; None where nothing ever follows."""
        for event_class in core.events.values():
            deciding = engine.get(event_class)
            if deciding is None and not event_class.is_decision and issubclass(event_class, e.RequestEvent):
                # Legal states only: elsewhere nobody is asked.
                methods = self._methods(event_class.handler_method)
                self._of_requests[event_class] = {
                    state: methods[state] for state in RequestState if (state, event_class) in core.table
                }
                deciding = self._after_request_event
            self.deciding[event_class] = deciding

    def state_of(self, event: e.Event) -> RequestState | None:
        """The state of the event's request now; to be asked before the event is folded."""
        if isinstance(event, e.RequestEvent):
            record = self._tracker.get(event.request_id)
            return None if record is None else record.state
        return None

    # --- one request ---------------------------------------------------------------------------

    def _after_request_event(self, event: e.RequestEvent, cause: int, state_before: RequestState | None) -> None:
        if state_before is None:
            self._illegal(event, cause, "an unknown request")
            return
        methods = self._of_requests[type(event)].get(state_before)
        if methods is None:
            self._illegal(event, cause, f"a request in state {state_before}")
        elif methods:
            record = self._tracker.get(event.request_id)
            if record is not None:
                self._ask(methods, record, cause, event)

    def _ask(
        self, methods: tuple[Callable[..., None], ...], record: RequestRecord, cause: int, *arguments: object
    ) -> None:
        """Give each of the methods its turn; one that raises costs its request the cache, nothing else."""
        turn = Turn(self._projections, self._decide, cause, record)
        try:
            for method in methods:
                method(turn, *arguments)
        except Exception as error:  # noqa: BLE001 -- whatever a handler raises
            if isinstance(error, DecisionRefused):
                rule, detail = Rule.HANDLER_CONTRACT.value, str(error)
            else:
                rule, detail = Rule.HANDLER_RAISED.value, f"{type(error).__name__}: {error}"
            turn.decide(e.InvariantViolated(rule, *record.life, detail, cause))
            turn.decide(e.RequestQuarantined(*record.life, rule, cause))
            if record.state is RequestState.FINISHED and self._tracker.get(record.request_id) is record:
                release_if_settled(turn)

    def _illegal(self, event: e.RequestEvent, cause: int, what: str) -> None:
        self._break(Rule.LEGAL_TRANSITION.value, event.request_id, f"{event.id} happened to {what}", cause)

    def _break(self, rule: str, request_id: str, detail: str, cause: int) -> None:
        """Name the broken rule, and quarantine the request where it is known."""
        record = self._tracker.get(request_id)
        life = (request_id, e.NO_LIFE, e.NO_LIFE) if record is None else record.life
        self._decide(e.InvariantViolated(rule, *life, detail, cause))
        if record is not None and not record.quarantined:
            self._decide(e.RequestQuarantined(*life, rule, cause))

    def _after_arrival(self, event: e.RequestArrived, cause: int, state_before: RequestState | None) -> None:
        if state_before is not None and state_before is not RequestState.FINISHED:
            rule = Rule.LEGAL_TRANSITION.value
            detail = f"{event.id} happened to a request in state {state_before}"
            self._decide(e.InvariantViolated(rule, event.request_id, event.ordinal, 0, detail, cause))

    # --- failures that may concern many ----------------------------------------------------------

    def _after_hook_failure(self, event: e.HookFailed, cause: int, _state: RequestState | None) -> None:
        # A failure that names no request may have kept a whole step from being recorded: nobody's block table can
        # be trusted then.
        for record in tuple(self._tracker):
            concerned = record.request_id == event.request_id or (not event.request_id and record.holds_blocks)
            if concerned and not record.quarantined:
                self._decide(e.RequestQuarantined(*record.life, f"{event.hook} failed", cause))

    def _after_withheld(self, event: e.DecisionWithheld, cause: int, _state: RequestState | None) -> None:
        if event.rule:
            self._break(event.rule, event.request_id, event.detail, cause)

    def _after_load_errors(self, event: e.LoadErrorsObserved, cause: int, _state: RequestState | None) -> None:
        # The scheduler recomputes the owner, but a sharer may go on with what is not there (vllm#49250, #55297).
        unfilled = frozenset(event.block_ids)
        for record in tuple(self._tracker):
            if not unfilled.isdisjoint(self._projections.blocks.held(record.request_id)):
                reason = "holds blocks that could not be filled"
                self._decide(e.RequestQuarantined(*record.life, reason, cause))

    # --- steps -----------------------------------------------------------------------------------

    def _after_step(self, event: e.StepScheduled, cause: int, _state: RequestState | None) -> None:
        record_of = self._tracker.of
        for advanced in event.advanced:
            record = record_of(advanced[0])
            if record is not None and (methods := self._scheduled[record.state]):
                self._ask(methods, record, cause)
        for ordinal, first_chunk, num_settled_tokens in event.settled:
            record = record_of(ordinal)
            if record is not None and (methods := self._settled[record.state]):
                self._ask(methods, record, cause, first_chunk, num_settled_tokens)
        turn = EngineTurn(self._projections, self._decide, cause)
        overdue_step = self._tracker.num_steps - self._max_silent_steps
        for job in self._transfers.unheard(overdue_step, event.time_ns - self._max_silent_ns):
            if job.is_asked_after:
                give_up_silent(turn, job)
                self._after_settled(job, cause)
            else:
                ask_after(turn, job, before_forward=False)

    # --- reports -----------------------------------------------------------------------------------

    def _after_report(self, event: e.TransferReported, cause: int, _state: RequestState | None) -> None:
        turn = EngineTurn(self._projections, self._decide, cause)
        transfers = self._transfers
        job = transfers.get(event.job_id)
        if job is None or job.told_twice or event.ranks_failed or event.ranks_done != transfers.all_ranks:
            check_report(turn, event)
        if job is not None and transfers.is_reported(job):
            settle(turn, job)
            self._after_settled(job, cause)

    def _after_settled(self, job: Job, cause: int) -> None:
        record = self._tracker.of(job.ordinal)
        if record is not None and (methods := self._transfer_settled[record.state]):
            self._ask(methods, record, cause, job)

    def _methods(self, name: str) -> _Methods:
        found: _Methods = {}
        decides_nothing = getattr(StateHandler, name, None)
        for state in RequestState:
            methods = (getattr(handler, name, None) for handler in self._core.handlers[state])
            found[state] = tuple(
                Checked.unless_own(method, self._core, self._projections)
                for method in methods
                if method is not None and getattr(method, "__func__", method) is not decides_nothing
            )
        return found
