"""Folds a log and tells a listener what began, what ended and what happened.

It remembers what is open and nothing else, so a log of any length is told in the memory of its busiest moment. It knows
events and projections; it must not know files and formats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from kvledger.adapters.export.held_blocks import HeldBlocks
from kvledger.adapters.export.records import Copy, Gauges, Life, Listener, Lookup, Moment, StateSpan, Step
from kvledger.adapters.logs.describe import words
from kvledger.lifecycle import Projections, RequestRecord, RequestState
from kvledger.lifecycle import events as e
from kvledger.lifecycle.windows import NO_SLOT

LOST = "events.lost"
"""The kind of the moment at which events are missing."""

_TROUBLE = (
    *(e.InvariantViolated, e.HookFailed, e.LoadErrorsObserved, e.RequestQuarantined, e.ChunkTainted),
    e.ExtensionStopped,
)
_MOMENTS = (
    *_TROUBLE,
    e.ChunkEvicted,
    e.CacheReset,
    e.LogNote,
    e.TokensRolledBack,
    e.SessionContinued,
    e.SaveDeclined,
    e.TransferAwaited,
    e.BlockTableObserved,
    e.ExtensionObserved,
    e.ExtensionDecided,
    e.ExtensionNoted,
)
_ISSUED = (e.LoadIssued, e.SaveIssued, e.TailSaveIssued)
_SETTLED = (e.LoadCompleted, e.LoadFailed, e.SaveCompleted, e.SaveFailed)


class Chronicle:
    """Takes the events of one log in order and folds them."""

    def __init__(self, projections: Projections, listener: Listener) -> None:
        self.projections = projections
        self.now_ns = 0
        """The latest time told. Times that run backwards, as in a damaged log, are taken as this."""
        self._listener = listener
        self._tracker = projections.tracker
        self._lives: dict[str, Life] = {}
        self._states: dict[int, StateSpan] = {}
        self._copies: dict[int, Copy] = {}
        self._num_states: dict[str, int] = {state.value: 0 for state in RequestState}
        self._last_answers: dict[int, tuple[object, ...]] = {}
        self._num_copies: Counter[bool] = Counter()
        """Whether a load -> copies in flight."""
        self._held = HeldBlocks()
        self._bytes_per_page: float | None = None
        self._moment: e.Event | None = None
        self._moment_sequence = 0
        self._moment_events = 0
        self._changed = False
        self._handlers: dict[type[e.Event], Callable[..., None]] = {
            e.RequestFinished: self._finished,
            e.RequestPreempted: self._preempted,
            e.LookupAnswered: self._answered,
            e.LookupDeferred: self._deferred,
            e.TransferReported: self._reported,
            **dict.fromkeys(_ISSUED, self._issued),
            **dict.fromkeys(_SETTLED, self._settled),
            **dict.fromkeys(_MOMENTS, self._happened),
        }

    def take(self, sequence: int, event: e.Event) -> None:
        """Take up the next event of the log."""
        if not event.is_decision:
            self._complete()
            self.now_ns = max(self.now_ns, getattr(event, "time_ns", 0))
            self._moment, self._moment_sequence, self._moment_events = event, sequence, 0
        self._moment_events += 1
        record = num_computed = None
        if isinstance(event, e.RequestEvent):
            record = self._tracker.get(event.request_id)
            num_computed = 0 if record is None else self._tracker.num_computed_tokens(record)
            if isinstance(event, e.RequestArrived):
                self._end_life(event.request_id, event, num_computed)
        self.projections.fold(event, sequence)
        if isinstance(event, e.RequestEvent):
            # Blocks of a released life are given back under its ordinal, which the tracker has forgotten by then.
            now = self._tracker.get(event.request_id) or record
            self._held.take(event, None if now is None else now.ordinal)
            self._changed = True
            self._follow(sequence, event, num_computed or 0)
        elif isinstance(event, e.StepScheduled):
            self._held.take(event, None)
            self._changed = True
        handler = self._handlers.get(type(event))
        if handler is not None:
            self._changed = True
            handler(event, sequence)

    def lose(self, first_sequence: int, last_sequence: int, *, is_retired: bool = False) -> None:
        """Say that events are missing here. Oldest ones that were retired are no trouble."""
        self._complete()
        text = f"events {first_sequence}–{last_sequence} are missing; what follows is told without knowing them"
        fields = {"first_sequence": first_sequence, "last_sequence": last_sequence}
        self._listener.happened(Moment(LOST, first_sequence, self.now_ns, "", None, text, not is_retired, fields))

    def finish(self) -> None:
        """Tell what the log leaves open, as far as the log reaches."""
        self._complete()
        for copy in tuple(self._copies.values()):
            copy.last_ns = self.now_ns
            self._listener.copy_ended(copy)
        for life in tuple(self._lives.values()):
            span = self._states.pop(life.ordinal)
            record = self._tracker.get(life.request_id)
            num_computed = 0 if record is None else self._tracker.num_computed_tokens(record)
            self._close_span(span, num_computed)
            life.outcome = life.outcome or span.state
            life.num_tokens = max(span.num_tokens, num_computed)
            self._listener.state_ended(span)
            self._listener.life_ended(life)

    def gauges(self) -> Gauges:
        """What can be counted now."""
        slots = self.projections.chunks.slots
        num_used = slots.num_slots - slots.num_free
        per_page = self._bytes_per_page
        return Gauges(
            self._num_states.copy(),
            len(self._held),
            slots.num_free,
            num_used,
            None if per_page is None else round(num_used * per_page),
            len(self.projections.chunks),
            self._num_copies[True],
            self._num_copies[False],
        )

    # --- lives and states ---------------------------------------------------------------------

    def _follow(self, sequence: int, event: e.RequestEvent, num_computed_before: int) -> None:
        """Tell whether the event moved its request."""
        record = self._tracker.get(event.request_id)
        life = self._lives.get(event.request_id)
        if record is None:
            self._end_life(event.request_id, event, num_computed_before)
            return
        if life is None:
            life = self._begin_life(sequence, record)
        span = self._states.get(life.ordinal)
        if span is not None and span.state == record.state and span.generation == record.generation:
            return
        if span is not None:
            self._end_state(span, event, num_computed_before)
        # While it decodes, only the steps tell how many tokens it has; what takes its blocks lets that be forgotten.
        keeps_tokens = isinstance(event, e.RequestPreempted | e.TokensRolledBack)
        self._begin_state(sequence, event, life, record, num_computed_before if keeps_tokens else 0)

    def _begin_life(self, sequence: int, record: RequestRecord) -> Life:
        life = Life(
            record.request_id, record.ordinal, sequence, self.now_ns, record.num_prompt_tokens, record.num_tokens
        )
        self._lives[record.request_id] = life
        self._listener.life_began(life)
        return life

    def _begin_state(
        self, sequence: int, event: e.RequestEvent, life: Life, record: RequestRecord, num_tokens_before: int
    ) -> None:
        num_computed = self._tracker.num_computed_tokens(record)
        num_tokens = max(record.num_tokens, num_computed, num_tokens_before)
        state = record.state.value
        span = StateSpan(life, state, record.generation, sequence, event.id, self.now_ns, num_computed, num_tokens)
        self._states[life.ordinal] = span
        self._num_states[state] += 1
        if record.state is RequestState.RUNNING and life.first_running_ns is None:
            life.first_running_ns = self.now_ns
        self._listener.state_began(span)

    def _end_state(self, span: StateSpan, event: e.Event, num_computed: int) -> None:
        self._states.pop(span.life.ordinal, None)
        span.until_ns, span.left_by = self.now_ns, event.id
        self._close_span(span, num_computed)
        self._listener.state_ended(span)

    def _close_span(self, span: StateSpan, num_computed: int) -> None:
        span.last_ns, span.num_computed_tokens_at_end = self.now_ns, num_computed
        self._num_states[span.state] -= 1
        state_ns = span.life.state_ns
        state_ns[span.state] = state_ns.get(span.state, 0) + self.now_ns - span.since_ns

    def _end_life(self, request_id: str, event: e.Event, num_computed: int) -> None:
        life = self._lives.pop(request_id, None)
        if life is None:
            return
        span = self._states.get(life.ordinal)
        if span is not None:
            life.outcome = life.outcome or span.state
            self._end_state(span, event, num_computed)
        life.released_ns = self.now_ns
        self._last_answers.pop(life.ordinal, None)
        self._listener.life_ended(life)
        if all(other.finished_ns is not None for other in self._lives.values()):
            self._listener.idle(self.now_ns)

    def _finished(self, event: e.RequestFinished, _sequence: int) -> None:
        life = self._lives.get(event.request_id)
        if life is not None:
            life.outcome, life.finished_ns, life.num_tokens = event.status, self.now_ns, event.num_tokens

    def _preempted(self, event: e.RequestPreempted, _sequence: int) -> None:
        life = self._lives.get(event.request_id)
        if life is not None:
            life.num_preemptions += 1

    # --- lookups ------------------------------------------------------------------------------

    def _answered(self, event: e.LookupAnswered, sequence: int) -> None:
        self._look_up(
            event, sequence, event.num_hit_tokens, event.num_external_tokens, event.miss_reason, event.miss_cause
        )

    def _deferred(self, event: e.LookupDeferred, sequence: int) -> None:
        self._look_up(event, sequence, None, None, "", 0)

    def _look_up(
        self,
        event: e.LookupAnswered | e.LookupDeferred,
        sequence: int,
        num_hit_tokens: int | None,
        num_external_tokens: int | None,
        miss_reason: str,
        miss_cause: int,
    ) -> None:
        life = self._lives.get(event.request_id)
        job_id: int = getattr(event, "job_id", 0)
        is_repeated = False
        if life is not None:
            life.num_lookups += 1
            question = (event.generation, event.num_computed_tokens, event.num_tokens)
            answer = (*question, num_hit_tokens, num_external_tokens, miss_reason, job_id)
            is_repeated = self._last_answers.get(life.ordinal) == answer
            self._last_answers[life.ordinal] = answer
        lookup = Lookup(
            sequence,
            self.now_ns,
            event.request_id,
            life,
            event.generation,
            event.num_computed_tokens,
            event.num_tokens,
            num_hit_tokens,
            num_external_tokens,
            getattr(event, "is_async", False),
            miss_reason,
            miss_cause,
            job_id,
            getattr(event, "num_deferred", 0),
            is_repeated,
        )
        self._listener.looked_up(lookup)

    # --- copies -------------------------------------------------------------------------------

    def _issued(self, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued, sequence: int) -> None:
        is_save = isinstance(event, e.SaveIssued)
        life = self._lives.get(event.request_id)
        copy = Copy(
            "save" if is_save else "load" if isinstance(event, e.LoadIssued) else "tail save",
            event.job_id,
            event.request_id,
            life,
            event.generation,
            sequence,
            self.now_ns,
            len(event.slots) - event.slots.count(NO_SLOT),
            event.slots,
            event.block_ids,
            None if isinstance(event, e.SaveIssued) else event.first_token,
            None if isinstance(event, e.SaveIssued) else event.num_tokens,
            event.chunks if isinstance(event, e.SaveIssued) else (),
            getattr(event, "is_async", False),
            getattr(event, "before_forward", isinstance(event, e.TailSaveIssued)),
        )
        earlier = self._copies.pop(event.job_id, None)
        if earlier is not None:  # a damaged log: job ids are never used twice
            self._end_copy(earlier)
        self._copies[event.job_id] = copy
        self._num_copies[copy.kind == "load"] += 1
        self._listener.copy_began(copy)

    def _reported(self, event: e.TransferReported, _sequence: int) -> None:
        copy = self._copies.get(event.job_id)
        if copy is None:
            return
        copy.ranks_done += [rank for rank in event.ranks_done if rank not in copy.ranks_done]
        copy.ranks_failed += [rank for rank in event.ranks_failed if rank not in copy.ranks_failed]
        copy.num_bytes += event.num_bytes
        copy.worker_ns += event.duration_ns
        copy.error = copy.error or event.error

    def _settled(self, event: e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed, _sequence: int) -> None:
        copy = self._copies.pop(event.job_id, None)
        if copy is None:
            return
        copy.settled_ns = self.now_ns
        copy.outcome = "completed"
        if isinstance(event, e.LoadFailed | e.SaveFailed):
            copy.outcome = "given up" if isinstance(event, e.SaveFailed) and not event.quiet else "failed"
            copy.error = event.error or copy.error
        elif copy.num_pages and copy.num_bytes:
            self._bytes_per_page = copy.num_bytes / copy.num_pages
        self._end_copy(copy)

    def _end_copy(self, copy: Copy) -> None:
        copy.last_ns = self.now_ns
        self._num_copies[copy.kind == "load"] -= 1
        life = copy.life
        if life is not None and copy.kind == "load":
            life.num_bytes_loaded += copy.num_bytes
            life.num_tokens_loaded += (copy.num_tokens or 0) if copy.outcome == "completed" else 0
        elif life is not None:
            life.num_bytes_saved += copy.num_bytes
            life.num_chunks_saved += len(copy.chunks) if copy.outcome == "completed" else 0
        if life is not None and copy.outcome != "completed":
            life.num_failures += 1
        self._listener.copy_ended(copy)

    # --- moments ------------------------------------------------------------------------------

    def _happened(self, event: e.Event, sequence: int) -> None:
        request_id: str = getattr(event, "request_id", "")
        life = self._lives.get(request_id)
        if life is not None and isinstance(event, e.InvariantViolated | e.HookFailed):
            life.num_failures += 1
        fields = {
            name: value.hex() if isinstance(value, bytes) else value
            for name, value in msgspec.structs.asdict(event).items()
            if name != "time_ns"
        }
        text = words(event, self.projections.core)
        if not text and isinstance(event, e.ExtensionEvent):
            return  # another event tells it
        text = text or _text(event)
        is_trouble = isinstance(event, _TROUBLE)
        self._listener.happened(Moment(event.id, sequence, self.now_ns, request_id, life, text, is_trouble, fields))

    def _complete(self) -> None:
        """The last observation and its decisions are all taken up."""
        event, self._moment = self._moment, None
        if event is None:
            return
        if isinstance(event, e.StepScheduled):
            gauges = self.gauges()
            step = Step(
                event.step,
                self._moment_sequence,
                self.now_ns,
                event.num_scheduled_tokens,
                self._moment_events,
                gauges,
            )
            self._listener.step_scheduled(step)
        elif self._changed:
            gauges = self.gauges()
        else:
            return
        self._changed = False
        self._listener.counted(self.now_ns, gauges)


def _text(event: e.Event) -> str:
    match event:
        case e.ChunkEvicted():
            return f"chunk {event.key.hex()} evicted to make room for a save of {event.request_id}"
        case e.ChunkTainted():
            return f"chunk {event.key.hex()} tainted, not offered again until saved anew"
        case e.LoadErrorsObserved():
            return f"{len(event.block_ids)} blocks could not be filled"
        case _:
            return event.id
