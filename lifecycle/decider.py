"""From an observation to decisions: the only part of the core that may refuse.

Used by the live ledger and by replay alike, so that a recorded decision can be made again. It holds no state;
everything it looks at has been folded from the log.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvledger.lifecycle import events as e
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.decisions.reports import (
    ask_after,
    check_report,
    give_up_silent,
    give_up_unfenced,
    release_if_settled,
    settle,
)
from kvledger.lifecycle.errors import described, raise_if_unstoppable
from kvledger.lifecycle.events import triggers_of
from kvledger.lifecycle.handler_contract import Checked, DecisionRefused
from kvledger.lifecycle.handlers import StateHandler
from kvledger.lifecycle.machine import Standing
from kvledger.lifecycle.projections import Projections, before_of
from kvledger.lifecycle.projections.base import Before, Subject
from kvledger.lifecycle.projections.copies import Copy
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.rules import Rule
from kvledger.lifecycle.states import BlocksRegion, RequestState, TrustRegion, WorkRegion
from kvledger.lifecycle.turn import Decide, EngineTurn, Turn

Deciding = Callable[[Any, int, Subject], None]
"""(observation, its sequence number, its subject from before the fold): makes all decisions that follow."""

_Methods = tuple[Callable[..., None], ...]
"""Those of one name that decide anything, in one state."""


class Decider:
    """Routes each observation to the handlers of the state that its request was in; `decide` takes each decision."""

    def __init__(self, core: Core, projections: Projections, decide: Decide) -> None:
        self._core = core
        self._handlers = core.handlers_of_run()
        self._projections = projections
        self._tracker = projections.tracker
        self._jobs = projections.jobs
        self._owed = projections.owed
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
        self._of_requests: dict[str, dict[Standing, _Methods]] = {}
        """Trigger -> phase and blocks in which it is legal -> who is asked."""
        self.deciding: dict[type[e.Event], Deciding | None] = {}
        """Class of observations -> what is decided upon them; None where nothing ever follows."""
        for event_class in core.events.values():
            deciding = engine.get(event_class)
            if deciding is None and not event_class.is_decision and issubclass(event_class, e.RequestEvent):
                methods = self._methods(event_class.handler_method)
                for trigger in triggers_of(event_class):
                    legal = core.tables.legal.get(trigger, {})
                    self._of_requests[trigger] = {standing: methods[standing[0]] for standing in legal}
                deciding = self._after_request_event
            self.deciding[event_class] = deciding

    # --- one request ---------------------------------------------------------------------------

    def _after_request_event(self, event: e.RequestEvent, cause: int, subject: Subject) -> None:
        record, before = subject.request, subject.before
        if record is None or before is None:
            detail = f"{event.id} happened to an unknown request"
            self._break(Rule.LEGAL_TRANSITION.value, event.request_id, detail, cause)
            return
        methods = self._of_requests[subject.trigger].get((before.state, before.blocks))
        if methods is None:
            self._illegal(record, event.id, before, cause)
        elif methods:
            self._ask(methods, record, before, cause, event)

    def _ask(self, methods: _Methods, record: RequestRecord, before: Before, cause: int, *arguments: object) -> None:
        """Give each of the methods its turn; one that raises costs its request the cache, nothing else."""
        turn = Turn(self._projections, self._decide, cause, record, before)
        try:
            for method in methods:
                method(turn, *arguments)
        except BaseException as error:  # noqa: BLE001 -- whatever a handler raises
            raise_if_unstoppable(error)
            if isinstance(error, DecisionRefused):
                rule, detail = Rule.HANDLER_CONTRACT.value, str(error)
            else:
                rule, detail = Rule.HANDLER_RAISED.value, described(error)
            turn.decide(e.InvariantViolated(rule, *record.life, detail, cause))
            turn.decide(e.RequestQuarantined(*record.life, rule, cause))
            if record.state is RequestState.FINISHED and self._tracker.get(record.request_id) is record:
                release_if_settled(turn)

    def _illegal(self, record: RequestRecord, trigger: str, before: Before, cause: int) -> None:
        """Name it, unless the request is helped no more anyway: what was missed once makes much illegal."""
        if record.trust is TrustRegion.TRUSTED:
            detail = f"{trigger} happened to a request in state {before.state}, blocks {before.blocks}"
            self._break(Rule.LEGAL_TRANSITION.value, record.request_id, detail, cause)

    def _break(self, rule: str, request_id: str, detail: str, cause: int) -> None:
        """Name the broken rule, and quarantine the request where it is known."""
        record = self._tracker.get(request_id)
        life = (request_id, e.NO_LIFE, e.NO_LIFE) if record is None else record.life
        self._decide(e.InvariantViolated(rule, *life, detail, cause))
        if record is not None and record.trust is TrustRegion.TRUSTED:
            self._decide(e.RequestQuarantined(*life, rule, cause))

    def _after_arrival(self, event: e.RequestArrived, cause: int, subject: Subject) -> None:
        before = subject.before
        if before is not None and before.state is not RequestState.FINISHED:
            rule = Rule.LEGAL_TRANSITION.value
            detail = f"{event.id} happened to a request in state {before.state}"
            self._decide(e.InvariantViolated(rule, event.request_id, event.ordinal, 0, detail, cause))

    # --- failures that may concern many ----------------------------------------------------------

    def _after_hook_failure(self, event: e.HookFailed, cause: int, _subject: Subject) -> None:
        # A failure that names no request may have kept a whole step from being recorded: nobody's block table can
        # be trusted then.
        for record in tuple(self._tracker):
            holds_blocks = record.blocks is not BlocksRegion.NONE
            concerned = record.request_id == event.request_id or (not event.request_id and holds_blocks)
            if concerned and record.trust is TrustRegion.TRUSTED:
                self._decide(e.RequestQuarantined(*record.life, f"{event.hook} failed", cause))

    def _after_withheld(self, event: e.DecisionWithheld, cause: int, _subject: Subject) -> None:
        if event.rule:
            self._break(event.rule, event.request_id, event.detail, cause)

    def _after_load_errors(self, event: e.LoadErrorsObserved, cause: int, _subject: Subject) -> None:
        # The scheduler recomputes the owner, but a sharer may go on with what is not there (vllm#49250, #55297).
        unfilled = frozenset(event.block_ids)
        for record in tuple(self._tracker):
            if not unfilled.isdisjoint(record.block_ids or ()):
                reason = "holds blocks that could not be filled"
                self._decide(e.RequestQuarantined(*record.life, reason, cause))

    # --- steps -----------------------------------------------------------------------------------

    def _after_step(self, event: e.StepScheduled, cause: int, subject: Subject) -> None:
        record_of, refused = self._tracker.of, subject.refused_rows
        for advanced in event.advanced:
            record = record_of(advanced[0])
            if record is None:
                continue
            if refused and record.ordinal in refused:
                self._illegal(record, "tokens.scheduled", refused[record.ordinal], cause)
            elif methods := self._scheduled[record.state]:
                self._ask(methods, record, before_of(record), cause)
        for ordinal, first_chunk, num_settled_tokens, _ in event.settled:
            record = record_of(ordinal)
            if record is not None and ordinal not in refused and (methods := self._settled[record.state]):
                self._ask(methods, record, before_of(record), cause, first_chunk, num_settled_tokens)
        self._give_up(event, cause)

    def _give_up(self, event: e.StepScheduled, cause: int) -> None:
        """Ask after jobs that are overdue, and give up those for which it is too late."""
        turn = EngineTurn(self._projections, self._decide, cause)
        for job_id in self._owed.lost_fences():
            job = self._jobs.get(job_id)
            if job is not None:
                give_up_unfenced(turn, job)
                self._after_settled(job, cause)
        overdue_step = self._tracker.num_steps - self._max_silent_steps
        for job in self._jobs.overdue(overdue_step, event.time_ns - self._max_silent_ns):
            if job.work is WorkRegion.OVERDUE:
                give_up_silent(turn, job)
                self._after_settled(job, cause)
            else:
                ask_after(turn, job, before_forward=False)

    # --- reports -----------------------------------------------------------------------------------

    def _after_report(self, event: e.TransferReported, cause: int, _subject: Subject) -> None:
        turn = EngineTurn(self._projections, self._decide, cause)
        jobs = self._jobs
        is_plain = event.ranks_done == jobs.all_ranks and not event.ranks_failed
        for job_id, reported in self._owed.reported.items():
            copy = jobs.get(job_id)
            if copy is None or copy.repeated_ranks or not is_plain:
                check_report(turn, event, job_id, reported)
            if copy is not None and jobs.is_reported(copy):
                settle(turn, copy)
                self._after_settled(copy, cause)

    def _after_settled(self, job: Copy, cause: int) -> None:
        record = self._tracker.of(job.ordinal)
        if record is not None and (methods := self._transfer_settled[record.state]):
            self._ask(methods, record, before_of(record), cause, job)

    def _methods(self, name: str) -> dict[RequestState, _Methods]:
        found: dict[RequestState, _Methods] = {}
        decides_nothing = getattr(StateHandler, name, None)
        for state in RequestState:
            methods = ((handler, getattr(handler, name, None)) for handler in self._handlers[state])
            found[state] = tuple(
                self._guarded(handler, method)
                for handler, method in methods
                if method is not None and getattr(method, "__func__", method) is not decides_nothing
            )
        return found

    def _guarded(self, handler: StateHandler, method: Callable[..., None]) -> Callable[..., None]:
        """The method itself only where it is of this package."""
        extension = self._core.extension_of_handler(handler)
        if not extension:
            return Checked.unless_own(method, self._core, self._projections)
        where = f"{type(handler).__qualname__}.{method.__name__}"
        checked = Checked(method, self._core, self._projections, extension)
        return partial(self._projections.extensions.ask, extension, where, checked)
