"""Calls a sink with the spans and instants of the selected part of a log, from the reader's model.

Only open spans are kept, so the memory depends on the busiest moment of the log and not on the log's length. This
module must not depend on files or formats.
"""

from __future__ import annotations

import msgspec

from kvledger.adapters.tools.export.held_blocks import HeldBlocks
from kvledger.adapters.tools.export.spans import (
    CallSpan,
    CopySpan,
    Gauges,
    Instant,
    LifeSpan,
    Lookup,
    Sink,
    Span,
    StateSpan,
    Step,
)
from kvledger.adapters.tools.logs.describe import describe, figures_of_extension, plain
from kvledger.adapters.tools.logs.log import Gap
from kvledger.adapters.tools.logs.report_shares import shares_of
from kvledger.adapters.tools.logs.requests import Requests, RequestSummary
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.totals import LogTotals
from kvledger.adapters.tools.reasons import is_same_answer
from kvledger.lifecycle import Core, RequestState, on
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.reader import Life, Model, Visitor, Visits

LOST = "events.lost"
"""Kind of an instant at which events are missing."""

_TROUBLE = (
    *(e.InvariantViolated, e.HookFailed, e.LoadErrorsObserved, e.RequestQuarantined, e.ChunksTainted),
    *(e.ExtensionStopped, e.EndRefused),
)
_INSTANTS = (
    *_TROUBLE,
    *(e.ChunksEvicted, e.CacheReset, e.LogNote, e.TokensRolledBack, e.SessionContinued, e.SaveDeclined),
    *(e.TransferAwaited, e.BlockTableObserved, e.PrefixCacheReset),
)
_KINDS: dict[type[e.Event], str] = {e.LoadIssued: "load", e.SaveIssued: "save", e.TailSaveIssued: "tail save"}


class State(msgspec.Struct, forbid_unknown_fields=True):
    """The open spans."""

    lives: dict[int, LifeSpan] = {}
    """Ordinal → span, of lives whose beginning is known from the log or a snapshot."""
    states: dict[int, StateSpan] = {}
    """Ordinal of a life in `lives` → span of the life's state."""
    copies: dict[int, CopySpan] = {}
    """Job id → span."""
    last_answers: dict[int, e.LookupAnswered | e.LookupDeferred] = {}
    """Ordinal of a life in `lives` → the last answer to a lookup of the life."""
    kept_blocks: dict[int, list[int]] = {}
    """Ordinal of a finished life → blocks that are held for its copies."""
    bytes_per_page: float | None = None
    """Bytes per page of the last completed save."""
    now_ns: int = 0
    """Latest time so far. In a damaged log, a later event with an earlier time gets this time instead."""


class Trace(Visitor[Model]):
    """Turns events into spans and instants.

    The selection limits only what the sink gets. Spans that are open when the selection begins keep their real
    beginning. Spans that continue after the selection's end are left open. If a request is selected, the sink also gets
    steps, counts and instants without a request.

    Pass `visitors` to a reader in their order. The summary of a life must be complete before this visitor ends the
    life's span. This visitor must read a request's recovered tokens before the totals count the step and forget them.
    """

    needs = ("lives", "copies")
    state: State

    def __init__(self, model: Model, core: Core, totals: LogTotals, sink: Sink, selection: Selection) -> None:
        super().__init__(model)
        self.state = State(now_ns=self.moment.time_ns)
        self.totals = totals
        self._requests = Requests(model, self._summarized)
        self._summaries: dict[int, RequestSummary] = {}
        """Ordinal → summary, of lives that end at the current event."""
        self._core = core
        self._sink = sink
        self._shows_counts = type(sink).counted is not Sink.counted
        self._shows_idle = type(sink).idle is not Sink.idle
        self._selection = selection
        self._is_inside = False
        self._step: e.StepScheduled | None = None
        """The current observation, if it is a step."""
        self.index()
        for life in model.lives:
            self._requests.state.summaries[life.ordinal] = self._begin_life(life).summary
            self._begin_state(life, "")

    @property
    def visitors(self) -> tuple[Visitor[Model], ...]:
        """This visitor and the visitors that it needs, in the order of their calls."""
        return (self._requests, self, *([self.totals] if self._sink.needs_recoveries else []))

    @property
    def also_needs(self) -> tuple[str, ...]:
        """Parts of the model that the gauges of the sink need."""
        return ("tables", "chunks", "tails") if self._sink.needs_memory_gauges else ()

    @property
    def now_ns(self) -> int:
        """Latest time so far, in nanoseconds since the log was opened."""
        state, time_ns = self.state, self.moment.time_ns
        state.now_ns = max(state.now_ns, time_ns)
        return state.now_ns

    def index(self) -> None:
        """Compute the counts from the restored state."""
        self._held = HeldBlocks(self.model, self.state.kept_blocks) if self._sink.needs_memory_gauges else None
        self._num_in_state = {state.value: 0 for state in RequestState}
        for span in self.state.states.values():
            self._num_in_state[span.state] += 1

    def visits(self) -> Visits:
        """Return which methods to call for which events, in this order: `_reach`, `_look`, the others."""
        ignores_instants = type(self._sink).happened is Sink.happened
        ignored: set[object] = {self._happened} if ignores_instants else set()
        if ignores_instants and type(self._sink).began is Sink.began:
            ignored.add(self._of_extension)
        if self._held is None:
            ignored.update((self._table_changed, self._blocks_held))
        return [
            *((event_class, self._reach) for event_class in e.STANDARD_EVENTS.values()),
            *((event_class, self._look) for event_class in self.model.request_events),
            *(visit for visit in super().visits() if visit[1] not in ignored),
        ]

    def decided(self) -> None:
        """Pass the counts to the sink, after an observation and all decisions that it caused."""
        now_ns = self.now_ns
        step = self._step
        if step is None and not self._shows_counts:
            return
        self._step = None
        if not self._is_inside:
            return
        gauges = self._gauges()
        if step is not None and self.moment.cause >= self._selection.first_sequence:
            num_events = self.moment.sequence - self.moment.cause + 1
            self._sink.stepped(
                Step(step.step, self.moment.cause, now_ns, step.num_scheduled_tokens, num_events, gauges)
            )
        if self._shows_counts:
            self._sink.counted(now_ns, gauges)

    def lost(self, first_sequence: int, last_sequence: int) -> None:
        """Show that events are missing. Missing oldest events are no failure, because they were probably retired."""
        self.state.kept_blocks.clear()
        self.index()
        self._reach_event(last_sequence)
        gap = Gap(first_sequence, last_sequence)
        self._show_instant(
            Instant(
                kind=LOST,
                sequence=first_sequence,
                time_ns=self.now_ns,
                request_id="",
                ordinal=None,
                text=str(gap),
                is_trouble=not gap.is_beginning,
                fields={"first_sequence": first_sequence, "last_sequence": last_sequence},
            )
        )

    def finish(self) -> None:
        """End the open spans at the end of the log."""
        for copy in self.state.copies.values():
            self._end(copy, is_over=False)
        for life in self.model.lives:
            self._end_life(life, "", is_over=False)

    def _gauges(self) -> Gauges:
        """Return the present counts."""
        slots, copies = self.model.slots, self.model.copies
        if self._held is None:
            return Gauges(
                self._num_in_state.copy(), 0, 0, 0, None, 0, len(copies.loads), len(copies) - len(copies.loads)
            )
        num_used, per_page = slots.num_slots - slots.num_free, self.state.bytes_per_page
        return Gauges(
            self._num_in_state.copy(),
            len(self._held),
            slots.num_free,
            num_used,
            None if per_page is None else round(num_used * per_page),
            len(self.model.chunks.committed),
            len(copies.loads),
            len(copies) - len(copies.loads),
        )

    # --- the selected part --------------------------------------------------------------------

    def _reach(self, _event: e.Event) -> None:
        if not self._is_inside:
            self._reach_event(self.moment.sequence)

    def _reach_event(self, sequence: int) -> None:
        if self._is_inside or sequence < self._selection.first_sequence:
            return
        self._is_inside = True
        state = self.state
        spans: list[Span] = [*state.lives.values(), *state.states.values(), *state.copies.values()]
        for span in sorted(spans, key=lambda span: span.sequence):
            self._begin(span)

    def _begin(self, span: Span) -> None:
        if self._shows(span.request_id):
            self._sink.began(span)

    def _end(self, span: Span, *, is_over: bool = True) -> None:
        span.last_ns = now_ns = self.now_ns
        span.until_ns = now_ns if is_over else None
        if self._shows(span.request_id):
            self._sink.ended(span)

    def _show_instant(self, instant: Instant) -> None:
        if self._shows(instant.request_id):
            self._sink.happened(instant)

    def _shows(self, request_id: str) -> bool:
        return self._is_inside and self._selection.holds_request(request_id)

    # --- lives and their states ---------------------------------------------------------------

    def ended(self, life: Life) -> None:
        """End the span of the life, and the span of its state."""
        self._reach_event(self.moment.sequence)
        if self._held is not None:
            self._held.forget(life.ordinal)
        self._end_life(life, "" if self.moment.event is None else self.moment.event.id)
        if self._shows_idle and self._is_inside and not self.model.lives.num_open:
            self._sink.idle(self.now_ns)

    def _summarized(self, summary: RequestSummary) -> None:
        self._summaries[summary.ordinal] = summary

    def _look(self, event: e.RequestEvent) -> None:
        """Begin a span if the life has changed its state or generation."""
        life = self.moment.life
        if life is None:
            return
        if isinstance(event, e.RequestArrived):
            self._begin_life(life, event.trace_parent)
            self._begin_state(life, event.id)
            return
        if self._has_moved(life):
            # While a request decodes, only steps give its number of tokens. Events that take its blocks reset that.
            keeps_tokens = isinstance(event, (e.RequestPreempted, e.TokensRolledBack))
            self._move(life, event.id, self.moment.num_computed_tokens, keeps_tokens=keeps_tokens)

    def _begin_life(self, life: Life, trace_parent: bytes = b"") -> LifeSpan:
        tokens = life.num_prompt_tokens, life.num_tokens
        summary = RequestSummary(life.request_id, life.ordinal, life.arrived_at, life.arrived_at, self.now_ns, *tokens)
        span = LifeSpan(
            request_id=life.request_id,
            sequence=life.arrived_at,
            since_ns=self.now_ns,
            ordinal=life.ordinal,
            summary=summary,
            trace_parent=trace_parent,
        )
        self.state.lives[life.ordinal] = span
        self._begin(span)
        return span

    def _has_moved(self, life: Life) -> bool:
        """Whether the life is in another state or generation than its open span shows."""
        span = self.state.states.get(life.ordinal)
        return span is not None and (span.state != life.state or span.generation != life.generation)

    def _move(self, life: Life, cause: str, num_computed_before: int, *, keeps_tokens: bool = False) -> None:
        self._end_state(self.state.states[life.ordinal], cause, num_computed_before)
        self._begin_state(life, cause, num_tokens_before=num_computed_before if keeps_tokens else 0)

    def _begin_state(self, life: Life, cause: str, *, num_tokens_before: int = 0) -> None:
        num_computed = self.model.lives.num_computed_tokens(life)
        span = StateSpan(
            request_id=life.request_id,
            sequence=self.moment.sequence if cause else 0,
            since_ns=self.now_ns,
            ordinal=life.ordinal,
            state=life.state.value,
            generation=life.generation,
            cause=cause,
            num_computed_tokens=num_computed,
            num_tokens=max(life.num_tokens, num_computed, num_tokens_before),
        )
        self.state.states[life.ordinal] = span
        self._num_in_state[span.state] += 1
        life_span = self.state.lives[life.ordinal]
        if life.state is RequestState.RUNNING and life_span.first_running_ns is None:
            life_span.first_running_ns = self.now_ns
        self._begin(span)

    def _end_state(self, span: StateSpan, left_by: str, num_computed: int) -> None:
        del self.state.states[span.ordinal]
        span.left_by, span.num_computed_tokens_at_end = left_by, num_computed
        self._num_in_state[span.state] -= 1
        state_ns = self.state.lives[span.ordinal].state_ns
        state_ns[span.state] = state_ns.get(span.state, 0) + self.now_ns - span.since_ns
        self._end(span, is_over=bool(left_by))

    def _end_life(self, life: Life, left_by: str, *, is_over: bool = True) -> None:
        state = self.state.states.get(life.ordinal)
        if state is not None:
            self._end_state(state, left_by, self.model.lives.num_computed_tokens(life))
        span = self.state.lives.pop(life.ordinal, None)
        self.state.last_answers.pop(life.ordinal, None)
        if span is not None:
            span.summary = self._summaries.pop(life.ordinal, span.summary)
            self._end(span, is_over=is_over)

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        """Add retained and recovered tokens of requests that run again in this step, before the totals forget them."""
        self._step = event
        returning = self.totals.state.returning
        for ordinal, *_ in event.advanced if returning else ():
            span = self.state.lives.get(ordinal)
            if span is not None and ordinal in returning:
                num_retained, num_recovered = returning[ordinal]
                span.num_tokens_retained += num_retained
                span.num_tokens_recovered += num_recovered
        if self._held is not None:
            for ordinal, _ in event.extended:
                self._held.look(ordinal)
        for life, *_ in self.moment.refused_rows:
            if self._has_moved(life):
                self._move(life, event.id, self.model.lives.num_computed_before_step(life))

    @on(e.BlocksAllocated, e.BlockTableObserved, e.LookupRequested, e.RequestPreempted, e.RequestFinished)
    def _table_changed(self, _event: e.RequestEvent) -> None:
        if self._held is not None and self.moment.life is not None:
            self._held.look(self.moment.life.ordinal)

    @on(e.BlocksHeld)
    def _blocks_held(self, event: e.BlocksHeld) -> None:
        if self._held is not None:
            self._held.keep(event.ordinal)

    # --- lookups ------------------------------------------------------------------------------

    @on(e.LookupAnswered, e.LookupDeferred)
    def _answered(self, event: e.LookupAnswered | e.LookupDeferred) -> None:
        ordinal, answers = self._shown_ordinal(event), self.state.last_answers
        is_repeated = ordinal is not None and is_same_answer(answers.get(ordinal), event)
        if ordinal is not None:
            answers[ordinal] = event
        if self._shows(event.request_id):
            self._sink.looked_up(Lookup(self.moment.sequence, self.now_ns, ordinal, event, is_repeated))

    def _shown_ordinal(self, event: e.Event) -> int | None:
        """Return the ordinal of the present life of the event's request; None if that life has no span."""
        life = self.model.lives.get(getattr(event, "request_id", ""))
        return None if life is None or life.ordinal not in self.state.lives else life.ordinal

    # --- copies -------------------------------------------------------------------------------

    @on(*_KINDS)
    def _issued(self, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued) -> None:
        life = self.state.lives.get(event.ordinal)
        span = CopySpan(
            request_id=event.request_id,
            sequence=self.moment.sequence,
            since_ns=self.now_ns,
            ordinal=None if life is None else life.ordinal,
            trace_parent=b"" if life is None else life.trace_parent,
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
        earlier = self.state.copies.get(event.job_id)
        if earlier is not None:  # a damaged log: job ids are unique
            self._end_copy(earlier, is_over=False)
        self.state.copies[event.job_id] = span
        self._begin(span)

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported) -> None:
        for job_id, num_bytes, duration_ns in shares_of(event):
            span = self.state.copies.get(job_id)
            if span is not None:
                span.num_bytes += num_bytes
                span.worker_ns += duration_ns
                span.error = span.error or event.error
        for reported in self.model.copies.reported:
            span = self.state.copies.get(reported.job_id)
            if span is not None and reported.job is not None:
                span.ranks_done, span.ranks_failed = sorted(reported.job.ranks_done), sorted(reported.job.ranks_failed)

    @on(e.LoadCompleted, e.LoadFailed, e.SaveCompleted, e.SaveFailed)
    def _settled(self, event: e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed) -> None:
        span = self.state.copies.get(event.job_id)
        if span is None:
            return
        span.outcome = "completed"
        if isinstance(event, e.LoadFailed | e.SaveFailed):
            span.outcome = "given up" if isinstance(event, e.SaveFailed) and not event.quiet else "failed"
            span.error = event.error or span.error
        elif span.kind == "save" and span.num_pages and span.num_bytes:  # ranks may load one shared copy
            self.state.bytes_per_page = span.num_bytes / span.num_pages
        self._end_copy(span)

    def _end_copy(self, span: CopySpan, *, is_over: bool = True) -> None:
        """End the span of a copy that has ended, or whose job id is used again."""
        del self.state.copies[span.job_id]
        life = None if span.ordinal is None else self.state.lives.get(span.ordinal)
        if life is not None and span.kind == "load":
            life.num_bytes_loaded += span.num_bytes
        elif life is not None:
            life.num_bytes_saved += span.num_bytes
        self._end(span, is_over=is_over)

    # --- extensions ---------------------------------------------------------------------------

    @on(e.ExtensionObserved, e.ExtensionDecided, e.ExtensionNoted)
    def _of_extension(self, event: e.ExtensionEvent) -> None:
        for what, duration_ns in figures_of_extension(event, self._core).items():
            if what.endswith("_ns"):
                call = CallSpan(
                    request_id=getattr(event, "request_id", ""),
                    sequence=self.moment.sequence,
                    since_ns=max(0, self.now_ns - duration_ns),
                    extension=event.extension,
                    name=what.removesuffix("_ns"),
                )
                self._begin(call)
                self._end(call)
        self._happened(event)

    # --- instants -----------------------------------------------------------------------------

    @on(*_INSTANTS)
    def _happened(self, event: e.Event) -> None:
        text = describe(event, self._core)
        if not text and isinstance(event, e.ExtensionEvent):
            return  # another event describes this one
        fields = msgspec.structs.asdict(event)
        fields.pop("time_ns", None)
        self._show_instant(
            Instant(
                kind=event.id,
                sequence=self.moment.sequence,
                time_ns=self.now_ns,
                request_id=getattr(event, "request_id", ""),
                ordinal=self._shown_ordinal(event),
                text=text or event.id,
                is_trouble=isinstance(event, _TROUBLE),
                fields={name: plain(value) for name, value in fields.items()},
            )
        )
