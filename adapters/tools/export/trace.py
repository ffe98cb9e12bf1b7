"""Folds a log and shows a visitor the spans and instants of the selected part.

It remembers what is open and nothing else, so a log of any length takes the memory of its busiest instant. It knows
events and projections; it must not know files and formats.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable

import msgspec

from kvledger.adapters.tools.export.spans import (
    Call,
    Copy,
    Gauges,
    Incarnation,
    Instant,
    Lookup,
    Span,
    State,
    Step,
    Visitor,
)
from kvledger.adapters.tools.logs.describe import describe, figures_of_extension, plain
from kvledger.adapters.tools.logs.log import Gap
from kvledger.adapters.tools.logs.requests import Requests, RequestSummary
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.reasons import is_same_answer
from kvledger.adapters.totals import Totals
from kvledger.lifecycle import Core, Projections, RequestRecord, RequestState
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.reader import Life, Model, Reader

LOST = "events.lost"
"""The kind of the instant at which events are missing."""

_TROUBLE = (
    *(e.InvariantViolated, e.HookFailed, e.LoadErrorsObserved, e.RequestQuarantined, e.ChunksTainted),
    *(e.ExtensionStopped, e.EndRefused),
)
_INSTANTS = (
    *_TROUBLE,
    *(e.ChunksEvicted, e.CacheReset, e.LogNote, e.TokensRolledBack, e.SessionContinued, e.SaveDeclined),
    *(e.TransferAwaited, e.BlockTableObserved, e.PrefixCacheReset),
)
_OF_EXTENSIONS = (e.ExtensionObserved, e.ExtensionDecided, e.ExtensionNoted)
_KINDS: dict[type[e.Event], str] = {e.LoadIssued: "load", e.SaveIssued: "save", e.TailSaveIssued: "tail save"}
_SETTLED = (e.LoadCompleted, e.LoadFailed, e.SaveCompleted, e.SaveFailed)


class Trace:
    """Takes the events of one log in order and folds them.

    The selection limits what is shown, never what is known: spans that are open where it begins have their true
    beginning, and what reaches beyond its end is left open. Steps, counts and instants of no request belong to every
    choice of a request.
    """

    def __init__(
        self,
        core: Core,
        model: Model,
        projections: Projections,
        totals: Totals,
        visitor: Visitor,
        selection: Selection,
    ) -> None:
        self._core = core
        self.projections = projections
        self.totals = totals
        """Of what `projections` fold."""
        self.now_ns = projections.tracker.time_ns
        """The latest time seen. Times that run backwards, as in a damaged log, are taken as this."""
        self.current = "the first event"
        """The event that is folded, for who reports that it cannot be."""
        self._visitor = visitor
        self._selection = selection
        self._is_inside = False
        self._tracker = projections.tracker
        self._open: dict[Span, None] = {}
        """In the order of their beginning."""
        self._requests = Requests(model, lambda _: None)
        self._requests.state.summaries.update({life.ordinal: _known(life, self.now_ns) for life in model.lives})
        self._reader = Reader(model, [self._requests])
        self._incarnations: dict[str, Incarnation] = {}
        self._states: dict[int, State] = {}
        self._copies: dict[int, Copy] = {}
        self._num_in_state: dict[str, int] = {state.value: 0 for state in RequestState}
        self._last_answers: dict[int, e.LookupAnswered | e.LookupDeferred] = {}
        self._num_in_flight: Counter[bool] = Counter()
        """Whether a load -> copies in flight."""
        self._held = _HeldBlocks(projections)
        self._bytes_per_page: float | None = None
        self._observation: e.Event | None = None
        self._observed_at = 0
        self._num_events = 0
        """Of the observation and its decisions."""
        self._handlers: dict[type[e.Event], Callable[..., None]] = {
            e.LookupAnswered: self._answered,
            e.LookupDeferred: self._answered,
            e.TransferReported: self._reported,
            **dict.fromkeys(_KINDS, self._issued),
            **dict.fromkeys(_SETTLED, self._settled),
            **dict.fromkeys(_INSTANTS, self._happened),
            **dict.fromkeys(_OF_EXTENSIONS, self._of_extension),
        }

        for record in self._tracker:
            self._begin_state(0, "", self._begin_incarnation(0, record), record, 0)

    def take(self, sequence: int, event: e.Event) -> None:
        """Take up the next event of the log."""
        self.current = f"event {sequence} ({event.id})"
        self._reach(sequence)
        if not event.is_decision:
            self._complete()
            self.now_ns = max(self.now_ns, getattr(event, "time_ns", 0))
            self._observation, self._observed_at, self._num_events = event, sequence, 0
        self._num_events += 1
        self._reader.take([(sequence, event)])
        if isinstance(event, e.RequestEvent):
            self._take_request_event(sequence, event)
        elif isinstance(event, e.StepScheduled):
            self._take_step(sequence, event)
        else:
            self.projections.fold(event, sequence)
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event, sequence)

    def take_gap(self, gap: Gap) -> None:
        """Events are missing here. That the oldest are is no trouble: most often they were retired."""
        self._complete()
        self._reach(gap.last_sequence)
        if not gap.is_in_snapshot:
            self._reader.lost(gap.first_sequence, gap.last_sequence)
        self._show_instant(
            Instant(
                kind=LOST,
                sequence=gap.first_sequence,
                time_ns=self.now_ns,
                request_id="",
                ordinal=None,
                text=str(gap),
                is_trouble=not gap.is_beginning,
                fields={"first_sequence": gap.first_sequence, "last_sequence": gap.last_sequence},
            )
        )

    def finish(self) -> None:
        """Show what the log leaves open, as far as the log reaches."""
        self._complete()
        self._reader.finish()
        for copy in tuple(self._copies.values()):
            self._end(copy, is_over=False)
        for incarnation in tuple(self._incarnations.values()):
            record = self._tracker.get(incarnation.request_id)
            num_computed = 0 if record is None else self._tracker.num_computed_tokens(record)
            span = self._states.get(incarnation.ordinal)
            if span is not None:
                self._end_state(span, "", num_computed)
            self._end(incarnation, is_over=False)

    def gauges(self) -> Gauges:
        """What can be counted now."""
        slots = self.projections.slots
        num_used = slots.num_slots - slots.num_free
        per_page = self._bytes_per_page
        return Gauges(
            self._num_in_state.copy(),
            len(self._held),
            slots.num_free,
            num_used,
            None if per_page is None else round(num_used * per_page),
            len(self.projections.pool),
            self._num_in_flight[True],
            self._num_in_flight[False],
        )

    # --- the selected part --------------------------------------------------------------------

    def _reach(self, sequence: int) -> None:
        if not self._is_inside and sequence >= self._selection.first_sequence:
            self._is_inside = True
            for span in self._open:
                if self._selection.holds_request(span.request_id):
                    self._visitor.began(span)

    def _begin(self, span: Span) -> None:
        self._open[span] = None
        if self._shows(span.request_id):
            self._visitor.began(span)

    def _end(self, span: Span, *, is_over: bool = True) -> None:
        del self._open[span]
        span.last_ns = self.now_ns
        span.until_ns = self.now_ns if is_over else None
        if self._shows(span.request_id):
            self._visitor.ended(span)

    def _show_instant(self, instant: Instant) -> None:
        if self._shows(instant.request_id):
            self._visitor.happened(instant)

    def _shows(self, request_id: str) -> bool:
        return self._is_inside and self._selection.holds_request(request_id)

    # --- incarnations and states --------------------------------------------------------------

    def _take_request_event(self, sequence: int, event: e.RequestEvent) -> None:
        request_id = event.request_id
        before = self._tracker.get(request_id)
        num_computed = 0 if before is None else self._tracker.num_computed_tokens(before)
        if isinstance(event, e.RequestArrived):
            self._end_incarnation(request_id, event, num_computed)
        self.projections.fold(event, sequence)
        record = self._tracker.get(request_id)
        known = record or before  # a released one holds blocks under an ordinal that the tracker has forgotten by now
        if known is not None:
            self._held.take(event, known.ordinal)
        if record is None:
            self._end_incarnation(request_id, event, num_computed)
            return
        incarnation = self._incarnations.get(request_id) or self._begin_incarnation(
            sequence, record, getattr(event, "trace_parent", b"")
        )
        span = self._states.get(incarnation.ordinal)
        if span is not None and span.state == record.state and span.generation == record.generation:
            return
        if span is not None:
            self._end_state(span, event.id, num_computed)
        # While it decodes, only the steps say how many tokens it has; what takes its blocks lets that be forgotten.
        keeps_tokens = isinstance(event, e.RequestPreempted | e.TokensRolledBack)
        self._begin_state(sequence, event.id, incarnation, record, num_computed if keeps_tokens else 0)

    def _begin_incarnation(self, sequence: int, record: RequestRecord, trace_parent: bytes = b"") -> Incarnation:
        incarnation = Incarnation(
            request_id=record.request_id,
            sequence=sequence,
            since_ns=self.now_ns,
            ordinal=record.ordinal,
            summary=self._requests.state.summaries[record.ordinal],
            trace_parent=trace_parent,
        )
        self._incarnations[record.request_id] = incarnation
        self._begin(incarnation)
        return incarnation

    def _begin_state(
        self, sequence: int, cause: str, incarnation: Incarnation, record: RequestRecord, num_tokens_before: int
    ) -> None:
        num_computed = self._tracker.num_computed_tokens(record)
        span = State(
            request_id=record.request_id,
            sequence=sequence,
            since_ns=self.now_ns,
            incarnation=incarnation,
            ordinal=record.ordinal,
            state=record.state.value,
            generation=record.generation,
            cause=cause,
            num_computed_tokens=num_computed,
            num_tokens=max(record.num_tokens, num_computed, num_tokens_before),
        )
        self._states[record.ordinal] = span
        self._num_in_state[span.state] += 1
        if record.state is RequestState.RUNNING and incarnation.first_running_ns is None:
            incarnation.first_running_ns = self.now_ns
        self._begin(span)

    def _end_state(self, span: State, left_by: str, num_computed: int) -> None:
        del self._states[span.ordinal]
        span.left_by, span.num_computed_tokens_at_end = left_by, num_computed
        self._num_in_state[span.state] -= 1
        state_ns = span.incarnation.state_ns
        state_ns[span.state] = state_ns.get(span.state, 0) + self.now_ns - span.since_ns
        self._end(span, is_over=bool(left_by))

    def _end_incarnation(self, request_id: str, event: e.Event, num_computed: int) -> None:
        incarnation = self._incarnations.pop(request_id, None)
        if incarnation is None:
            return
        span = self._states.get(incarnation.ordinal)
        if span is not None:  # None: in a damaged log another request had the same ordinal, and has ended
            incarnation.summary.outcome = incarnation.summary.outcome or span.state
            self._end_state(span, event.id, num_computed)
        self._last_answers.pop(incarnation.ordinal, None)
        self._end(incarnation)
        if self._is_inside and all(other.summary.finished_ns is not None for other in self._incarnations.values()):
            self._visitor.idle(self.now_ns)

    def _take_step(self, sequence: int, event: e.StepScheduled) -> None:
        """Whoever runs again has what was found and loaded on its way back; the totals count it in this step."""
        returning = self.totals.state.returning
        for ordinal, *_ in event.advanced if returning else ():
            span = self._states.get(ordinal)
            if span is not None and ordinal in returning:
                num_retained, num_recovered = returning[ordinal]
                span.incarnation.num_tokens_retained += num_retained
                span.incarnation.num_tokens_recovered += num_recovered
        self.projections.fold(event, sequence)
        for ordinal, _ in event.extended:
            self._held.look(ordinal)

    # --- lookups ------------------------------------------------------------------------------

    def _answered(self, event: e.LookupAnswered | e.LookupDeferred, sequence: int) -> None:
        incarnation = self._incarnations.get(event.request_id)
        ordinal, is_repeated = None, False
        if incarnation is not None:
            ordinal = incarnation.ordinal
            is_repeated = is_same_answer(self._last_answers.get(ordinal), event)
            self._last_answers[ordinal] = event
        if self._shows(event.request_id):
            self._visitor.looked_up(Lookup(sequence, self.now_ns, ordinal, event, is_repeated))

    # --- copies -------------------------------------------------------------------------------

    def _issued(self, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued, sequence: int) -> None:
        incarnation = self._incarnations.get(event.request_id)
        copy = Copy(
            request_id=event.request_id,
            sequence=sequence,
            since_ns=self.now_ns,
            incarnation=incarnation,
            ordinal=None if incarnation is None else incarnation.ordinal,
            kind=_KINDS[type(event)],
            job_id=event.job_id,
            generation=event.generation,
            num_pages=len(event.slots) - event.slots.count(NO_SLOT),
            slots=event.slots,
            block_ids=event.block_ids,
            first_token=getattr(event, "first_token", None),
            num_tokens=getattr(event, "num_tokens", None),
            chunks=getattr(event, "chunks", ()),
            is_async=getattr(event, "is_async", False),
            before_forward=getattr(event, "before_forward", isinstance(event, e.TailSaveIssued)),
        )
        earlier = self._copies.pop(event.job_id, None)
        if earlier is not None:  # a damaged log: job ids are never used twice
            self._end_copy(earlier, is_over=False)
        self._copies[event.job_id] = copy
        self._num_in_flight[copy.kind == "load"] += 1
        self._begin(copy)

    def _reported(self, event: e.TransferReported, _sequence: int) -> None:
        for job_id, num_bytes in zip(event.job_ids, event.num_bytes, strict=False):
            copy = self._copies.get(job_id)
            if copy is None:
                continue
            copy.ranks_done += [rank for rank in event.ranks_done if rank not in copy.ranks_done]
            copy.ranks_failed += [rank for rank in event.ranks_failed if rank not in copy.ranks_failed]
            copy.num_bytes += num_bytes
            copy.worker_ns += event.duration_ns
            copy.error = copy.error or event.error

    def _settled(self, event: e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed, _sequence: int) -> None:
        copy = self._copies.pop(event.job_id, None)
        if copy is None:
            return
        copy.outcome = "completed"
        if isinstance(event, e.LoadFailed | e.SaveFailed):
            copy.outcome = "given up" if isinstance(event, e.SaveFailed) and not event.quiet else "failed"
            copy.error = event.error or copy.error
        elif copy.kind == "save" and copy.num_pages and copy.num_bytes:  # what each rank loads may lie there once
            self._bytes_per_page = copy.num_bytes / copy.num_pages
        self._end_copy(copy)

    def _end_copy(self, copy: Copy, *, is_over: bool = True) -> None:
        is_load = copy.kind == "load"
        self._num_in_flight[is_load] -= 1
        if copy.incarnation is not None:
            copy.incarnation.num_bytes_loaded += copy.num_bytes * is_load
            copy.incarnation.num_bytes_saved += copy.num_bytes * (not is_load)
        self._end(copy, is_over=is_over)

    # --- extensions ---------------------------------------------------------------------------

    def _of_extension(self, event: e.ExtensionEvent, sequence: int) -> None:
        for what, duration_ns in figures_of_extension(event, self._core).items():
            if what.endswith("_ns"):
                call = Call(
                    request_id=getattr(event, "request_id", ""),
                    sequence=sequence,
                    since_ns=max(0, self.now_ns - duration_ns),
                    extension=event.extension,
                    name=what.removesuffix("_ns"),
                )
                self._begin(call)
                self._end(call)
        self._happened(event, sequence)

    # --- instants and steps -------------------------------------------------------------------

    def _happened(self, event: e.Event, sequence: int) -> None:
        text = describe(event, self._core)
        if not text and isinstance(event, e.ExtensionEvent):
            return  # another event says it
        request_id: str = getattr(event, "request_id", "")
        incarnation = self._incarnations.get(request_id)
        fields = msgspec.structs.asdict(event)
        fields.pop("time_ns", None)
        self._show_instant(
            Instant(
                kind=event.id,
                sequence=sequence,
                time_ns=self.now_ns,
                request_id=request_id,
                ordinal=None if incarnation is None else incarnation.ordinal,
                text=text or event.id,
                is_trouble=isinstance(event, _TROUBLE),
                fields={name: plain(value) for name, value in fields.items()},
            )
        )

    def _complete(self) -> None:
        """The last observation and its decisions are all folded."""
        event, self._observation = self._observation, None
        if event is None or not self._is_inside:
            return
        gauges = self.gauges()
        if isinstance(event, e.StepScheduled) and self._observed_at >= self._selection.first_sequence:
            num_tokens = event.num_scheduled_tokens
            self._visitor.stepped(
                Step(event.step, self._observed_at, self.now_ns, num_tokens, self._num_events, gauges)
            )
        self._visitor.counted(self.now_ns, gauges)


def _known(life: Life, time_ns: int) -> RequestSummary:
    """A request that was there before the first event, as from a snapshot; when it arrived is not known."""
    return RequestSummary(life.request_id, life.ordinal, 0, 0, time_ns, life.num_prompt_tokens, life.num_tokens)


class _HeldBlocks:
    """How many distinct blocks requests hold. Blocks with a common prefix stand in several tables and count once.

    It follows the tables one by one instead of counting them all, which would take too long at every step.
    """

    _CHANGE_TABLES = (
        *(e.BlocksAllocated, e.BlockTableObserved, e.LookupRequested, e.RequestPreempted, e.RequestArrived),
        *(e.RequestFinished, e.RequestReleased),
    )

    def __init__(self, projections: Projections) -> None:
        self._tracker = projections.tracker
        self._tables: dict[int, array[int]] = {}
        self._references: Counter[int] = Counter()
        for record in projections.tracker:
            self.look(record.ordinal)

    def __len__(self) -> int:
        return len(self._references)

    def take(self, event: e.RequestEvent, ordinal: int) -> None:
        """An event that was folded, of the request with that ordinal."""
        if isinstance(event, e.BlocksHeld):  # finished, and its blocks are kept for its copies until it is released
            record = self._tracker.of(ordinal)
            self._replace(ordinal, array("I", () if record is None else record.lost_block_ids or ()))
        elif isinstance(event, self._CHANGE_TABLES):
            self.look(ordinal)

    def look(self, ordinal: int) -> None:
        """Count the table of that request as it is now."""
        record = self._tracker.of(ordinal)
        self._replace(ordinal, array("I", () if record is None else record.block_ids or ()))

    def _replace(self, ordinal: int, table: array[int]) -> None:
        before = self._tables.pop(ordinal, array("I"))
        num_kept = len(before) if table[: len(before)] == before else 0  # most often it has only grown
        self._references.update(table[num_kept:])
        for block_id in before[num_kept:]:
            self._references[block_id] -= 1
            if not self._references[block_id]:
                del self._references[block_id]
        if table:
            self._tables[ordinal] = table
