"""The ledger: records and folds an observation, decides on it, and records and folds the decisions.

Only the scheduler side of the connector writes to a `Ledger`. The ledger reads no clock and does no I/O: times come
with the observations, and frames go to the sink.

`Decider` makes the decisions on an observation. In the core, only the `Decider` and the functions in `decisions/` may
refuse an observation; projections fold all events. The `Decider` keeps no state: everything that it reads was folded
from the log. A replay uses the `Decider` to make recorded decisions again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events
from kvledger.lifecycle.configuration import LedgerConfiguration
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
from kvledger.lifecycle.events import Event, triggers_of
from kvledger.lifecycle.handler_contract import Checked, DecisionRefused
from kvledger.lifecycle.handlers import StateHandler
from kvledger.lifecycle.input_checks import check_observation
from kvledger.lifecycle.machine import Standing
from kvledger.lifecycle.projections import Projections, before_of
from kvledger.lifecycle.projections.base import Before, Subject
from kvledger.lifecycle.projections.copies import Channel, Copy, Ready
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.rules import Rule
from kvledger.lifecycle.states import BlocksRegion, RequestState, TrustRegion, WorkRegion
from kvledger.lifecycle.turn import Decide, EngineTurn, Turn, TurnEnded


class EventSink(Protocol):
    """Stores committed events. `kvledger.storage.events` has several classes of sinks."""

    @property
    def next_sequence(self) -> int:
        """Sequence number of the next event."""

    def append(self, payload: bytes, num_events: int, *, expected_sequence: int | None = None) -> int:
        """Store one frame completely or not at all; return the sequence number of its first event."""


class LedgerCorrupt(RuntimeError):
    """A projection failed to fold an event. Its state cannot be trusted, so the ledger decides nothing any more.

    Args:
        message: what failed, and where.
        decisions: decisions that were made before the failure. Carry them out, because they are recorded.
    """

    def __init__(self, message: str, decisions: Sequence[Event] = ()) -> None:
        super().__init__(message)
        self.decisions = tuple(decisions)


class Ledger:
    """Records observations, and the decisions on them. `observe` only adds events, and never changes recorded ones.

    Args:
        core: the core that decides and folds.
        configuration: the configuration of the log.
        sink: stores the frames.
        projections: the folded state of all events before `next_sequence`; None for an empty log.
        next_sequence: sequence number of the next event; None: `sink.next_sequence`.
        checks_input: whether `observe` refuses events with wrong fields. Set it in a program that makes its own events.
            Correct events give the same log with and without these checks.
    """

    def __init__(
        self,
        core: Core,
        configuration: LedgerConfiguration,
        sink: EventSink,
        *,
        projections: Projections | None = None,
        next_sequence: int | None = None,
        checks_input: bool = False,
    ) -> None:
        self.core = core
        self.projections = core.new_projections(configuration) if projections is None else projections
        self._decider = Decider(core, self.projections, self._record)
        self._sink = sink
        self._checks_input = checks_input
        self._uncommitted: list[Event] = []
        self.next_sequence = sink.next_sequence if next_sequence is None else next_sequence
        self._decisions: list[Event] = []
        """Decisions that are recorded, but that `observe` has not returned yet."""
        self._corrupt: LedgerCorrupt | None = None
        self._cause = 0
        """Sequence number of the latest observation."""
        self._raised = self.projections.extensions.raised
        self.projections.extensions.on_raised = self._stop_extensions
        self.on_recorded: Callable[[Event], None] | None = None
        """Function that gets each event when it is recorded, unless the ledger is corrupt. It must not raise."""

    @property
    def next_ordinal(self) -> int:
        """Ordinal of the next request that arrives, different from all others in the log."""
        return self.projections.tracker.num_arrived

    @property
    def is_corrupt(self) -> bool:
        """Whether a projection has failed to fold, so that the ledger decides nothing any more."""
        return self._corrupt is not None

    @property
    def num_uncommitted(self) -> int:
        """Events since the last commit."""
        return len(self._uncommitted)

    def observe(self, event: Event) -> list[Event]:
        """Record and fold an observation, decide on it, record and fold the decisions; return the decisions.

        A corrupt ledger decides nothing. It records the event and folds it into `projections.owed` only.

        Raises:
            ValueError: with `checks_input`, if the event is no observation, a field has a wrong type or is negative, an
                arrival has another ordinal than `next_ordinal`, or a `num_settled_tokens` counts more tokens than
                were computed or loaded. Nothing is recorded in these cases.
            LedgerCorrupt: a projection failed during this call. Events that are already recorded stay and will be
                committed. The error contains the decisions among them.
        """
        if self._checks_input:
            check_observation(event, self.core, self.projections.tracker)
        if self._corrupt is not None:
            sequence = self.next_sequence
            self.next_sequence = sequence + 1
            self._uncommitted.append(event)
            self.projections.fold_owed(event, sequence)
            return []
        deciding = self._decider.deciding[type(event)]
        self._cause = cause = self.next_sequence
        try:
            subject = self._record(event)
            if deciding is not None:
                deciding(event, cause, subject)
        except TurnEnded:
            pass  # the ledger has become corrupt
        decisions, self._decisions = self._decisions, []
        if self._corrupt is not None:
            raise self._corrupt
        return decisions

    def ready(self, channel: Channel) -> Ready:
        """Return the jobs and ends that are pending on a channel. They stay pending until `advance` is called.

        Call `advance` in the same hook.
        """
        return self.projections.owed.ready(channel)

    def advance(self, ready: Ready) -> None:
        """Record that `ready` was delivered. Record nothing if `ready` is empty.

        Raises:
            LedgerCorrupt: see `observe`. The delivery is recorded nevertheless.
        """
        delivered = effects_delivered(ready)
        if delivered is not None:
            self.observe(delivered)

    def commit(self) -> None:
        """Write the events since the last commit to the sink, as one frame.

        Raises:
            OSError: the frame could not be written. The events stay for the next commit.
            Exception: the sink refused the frame. The events are dropped, because the sink would refuse them again.
        """
        events = self._uncommitted
        if not events:
            return
        first_sequence = self.next_sequence - len(events)
        try:
            self._sink.append(self._encoded(events), len(events), expected_sequence=first_sequence)
        except OSError:
            raise
        except BaseException as error:
            raise_if_unstoppable(error)
            self._uncommitted = []  # the sink will never take them
            raise
        self._uncommitted = []

    def _encoded(self, events: list[Event]) -> bytes:
        try:
            return encode_events(events)
        except BaseException as error:  # noqa: BLE001 -- one event that cannot be written must not cost the others their place
            raise_if_unstoppable(error)
            return encode_events([self._writable(event) for event in events])

    def _writable(self, event: Event) -> Event:
        try:
            encode_events([event])
        except BaseException as error:  # noqa: BLE001 -- see above
            raise_if_unstoppable(error)
            # Not a `LogNote`: the log lacks an event, and readers report a failed hook.
            return e.HookFailed("commit", "", f"{event.id} cannot be encoded: {type(error).__name__}", 0)
        return event

    def _record(self, event: Event) -> Subject:
        """Record and fold an event; return the event's subject."""
        if self._corrupt is not None:
            raise TurnEnded
        sequence = self.next_sequence
        self.next_sequence = sequence + 1
        self._uncommitted.append(event)
        if event.is_decision:  # even if it cannot be folded
            self._decisions.append(event)
        if self.on_recorded is not None:
            self.on_recorded(event)
        try:
            subject = self.projections.fold(event, sequence)
        except BaseException as error:
            raise_if_unstoppable(error)
            message = f"folding {event.id} at sequence {sequence} failed: {described(error)}"
            self._corrupt = LedgerCorrupt(message, self._decisions)
            self._corrupt.__cause__ = error
            raise TurnEnded from error
        if self._raised:
            self._stop_extensions()
        return subject

    def _stop_extensions(self) -> None:
        for decision in self.projections.extensions.stops(self._cause):
            self._record(decision)


_NOTHING_DELIVERED = e.EffectsDelivered((), (), (), (), (), (), ())


def effects_delivered(ready: Ready) -> e.EffectsDelivered | None:
    """Return the event which records that `ready` was delivered; None if `ready` is empty."""
    handed_over = e.EffectsDelivered(
        tuple([job.job_id for job in ready.jobs]),
        tuple([awaited.job_id for awaited in ready.awaited]),
        ready.block_ids,
        tuple(ready.failed),
        tuple(ready.sent),
        tuple(ready.received),
        ready.reported,
    )
    return None if handed_over == _NOTHING_DELIVERED else handed_over


Deciding = Callable[[Any, int, Subject], None]
"""Makes the decisions on an observation, given the observation, its sequence number, and its subject."""

_Methods = tuple[Callable[..., None], ...]
"""Handler methods of one name for one state. Methods that decide nothing are left out."""


class Decider:
    """Calls the handlers of the state that a request had before the observation. Passes their decisions to `decide`."""

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
        """Trigger → (phase, blocks) in which the trigger is legal → methods to call."""
        self.deciding: dict[type[e.Event], Deciding | None] = {}
        """Class of events → function that decides on them; None if no decision is ever made on them."""
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
        """Call the methods in one turn. If one raises, quarantine the request and skip the others."""
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
        """Record that an event is illegal, and quarantine the request. Do nothing if it is in quarantine already.

        After one missed event, many of the request's events are illegal.
        """
        if record.trust is TrustRegion.TRUSTED:
            detail = f"{trigger} happened to a request in state {before.state}, blocks {before.blocks}"
            self._break(Rule.LEGAL_TRANSITION.value, record.request_id, detail, cause)

    def _break(self, rule: str, request_id: str, detail: str, cause: int) -> None:
        """Record that the rule is broken, and quarantine the request if it is known."""
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

    # --- failures that may concern several requests ----------------------------------------------

    def _after_hook_failure(self, event: e.HookFailed, cause: int, _subject: Subject) -> None:
        # After a failure without a request, a whole step may be missing from the log. Then no block table can be
        # trusted.
        for record in tuple(self._tracker):
            holds_blocks = record.blocks is not BlocksRegion.NONE
            concerned = record.request_id == event.request_id or (not event.request_id and holds_blocks)
            if concerned and record.trust is TrustRegion.TRUSTED:
                self._decide(e.RequestQuarantined(*record.life, f"{event.hook} failed", cause))

    def _after_withheld(self, event: e.DecisionWithheld, cause: int, _subject: Subject) -> None:
        if event.rule:
            self._break(event.rule, event.request_id, event.detail, cause)

    def _after_load_errors(self, event: e.LoadErrorsObserved, cause: int, _subject: Subject) -> None:
        # The scheduler recomputes the owner, but a request that shares the block may go on (vllm#49250, #55297).
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
        """Ask the workers about overdue copies, and give up copies that are overdue a second time.

        Also give up each save for which a step did not wait, although it had to.
        """
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
        """Return the method. Wrap it in checks, unless it belongs to this package."""
        extension = self._core.extension_of_handler(handler)
        if not extension:
            return Checked.unless_own(method, self._core, self._projections)
        where = f"{type(handler).__qualname__}.{method.__name__}"
        checked = Checked(method, self._core, self._projections, extension)
        return partial(self._projections.extensions.ask, extension, where, checked)
