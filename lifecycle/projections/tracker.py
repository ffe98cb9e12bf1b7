"""The request tracker: one record for each request that is not released.

The tracker knows neither the pool nor the progress of copies.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT, triggers_of
from kvledger.lifecycle.machine import Tables
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections.base import Projection, Subject
from kvledger.lifecycle.projections.computed_tokens import ComputedTokens
from kvledger.lifecycle.projections.request_record import RequestRecord, Tail
from kvledger.lifecycle.projections.unfilled import UnfilledBlocks
from kvledger.lifecycle.ranges import Count, LifeOrdinal, TimeNs
from kvledger.lifecycle.states import BlocksRegion, FirstRegion

if TYPE_CHECKING:
    from kvledger.lifecycle.configuration import LedgerConfiguration
    from kvledger.lifecycle.geometry import Geometry

    _Timed = (
        e.TransferReported
        | e.HookFailed
        | e.LogNote
        | e.LoadRefused
        | e.PrefixCacheReset
        | e.EndRefused
        | e.ExtensionNoted
        | e.PagesDigested
    )
    _TimedObservation = (
        e.ExtensionObserved
        | e.BlocksAllocated
        | e.BlockTableObserved
        | e.WindowLeft
        | e.RequestPreempted
        | e.RequestFinished
        | e.SessionContinued
        | e.TokensRolledBack
    )


class TailSlots(Protocol):
    """Counts references to slots of the host pool."""

    def acquire(self, slots: Sequence[int]) -> None:
        """Add the references of a tail."""

    def release(self, slots: Sequence[int]) -> None:
        """Remove the references of a dropped tail."""


_WINDOW = e.MissReason.WINDOW.value


class State(msgspec.Struct, forbid_unknown_fields=True):
    """The tracker's state."""

    requests: dict[LifeOrdinal, RequestRecord] = {}
    num_arrived: Count = 0
    computed: ComputedTokens = msgspec.field(default_factory=ComputedTokens)
    time_ns: TimeNs = 0
    """Time of the last event that has a time."""
    unfilled: UnfilledBlocks = msgspec.field(default_factory=UnfilledBlocks)
    has_hook_failed: bool = False
    """Whether a hook has failed, so that events may be missing from the log."""


class RequestTracker(Projection):
    """Keeps one record per request. An observation changes the record of the current life of its request id.

    A decision that changes `phase`, `blocks` or `first` applies only to the generation that it names. A quarantine, the
    number of failed loads, and changes of the tail apply to the whole life.
    """

    def __init__(
        self, tables: Tables, configuration: LedgerConfiguration, geometry: Geometry, tail_slots: TailSlots
    ) -> None:
        self._tables = tables
        self._geometry = geometry
        self._tail_slots = tail_slots
        self._chunk_size = configuration.chunk_size
        self._interval_chunks = max(1, -(-configuration.save_interval_tokens // configuration.chunk_size))
        self._moved_by_step = frozenset(
            (*standing, first)
            for standing, dest in tables.after["tokens.scheduled"].items()
            for first in FirstRegion
            if dest != standing or first is not FirstRegion.COMPUTED
        )
        """(phase, blocks, first) that change when a step schedules the request."""
        self.state = State()
        self.index()

    def check(self) -> None:
        """Check that records are stored under their ordinals, and that a tail is at most one chunk."""
        for ordinal, record in self.state.requests.items():
            if record.ordinal != ordinal:
                raise ValueError("a record of a request is stored under another life than its own")
            if record.tail is not None and record.tail.end_token - record.tail.first_token > self._chunk_size:
                raise ValueError("a tail is longer than a chunk")

    def index(self) -> None:
        """Recompute everything derived from the state."""
        self._present = {record.request_id: record for record in self.state.requests.values()}
        # Called several times per event, so both are the dicts' own methods.
        self.get: Callable[[str], RequestRecord | None] = self._present.get
        """Returns the record of a request id's current life, for observations; None once it is released."""
        self.of: Callable[[int], RequestRecord | None] = self.state.requests.get
        """Returns the record of an ordinal, for decisions; None once the life is released."""
        self.computed = self.state.computed
        self.unfilled = self.state.unfilled
        self._fleeting = [record for record in self if _is_fleeting(record)]
        """Records with values that the next step clears, so that a step need not visit every request."""

    @property
    def num_arrived(self) -> int:
        """Number of lives that have begun."""
        return self.state.num_arrived

    @property
    def num_steps(self) -> int:
        """Engine steps so far."""
        return self.computed.num_steps

    @property
    def time_ns(self) -> int:
        """Time of the last event that has a time."""
        return self.state.time_ns

    def __len__(self) -> int:
        return len(self.state.requests)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self.state.requests.values())

    def ordinal(self, request_id: str) -> int:
        """Return the ordinal of the request id's current life; -1 if there is none."""
        record = self._present.get(request_id)
        return -1 if record is None else record.ordinal

    def num_computed_tokens(self, record: RequestRecord) -> int:
        """Return how many tokens of the request are computed or in flight after the last step."""
        return self.computed.count(record.ordinal)

    def save_threshold(self, record: RequestRecord, num_chunks: int) -> int:
        """Return how many tokens must have settled before chunks after the first `num_chunks` are saved.

        Chunks of the prompt are saved at once, because other requests may need them soon. Decoded chunks wait for the
        end of an interval. Intervals count from token 0, so that requests that decode together are not saved together.
        """
        end = (num_chunks + 1) * self._chunk_size
        if end > record.num_prompt_tokens:
            end = (num_chunks // self._interval_chunks + 1) * self._interval_chunks * self._chunk_size
        return end

    # --- moves ---------------------------------------------------------------------------------

    def folds(self) -> dict[type[e.Event], Callable[..., None]]:
        """Event class → fold: the marked method, or for other events that change states, a fold that changes them."""
        folds: dict[type[e.Event], Callable[..., None]] = {}
        for event_class in self._tables.request_events:
            if any(map(self._moves, triggers_of(event_class))):
                folds[event_class] = self._decided if issubclass(event_class, e.RequestDecision) else self._observed
        return {**folds, **super().folds()}

    def _moves(self, trigger: str) -> bool:
        after = self._tables.after.get(trigger, {})
        return trigger in self._tables.others or any(before != dest for before, dest in after.items())

    def _observed(self, event: e.RequestEvent, _sequence: int, subject: Subject) -> None:
        record = subject.request
        if record is not None:
            self._move(record, subject.trigger)

    def _decided(self, event: e.RequestDecision, _sequence: int, subject: Subject) -> None:
        record = subject.current
        if record is not None:
            self._move(record, subject.trigger)

    def _move(self, record: RequestRecord, trigger: str) -> None:
        """Change the states in the record as the transition tables say."""
        tables = self._tables
        after = tables.after.get(trigger)
        if after is not None:
            standing = record.state, record.blocks
            state, record.blocks = after[standing]
            if state is not record.state:
                if standing not in tables.legal[trigger]:  # refused, so `sub_states` has not moved it
                    record.sub = ""
                record.state = state
                record.state_since_ns = self.time_ns
        for region, moves in tables.others.get(trigger, ()):
            setattr(record, region, moves[getattr(record, region)])

    @on(
        *(e.TransferReported, e.LogNote, e.LoadRefused),
        *(e.PrefixCacheReset, e.EndRefused),
        *(e.ExtensionNoted, e.PagesDigested),
    )
    def _advance_time(self, event: _Timed, _sequence: int, _subject: Subject) -> None:
        self.state.time_ns = event.time_ns

    @on(e.HookFailed)
    def _hook_failed(self, event: e.HookFailed, _sequence: int, _subject: Subject) -> None:
        self.state.time_ns = event.time_ns
        self.state.has_hook_failed = True

    @on(e.ExtensionObserved)
    def _observed_at(self, event: _TimedObservation, sequence: int, subject: Subject) -> None:
        self.state.time_ns = event.time_ns
        self._observed(event, sequence, subject)

    # --- the life of a request -----------------------------------------------------------------

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived, _sequence: int, subject: Subject) -> None:
        self.state.time_ns = event.time_ns
        for earlier in (subject.request, self.state.requests.get(event.ordinal)):
            if earlier is not None:
                self._forget(earlier)
        record = RequestRecord(
            event.request_id,
            event.ordinal,
            event.num_prompt_tokens,
            event.num_prompt_tokens,
            state_since_ns=event.time_ns,
        )
        self._present[event.request_id] = record
        self.state.requests[event.ordinal] = record
        self.computed.set(event.ordinal, 0)
        self.state.num_arrived += 1

    @on(e.RequestReleased)
    def _released(self, _event: e.RequestReleased, _sequence: int, subject: Subject) -> None:
        if subject.request is not None:
            self._drop_tail(subject.request)
        if subject.current is not None:
            self._forget(subject.current)

    def _forget(self, record: RequestRecord) -> None:
        self._drop_tail(record)
        self._fleeting = [each for each in self._fleeting if each is not record]
        self.state.requests.pop(record.ordinal, None)
        self.computed.forget(record.ordinal)
        if self._present.get(record.request_id) is record:
            del self._present[record.request_id]

    @on(e.ChunkKeysObserved)
    def _keys_observed(self, event: e.ChunkKeysObserved, _sequence: int, subject: Subject) -> None:
        record = subject.request
        if record is not None and event.first_chunk <= len(record.keys):  # keys after a gap belong to other chunks
            record.keys[event.first_chunk :] = event.keys

    @on(e.LookupRequested)
    def _lookup_requested(self, event: e.LookupRequested, _sequence: int, subject: Subject) -> None:
        self.state.time_ns = event.time_ns
        record = subject.request
        if record is not None:
            record.num_tokens = event.num_tokens
            self._move(record, event.id)
            # vLLM looks up only requests without blocks. After a failed asynchronous load it frees them without a hook.
            record.block_ids = None
            if self.unfilled.blocks:
                record.num_local_tokens = event.num_computed_tokens

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered, sequence: int, subject: Subject) -> None:
        record = subject.current
        if record is None:
            return
        record.answer, record.answered_at = event, sequence
        record.num_deferrals = record.deferred_for = 0
        if event.miss_reason == _WINDOW:
            record.wanted_boundary = max(0, event.num_hit_tokens) // self._chunk_size * self._chunk_size

    @on(e.LookupDeferred)
    def _deferred(self, event: e.LookupDeferred, _sequence: int, subject: Subject) -> None:
        record = subject.current
        if record is not None:
            record.num_deferrals, record.deferred_for, record.answer = event.num_deferred, event.job_id, None

    @on(e.DecisionWithheld)
    def _withheld(self, event: e.DecisionWithheld, _sequence: int, _subject: Subject) -> None:
        self.state.time_ns = event.time_ns
        record = self.get(event.request_id)
        if record is not None:
            record.answer = None

    @on(e.BlocksAllocated, e.BlockTableObserved)
    def _blocks_given(self, event: e.BlocksAllocated | e.BlockTableObserved, sequence: int, subject: Subject) -> None:
        self._observed_at(event, sequence, subject)
        record = subject.request
        if record is None:
            return
        record.block_ids = array("I", event.block_ids)
        if not isinstance(event, e.BlocksAllocated) or subject.is_refused:
            return
        record.claimed, record.answer = record.answer, None
        if record.num_local_tokens is not None:
            # Another connector may load into the new blocks without a report.
            first_new = self._geometry.pages_spanning(0, record.num_local_tokens).stop
            record.num_local_tokens = None
            self.unfilled.fill(event.block_ids[first_new:])

    @on(e.WindowLeft)
    def _window_left(self, event: e.WindowLeft, sequence: int, subject: Subject) -> None:
        self._observed_at(event, sequence, subject)
        if subject.request is not None:
            subject.request.window_freed_at = event.num_settled_tokens
            self._fleeting.append(subject.request)

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted, sequence: int, subject: Subject) -> None:
        record = self._stopped(event, sequence, subject)
        if record is not None:
            record.num_tokens = event.num_tokens
            record.num_tokens_before_preemption = max(record.num_tokens_before_preemption, event.num_settled_tokens)
            record.generation += 1
            record.num_preemptions += 1
            self.computed.set(record.ordinal, 0)

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished, sequence: int, subject: Subject) -> None:
        record = self._stopped(event, sequence, subject)
        if record is not None:
            record.num_tokens = event.num_tokens
            self.computed.set(record.ordinal, self.num_computed_tokens(record))

    def _stopped(
        self, event: e.RequestPreempted | e.RequestFinished, sequence: int, subject: Subject
    ) -> RequestRecord | None:
        """Handle a request that loses its blocks."""
        self._observed_at(event, sequence, subject)
        record = subject.request
        if record is None:
            return None
        if record.block_ids is not None:
            record.lost_block_ids, record.block_ids = record.block_ids, None
            self._fleeting.append(record)
        record.num_local_tokens = None
        if record.lost_block_ids:
            self.unfilled.lost.append(record.lost_block_ids)
        if not subject.is_refused:
            record.num_chunks_handled = 0
            _forget_lookups(record)
            self._drop_tail(record)
        return record

    @on(e.SessionContinued)
    def _session_continued(self, event: e.SessionContinued, sequence: int, subject: Subject) -> None:
        record = self._cut(event, sequence, subject)
        if record is not None:
            record.generation += 1
            record.num_tokens, record.num_prompt_tokens = event.num_tokens, event.num_prompt_tokens
            record.num_tokens_before_preemption = min(record.num_tokens_before_preemption, event.num_computed_tokens)
            self.computed.set(record.ordinal, event.num_computed_tokens)
            if not subject.is_refused:
                del record.keys[event.num_computed_tokens // self._chunk_size :]  # other tokens follow, with other keys
                _forget_lookups(record)
                self._drop_tail(record)

    @on(e.TokensRolledBack)
    def _rolled_back(self, event: e.TokensRolledBack, sequence: int, subject: Subject) -> None:
        record = self._cut(event, sequence, subject)
        if record is not None:
            if event.num_computed_tokens == 0:
                record.generation += 1
            record.num_tokens = max(record.num_tokens, self.num_computed_tokens(record))  # a rollback removes no tokens
            self.computed.set(record.ordinal, event.num_computed_tokens)

    def _cut(
        self, event: e.SessionContinued | e.TokensRolledBack, sequence: int, subject: Subject
    ) -> RequestRecord | None:
        """Handle a request with fewer computed tokens than before."""
        self._observed_at(event, sequence, subject)
        record = subject.request
        if record is not None and not subject.is_refused:
            num_chunks = event.num_computed_tokens // self._chunk_size
            record.num_chunks_handled = min(record.num_chunks_handled, num_chunks)
        return record

    @on(e.RequestQuarantined)
    def _quarantined(self, event: e.RequestQuarantined, _sequence: int, subject: Subject) -> None:
        record = subject.request
        if record is not None:
            self._move(record, event.id)
            self._drop_tail(record)

    @on(e.PrefillAdvanced, e.PrefillCompleted)
    def _progressed(self, event: e.PrefillAdvanced | e.PrefillCompleted, sequence: int, subject: Subject) -> None:
        self._decided(event, sequence, subject)
        if subject.request is not None:
            self._drop_tail(subject.request)

    @on(e.CacheReset)
    def _reset(self, event: e.CacheReset, _sequence: int, _subject: Subject) -> None:
        self.state.time_ns = event.time_ns
        tails = [(record.tail.job_id, record) for record in self if record.tail is not None]
        for _, record in sorted(tails, key=lambda each: each[0]):  # free the slots in the order of the saves
            self._drop_tail(record)
        for record in self:
            record.num_chunks_handled = record.wanted_boundary = 0
            record.answer = None
            record.num_deferrals = record.deferred_for = 0
            if record.blocks is not BlocksRegion.NONE:
                self._move(record, "cache.reset/held")

    # --- steps ---------------------------------------------------------------------------------

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled, _sequence: int, _subject: Subject) -> None:
        self.state.time_ns = event.time_ns
        for ordinal, _, num_settled_tokens, _ in event.settled:
            record = self.of(ordinal)
            # Until a load is complete, tokens computed on top of it may be wrong too.
            if record is not None and record.blocks is not BlocksRegion.LOADING:
                record.num_chunks_handled = num_settled_tokens // self._chunk_size
        self._begin_step()
        for ordinal, block_ids in event.extended:
            record = self.of(ordinal)
            if record is not None and record.block_ids is not None:
                if len(block_ids) == 1:  # faster: `array.extend` uses an iterator
                    record.block_ids.append(block_ids[0])
                else:
                    record.block_ids.extend(block_ids)
        self.unfilled.lost_before_step, self.unfilled.lost = self.unfilled.lost, []
        if self.unfilled.blocks:
            self.unfilled.step(event, self.state.requests, self._geometry)
        self.computed.step(event)
        for ordinal, _, _, num_tokens in event.advanced:
            record = self.of(ordinal)
            if record is not None:
                record.num_tokens = num_tokens
                if (record.state, record.blocks, record.first) in self._moved_by_step:
                    self._move(record, "tokens.scheduled")

    def _begin_step(self) -> None:
        """Forget lost blocks: from this step's forward pass on, they may be overwritten."""
        if self._fleeting:
            fleeting = {record.ordinal: record for record in self._fleeting}.values()
            for record in fleeting:
                record.lost_block_ids = None
                record.window_freed_before_step, record.window_freed_at = record.window_freed_at, None
            self._fleeting = [record for record in fleeting if _is_fleeting(record)]

    # --- loads, and the tail -------------------------------------------------------------------

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued, sequence: int, subject: Subject) -> None:
        self._decided(event, sequence, subject)
        self.unfilled.loads[event.job_id] = event.block_ids, event.is_async
        if self.unfilled.blocks:
            self.unfilled.fill(event.block_ids)
        tail = None if subject.request is None else subject.request.tail
        if tail is not None and tail.is_saved and not (set(tail.slots) - {NO_SLOT}).isdisjoint(event.slots):
            tail.load_id = event.job_id

    @on(e.LoadCompleted)
    def _load_completed(self, event: e.LoadCompleted, sequence: int, subject: Subject) -> None:
        self._decided(event, sequence, subject)
        self.unfilled.loads.pop(event.job_id, None)

    @on(e.LoadFailed)
    def _load_failed(self, event: e.LoadFailed, sequence: int, subject: Subject) -> None:
        block_ids, is_async = self.unfilled.loads.pop(event.job_id, ((), False))
        if is_async:
            # No request computes on such a block before the load is complete. Other tables with the block are older:
            # a window has left the block, or the table was lost.
            self.unfilled.mark(block_ids)
        else:
            self.unfilled.add(block_ids, self.state.requests)
        record = subject.request
        if record is not None:
            record.num_failed_loads += 1
            if record.tail is not None and record.tail.load_id == event.job_id:
                self._drop_tail(record)
        if subject.current is not None:
            subject.current.num_chunks_handled = 0
            self._decided(event, sequence, subject)

    @on(e.LoadErrorsObserved)
    def _load_errors_observed(self, event: e.LoadErrorsObserved, _sequence: int, _subject: Subject) -> None:
        self.state.time_ns = event.time_ns
        self.unfilled.add(event.block_ids, self.state.requests)

    @on(e.TailSaveIssued)
    def _tail_issued(self, event: e.TailSaveIssued, sequence: int, subject: Subject) -> None:
        self._decided(event, sequence, subject)
        if subject.request is not None:
            end_token = event.first_token + min(event.num_tokens, self._chunk_size)
            subject.request.tail = Tail(event.job_id, event.first_token, end_token, event.slots)

    @on(e.SaveCompleted, e.SaveFailed)
    def _save_settled(self, event: e.SaveCompleted | e.SaveFailed, sequence: int, subject: Subject) -> None:
        self._decided(event, sequence, subject)
        record = subject.request
        if record is None or record.tail is None or record.tail.job_id != event.job_id:
            return
        if isinstance(event, e.SaveCompleted):
            record.tail.is_saved = True
            self._tail_slots.acquire(record.tail.slots)  # the pool removes the job's reference right after
        else:
            record.tail = None

    def _drop_tail(self, record: RequestRecord) -> None:
        tail, record.tail = record.tail, None
        if tail is not None and tail.is_saved:
            self._tail_slots.release(tail.slots)


def _is_fleeting(record: RequestRecord) -> bool:
    return (
        record.lost_block_ids is not None
        or record.window_freed_at is not None
        or record.window_freed_before_step is not None
    )


def _forget_lookups(record: RequestRecord) -> None:
    record.answer = record.claimed = None
    record.wanted_boundary = record.num_deferrals = record.deferred_for = 0
