"""The request tracker: one record per request that is not released, folded from its events.

It knows states, generations and token counts. It must not know blocks, chunks or jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import attrs
import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.machine import CompiledTable
from kvledger.lifecycle.states import RequestState

NOT_STEADY = -1


@attrs.define
class RequestRecord:
    """What is known about one request."""

    request_id: str
    ordinal: int
    """Names this life of the id; ids may be used again, ordinals never are."""
    num_prompt_tokens: int
    num_tokens: int
    """Prompt and output tokens, as of the last event that told."""
    state: RequestState = RequestState.NEW
    sub: str = ""
    """The sub-state of an extension that the state is in."""
    state_since_ns: int = 0
    generation: int = 0
    num_preemptions: int = 0
    num_failed_loads: int = 0
    computes_first: bool = False
    """Its load failed, and no step has computed anything for it since."""
    quarantined: bool = False
    holds_blocks: bool = False
    stale_generation: int = -1
    """The generation whose computed tokens a reset has made stale; nothing of it may be saved."""
    counted_tokens: int = 0
    """Computed or scheduled tokens at the last exact count; see `RequestTracker.num_computed_tokens`."""
    steady_since: int = NOT_STEADY
    """Step count since which it decodes one token a step."""
    num_tokens_before_preemption: int = 0
    """The most settled tokens it ever lost; what lies below and is computed again was lost for good."""

    @property
    def path(self) -> str:
        """The state, with its sub-state where it has one: "preempted.starving"."""
        return f"{self.state}.{self.sub}" if self.sub else self.state.value

    @property
    def life(self) -> tuple[str, int, int]:
        """What a decision about it begins with: request id, ordinal, generation."""
        return self.request_id, self.ordinal, self.generation

    @property
    def is_steady(self) -> bool:
        """Whether it decodes one token a step."""
        return self.steady_since != NOT_STEADY


class State(msgspec.Struct, forbid_unknown_fields=True):
    """What the tracker knows."""

    records: dict[int, RequestRecord] = {}
    """Ordinal -> record."""
    num_arrived: int = 0
    num_steps: int = 0
    time_ns: int = 0


class RequestTracker:
    """Folds request events into records.

    A steady request, one that decodes one token a step, is not touched by the fold of a step: its count is
    the step count since it became steady. So a step of 256 decoding requests costs the fold nothing.

    An observation concerns the present life of its id. Of decisions, those that move the state and what a failed load
    forbids concern one generation of a life; the count of failed loads, a quarantine and the end concern the life.
    """

    def __init__(self, table: CompiledTable) -> None:
        self._table = table
        self.state = State()
        self.index()

    def index(self) -> None:
        """Make anew what follows from the state."""
        self._present = {record.request_id: record for record in self.state.records.values()}
        # Asked several times for every event: the dicts' own methods.
        self.get: Callable[[str], RequestRecord | None] = self._present.get
        """The present life of a request id, for observations; None where it is released."""
        self.of: Callable[[int], RequestRecord | None] = self.state.records.get
        """The record of that life of a request, for decisions; None once it is released."""

    @property
    def num_arrived(self) -> int:
        """Lives that have begun."""
        return self.state.num_arrived

    @property
    def num_steps(self) -> int:
        """Engine steps so far."""
        return self.state.num_steps

    @property
    def time_ns(self) -> int:
        """Of the last event that told it."""
        return self.state.time_ns

    def __len__(self) -> int:
        return len(self.state.records)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self.state.records.values())

    def in_generation(self, decision: e.RequestDecision) -> RequestRecord | None:
        """The record of the decision's life, if it still is in the generation that the decision names."""
        record = self.state.records.get(decision.ordinal)
        return record if record is not None and record.generation == decision.generation else None

    def num_computed_tokens(self, record: RequestRecord) -> int:
        """Tokens computed or in flight after the last step."""
        if record.steady_since == NOT_STEADY:
            return record.counted_tokens
        return record.counted_tokens + self.num_steps - record.steady_since

    def folds(self) -> Mapping[type[e.Event], Callable[..., None]]:
        """Event class -> fold. Request events that do nothing but move the state are taken from the table."""
        folds: dict[type[e.Event], Callable[..., None]] = {}
        for event_class in {moving for _, moving in self._table}:
            move = self._move_of(event_class)
            if move is not None:
                folds[event_class] = move
        folds |= {
            e.RequestArrived: self._arrived,
            e.LookupRequested: self._lookup_requested,
            e.BlocksAllocated: self._blocks_allocated,
            e.RequestPreempted: self._preempted,
            e.SessionContinued: self._session_continued,
            e.TokensRolledBack: self._rolled_back,
            e.RequestFinished: self._finished,
            e.LoadFailed: self._load_failed,
            e.RequestQuarantined: self._quarantined,
            e.RequestReleased: self._released,
            e.StepScheduled: self._step_scheduled,
            e.TransferReported: self._told_time,
            e.LogNote: self._told_time,
            e.CacheReset: self._reset,
        }
        return folds

    def _move_of(self, event_class: type[e.RequestEvent]) -> Callable[..., None] | None:
        """The fold of an event that may move the state, or None for one that never does."""
        rows = self._table.items()
        if all(source is dest for (source, moving), dest in rows if moving is event_class):
            return None
        return self._decided if issubclass(event_class, e.RequestDecision) else self._move

    # --- folds: total, no validation ---------------------------------------------------------

    def _told_time(self, event: e.TransferReported | e.LogNote, _sequence: int) -> None:
        self.state.time_ns = event.time_ns

    def _reset(self, event: e.CacheReset, _sequence: int) -> None:
        self.state.time_ns = event.time_ns
        for record in self.state.records.values():
            if record.holds_blocks:
                record.stale_generation = record.generation

    def _arrived(self, event: e.RequestArrived, _sequence: int) -> None:
        self.state.time_ns = event.time_ns
        for earlier in (self._present.get(event.request_id), self.state.records.get(event.ordinal)):
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
        self.state.records[event.ordinal] = record
        self.state.num_arrived += 1

    def _move(self, event: e.RequestEvent, _sequence: int) -> None:
        record = self._present.get(event.request_id)
        if record is not None:
            self._move_record(record, type(event))

    def _decided(self, event: e.RequestDecision, _sequence: int) -> None:
        record = self.in_generation(event)
        if record is not None:
            self._move_record(record, type(event))

    def _move_record(self, record: RequestRecord, event_class: type[e.RequestEvent]) -> None:
        state = self._table.get((record.state, event_class))
        if state is not None and state is not record.state:
            record.state = state
            record.state_since_ns = self.time_ns

    def _lookup_requested(self, event: e.LookupRequested, sequence: int) -> None:
        self.state.time_ns = event.time_ns
        record = self._present.get(event.request_id)
        if record is not None:
            record.num_tokens = event.num_tokens
            # vLLM asks only about requests without computed tokens; one whose load failed was freed without a word.
            record.holds_blocks = False
        self._move(event, sequence)

    def _load_failed(self, event: e.LoadFailed, sequence: int) -> None:
        record = self.state.records.get(event.ordinal)
        if record is not None:
            record.num_failed_loads += 1
            # After a load within its step failed, vLLM has counted back to 0 before the report comes: another
            # generation. It runs on then, so nobody looks it up before it has computed something.
            if record.generation == event.generation:
                record.computes_first = True
        self._decided(event, sequence)

    def _blocks_allocated(self, event: e.BlocksAllocated, sequence: int) -> None:
        self.state.time_ns = event.time_ns
        self._move(event, sequence)
        record = self._present.get(event.request_id)
        if record is not None:
            record.holds_blocks = True

    def _preempted(self, event: e.RequestPreempted, sequence: int) -> None:
        self.state.time_ns = event.time_ns
        self._move(event, sequence)
        record = self._present.get(event.request_id)
        if record is not None:
            record.num_tokens_before_preemption = max(record.num_tokens_before_preemption, event.num_settled_tokens)
            record.generation += 1
            record.num_preemptions += 1
            record.holds_blocks = False
            self._count(record, 0)

    def _session_continued(self, event: e.SessionContinued, sequence: int) -> None:
        self.state.time_ns = event.time_ns
        self._move(event, sequence)
        record = self._present.get(event.request_id)
        if record is not None:
            if record.stale_generation == record.generation and event.num_computed_tokens:
                record.stale_generation += 1  # the next turn is computed on top of what the reset made stale
            record.generation += 1
            record.num_tokens = event.num_tokens
            record.num_prompt_tokens = event.num_prompt_tokens
            record.num_tokens_before_preemption = min(record.num_tokens_before_preemption, event.num_computed_tokens)
            self._count(record, event.num_computed_tokens)

    def _rolled_back(self, event: e.TokensRolledBack, sequence: int) -> None:
        self.state.time_ns = event.time_ns
        self._move(event, sequence)
        record = self._present.get(event.request_id)
        if record is not None:
            if event.num_computed_tokens == 0:
                record.generation += 1
            self._count(record, event.num_computed_tokens)

    def _finished(self, event: e.RequestFinished, sequence: int) -> None:
        self.state.time_ns = event.time_ns
        record = self._present.get(event.request_id)
        if record is not None:
            record.num_tokens = event.num_tokens
            record.holds_blocks = False
            self._count(record, self.num_computed_tokens(record))
        self._move(event, sequence)

    def _quarantined(self, event: e.RequestQuarantined, _sequence: int) -> None:
        record = self.state.records.get(event.ordinal)
        if record is not None:
            record.quarantined = True

    def _released(self, event: e.RequestReleased, _sequence: int) -> None:
        record = self.in_generation(event)
        if record is not None:
            self._forget(record)

    def _forget(self, record: RequestRecord) -> None:
        self.state.records.pop(record.ordinal, None)
        if self._present.get(record.request_id) is record:
            del self._present[record.request_id]

    def _step_scheduled(self, event: e.StepScheduled, _sequence: int) -> None:
        self.state.time_ns = event.time_ns
        for ordinal in event.paused:
            record = self.state.records.get(ordinal)
            if record is not None:
                self._count(record, self.num_computed_tokens(record))
        self.state.num_steps += 1
        for ordinal, num_computed_tokens, num_scheduled_tokens, num_tokens in event.advanced:
            record = self.state.records.get(ordinal)
            if record is not None:
                record.num_tokens = num_tokens
                record.computes_first = False
                self._count(record, num_computed_tokens + num_scheduled_tokens)
                if num_scheduled_tokens == 1 and num_computed_tokens + 1 >= num_tokens:
                    record.steady_since = self.num_steps

    def _count(self, record: RequestRecord, num_computed_tokens: int) -> None:
        record.counted_tokens = num_computed_tokens
        record.steady_since = NOT_STEADY
