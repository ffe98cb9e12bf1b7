"""The request tracker: one record per request that is not released, folded from its events.

It knows states, generations and token counts. It must not know blocks, chunks or jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import attrs
import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import trigger_of, triggers_of
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections import Projection
from kvledger.lifecycle.ranges import Count, LifeOrdinal, NumTokens, SumOfTokens, TimeNs
from kvledger.lifecycle.states import BlocksRegion, CurrentRegion, FirstRegion, RequestState, TrustRegion
from kvledger.lifecycle.steps import ComputedTokens

if TYPE_CHECKING:
    from kvledger.lifecycle.core import Core

    _Timed = (
        e.TransferReported
        | e.LoadErrorsObserved
        | e.HookFailed
        | e.LogNote
        | e.DecisionWithheld
        | e.LoadRefused
        | e.PrefixCacheReset
        | e.EndRefused
        | e.ExtensionNoted
        | e.PagesDigested
    )


@attrs.define
class RequestRecord:
    """What is known about one request."""

    request_id: str
    ordinal: LifeOrdinal
    """Names this life of the id; ids may be used again, ordinals never are."""
    num_prompt_tokens: NumTokens
    num_tokens: SumOfTokens
    """Prompt and output tokens, as of the last event that has the number. A rollback keeps those that were computed."""
    state: RequestState = RequestState.NEW
    """The phase. Its moves, and those of the next ones, stand in `table.py`."""
    sub: str = ""
    """The sub-state of an extension that the state is in."""
    blocks: BlocksRegion = BlocksRegion.NONE
    first: FirstRegion = FirstRegion.COMPUTED
    current: CurrentRegion = CurrentRegion.CURRENT
    trust: TrustRegion = TrustRegion.TRUSTED
    state_since_ns: TimeNs = 0
    generation: Count = 0
    num_preemptions: Count = 0
    num_failed_loads: Count = 0
    num_tokens_before_preemption: NumTokens = 0
    """The most settled tokens it ever lost; what lies below and is computed again was lost for good."""

    @property
    def path(self) -> str:
        """The state, with its sub-state where it has one: "preempted.starving"."""
        return f"{self.state}.{self.sub}" if self.sub else self.state.value

    @property
    def life(self) -> tuple[str, int, int]:
        """What a decision about it begins with: request id, ordinal, generation."""
        return self.request_id, self.ordinal, self.generation


class State(msgspec.Struct, forbid_unknown_fields=True):
    """What the tracker knows."""

    records: dict[LifeOrdinal, RequestRecord] = {}
    """Ordinal -> record."""
    num_arrived: Count = 0
    computed: ComputedTokens = msgspec.field(default_factory=ComputedTokens)
    time_ns: TimeNs = 0


class RequestTracker(Projection):
    """Folds request events into records.

    An observation concerns the present life of its id. Of decisions, those that move phase, blocks and first concern
    one generation of a life; the count of failed loads, a quarantine and the end concern the life.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._moved_by_step = frozenset(
            (*standing, first)
            for standing, dest in core.compiled.after["tokens.scheduled"].items()
            for first in FirstRegion
            if dest != standing or first is not FirstRegion.COMPUTED
        )
        """(Phase, blocks, first) that a step changes which schedules the request."""
        self.state = State()
        self.index()

    def check(self) -> None:
        """Records name the life that they are found by."""
        if any(record.ordinal != ordinal for ordinal, record in self.state.records.items()):
            raise ValueError("a record of a request is of another life than the one that it is kept for")

    def index(self) -> None:
        """Make anew what follows from the state."""
        self._present = {record.request_id: record for record in self.state.records.values()}
        # Asked several times for every event: the dicts' own methods.
        self.get: Callable[[str], RequestRecord | None] = self._present.get
        """The present life of a request id, for observations; None where it is released."""
        self.of: Callable[[int], RequestRecord | None] = self.state.records.get
        """The record of that life of a request, for decisions; None once it is released."""
        self.computed = self.state.computed
        """The counts of all lives that are not released."""

    @property
    def num_arrived(self) -> int:
        """Lives that have begun."""
        return self.state.num_arrived

    @property
    def num_steps(self) -> int:
        """Engine steps so far."""
        return self.computed.num_steps

    @property
    def time_ns(self) -> int:
        """Of the last event that has it."""
        return self.state.time_ns

    def __len__(self) -> int:
        return len(self.state.records)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self.state.records.values())

    def ordinal(self, request_id: str) -> int:
        """Which life of the id is the present one; -1 where it is released."""
        record = self._present.get(request_id)
        return -1 if record is None else record.ordinal

    def in_generation(self, decision: e.RequestDecision) -> RequestRecord | None:
        """The record of the decision's life, if it still is in the generation that the decision names."""
        record = self.state.records.get(decision.ordinal)
        return record if record is not None and record.generation == decision.generation else None

    def num_computed_tokens(self, record: RequestRecord) -> int:
        """Tokens computed or in flight after the last step."""
        return self.computed.count(record.ordinal)

    def folds(self) -> dict[type[e.Event], Callable[..., None]]:
        """Those that are marked, and of whatever else moves a state, which does nothing but that."""
        folds: dict[type[e.Event], Callable[..., None]] = {}
        for event_class in self._core.request_events:
            if any(map(self._moves, triggers_of(event_class))):
                folds[event_class] = self._decided if issubclass(event_class, e.RequestDecision) else self._observed
        return {**folds, **super().folds()}

    def _moves(self, trigger: str) -> bool:
        """Whether it may move anything."""
        compiled = self._core.compiled
        after = compiled.after.get(trigger, {})
        return trigger in compiled.others or any(before != dest for before, dest in after.items())

    # --- folds: total, no validation ---------------------------------------------------------

    @on(
        *(e.TransferReported, e.LoadErrorsObserved, e.HookFailed, e.LogNote, e.DecisionWithheld, e.LoadRefused),
        *(e.PrefixCacheReset, e.EndRefused),
        *(e.ExtensionNoted, e.PagesDigested),
    )
    def _advance_time(self, event: _Timed, _sequence: int) -> None:
        self.state.time_ns = event.time_ns

    @on(e.BlockTableObserved, e.WindowLeft, e.ExtensionObserved)
    def _observed_at(self, event: e.BlockTableObserved | e.WindowLeft | e.ExtensionObserved, sequence: int) -> None:
        self.state.time_ns = event.time_ns
        self._observed(event, sequence)

    @on(e.CacheReset)
    def _reset(self, event: e.CacheReset, _sequence: int) -> None:
        self.state.time_ns = event.time_ns
        for record in self.state.records.values():
            if record.blocks is not BlocksRegion.NONE:
                self._move(record, "cache.reset/held")

    @on(e.RequestArrived)
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
        self.computed.set(event.ordinal, 0)
        self.state.num_arrived += 1

    def _observed(self, event: e.RequestEvent, _sequence: int) -> None:
        record = self._present.get(event.request_id)
        if record is not None:
            self._move(record, trigger_of(event))

    def _decided(self, event: e.RequestDecision, _sequence: int) -> None:
        record = self.in_generation(event)
        if record is not None:
            self._move(record, trigger_of(event))

    def _move(self, record: RequestRecord, trigger: str) -> None:
        """Move every region as the tables say."""
        compiled = self._core.compiled
        after = compiled.after.get(trigger)
        if after is not None:
            standing = record.state, record.blocks
            state, record.blocks = after[standing]
            if state is not record.state:
                if standing not in compiled.legal[trigger]:  # so no row of a sub-state was taken
                    record.sub = ""
                record.state = state
                record.state_since_ns = self.time_ns
        for region, moves in compiled.others.get(trigger, ()):
            setattr(record, region, moves[getattr(record, region)])

    @on(e.LookupRequested)
    def _lookup_requested(self, event: e.LookupRequested, _sequence: int) -> None:
        self.state.time_ns = event.time_ns
        record = self._present.get(event.request_id)
        if record is not None:
            record.num_tokens = event.num_tokens
            self._move(record, event.id)

    @on(e.LoadFailed)
    def _load_failed(self, event: e.LoadFailed, sequence: int) -> None:
        record = self.state.records.get(event.ordinal)
        if record is not None:
            record.num_failed_loads += 1
        self._decided(event, sequence)

    @on(e.BlocksAllocated)
    def _blocks_allocated(self, event: e.BlocksAllocated, sequence: int) -> None:
        self.state.time_ns = event.time_ns
        self._observed(event, sequence)

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted, _sequence: int) -> None:
        self.state.time_ns = event.time_ns
        record = self._present.get(event.request_id)
        if record is not None:
            self._move(record, event.id)
            record.num_tokens = event.num_tokens
            record.num_tokens_before_preemption = max(record.num_tokens_before_preemption, event.num_settled_tokens)
            record.generation += 1
            record.num_preemptions += 1
            self.computed.set(record.ordinal, 0)

    @on(e.SessionContinued)
    def _session_continued(self, event: e.SessionContinued, _sequence: int) -> None:
        self.state.time_ns = event.time_ns
        record = self._present.get(event.request_id)
        if record is not None:
            self._move(record, trigger_of(event))
            record.generation += 1
            record.num_tokens = event.num_tokens
            record.num_prompt_tokens = event.num_prompt_tokens
            record.num_tokens_before_preemption = min(record.num_tokens_before_preemption, event.num_computed_tokens)
            self.computed.set(record.ordinal, event.num_computed_tokens)

    @on(e.TokensRolledBack)
    def _rolled_back(self, event: e.TokensRolledBack, _sequence: int) -> None:
        self.state.time_ns = event.time_ns
        record = self._present.get(event.request_id)
        if record is not None:
            self._move(record, trigger_of(event))
            if event.num_computed_tokens == 0:
                record.generation += 1
            record.num_tokens = max(record.num_tokens, self.num_computed_tokens(record))  # a rollback cuts no tokens
            self.computed.set(record.ordinal, event.num_computed_tokens)

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished, _sequence: int) -> None:
        self.state.time_ns = event.time_ns
        record = self._present.get(event.request_id)
        if record is not None:
            record.num_tokens = event.num_tokens
            self.computed.set(record.ordinal, self.num_computed_tokens(record))
            self._move(record, event.id)

    @on(e.RequestQuarantined)
    def _quarantined(self, event: e.RequestQuarantined, _sequence: int) -> None:
        record = self.state.records.get(event.ordinal)
        if record is not None:
            self._move(record, event.id)

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased, _sequence: int) -> None:
        record = self.in_generation(event)
        if record is not None:
            self._forget(record)

    def _forget(self, record: RequestRecord) -> None:
        self.state.records.pop(record.ordinal, None)
        self.computed.forget(record.ordinal)
        if self._present.get(record.request_id) is record:
            del self._present[record.request_id]

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled, _sequence: int) -> None:
        self.state.time_ns = event.time_ns
        self.computed.step(event)
        for ordinal, _, _, num_tokens in event.advanced:
            record = self.state.records.get(ordinal)
            if record is not None:
                record.num_tokens = num_tokens
                if (record.state, record.blocks, record.first) in self._moved_by_step:
                    self._move(record, "tokens.scheduled")
