"""Each life of a request as the log tells it: its state, its counts, its keys. The audit's own.

Made from observations and recorded decisions alone, apart from `projections/` on purpose: a mistake there must not hide
itself. It must not know blocks, chunks in the pool or jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.replay import Check, ReplayedEvent
from kvledger.lifecycle.states import BlocksRegion, CurrentRegion, FirstRegion, RequestState, TrustRegion

_NEVER = -1


class Life(msgspec.Struct, gc=False):
    """One life of a request id, from its arrival until it is released or another one takes its id."""

    request_id: str
    ordinal: int
    num_prompt_tokens: int
    num_tokens: int
    """Prompt and output, as of the last event that told."""
    state: RequestState = RequestState.NEW
    generation: int = 0
    num_failed_loads: int = 0
    computes_first: bool = False
    """Its load failed, and no step has computed anything for it since."""
    quarantined: bool = False
    holds_blocks: bool = False
    stale_generation: int = _NEVER
    """The generation that a reset has made stale; nothing of it may be saved."""
    counted_tokens: int = 0
    """Computed or scheduled tokens when they were last told."""
    steady_since: int = _NEVER
    """Number of the step since which it decodes one token a step without being told of."""
    keys: list[bytes] = msgspec.field(default_factory=list)
    """Of its chunks, from the first one on, as far as they were observed."""

    @property
    def is_stale(self) -> bool:
        """Whether what it has computed is from before a reset."""
        return self.stale_generation == self.generation


class Lives:
    """Request id -> its present life; ordinal -> that very life."""

    def __init__(self, core: Core, chunk_size: int) -> None:
        self._core = core
        self._chunk_size = chunk_size
        self._lives: dict[str, Life] = {}
        self._by_ordinal: dict[int, Life] = {}
        # The dicts' own methods, because they are asked for every event. So the dicts are changed, never replaced.
        self.get: Callable[[str], Life | None] = self._lives.get
        """The present life of an id, for observations; None where there is none."""
        self.of: Callable[[int], Life | None] = self._by_ordinal.get
        """That life, for decisions; None once it is over."""
        self.num_steps = 0
        self.time_ns = 0
        self.num_steady = 0
        """Lives that decode one token a step without being told of."""
        self.num_scheduled_tokens = 0
        """What the requests of the last step add up to."""

    def __iter__(self) -> Iterator[Life]:
        return iter(self._lives.values())

    def __len__(self) -> int:
        return len(self._lives)

    def in_generation(self, decision: e.RequestDecision) -> Life | None:
        """The decision's life, if it still is in the generation that the decision names."""
        life = self.of(decision.ordinal)
        return life if life is not None and life.generation == decision.generation else None

    def num_computed_tokens(self, life: Life) -> int:
        """Tokens computed or in flight after the last step."""
        if life.steady_since == _NEVER:
            return life.counted_tokens
        return life.counted_tokens + self.num_steps - life.steady_since

    def begin(self, projections: Projections) -> None:
        """Take over who is known where an audit starts in the middle of a log."""
        tracker = projections.tracker
        self.num_steps, self.time_ns = tracker.num_steps, tracker.time_ns
        for record in tracker:
            life = Life(record.request_id, record.ordinal, record.num_prompt_tokens, record.num_tokens)
            for name in _TAKEN_OVER:
                setattr(life, name, getattr(record, name))
            life.computes_first = record.first is FirstRegion.COMPUTES_FIRST
            life.quarantined = record.trust is TrustRegion.QUARANTINED
            life.holds_blocks = record.blocks is not BlocksRegion.NONE
            life.stale_generation = record.generation if record.current is CurrentRegion.STALE else _NEVER
            life.keys = list(projections.chunk_keys.of(record.request_id))
            self.num_steady += life.steady_since != _NEVER
            self._lives[life.request_id] = self._by_ordinal[life.ordinal] = life

    def folds(self) -> Iterable[tuple[type[e.Event], Check]]:
        """(event class, fold), to be done as checks are; they never find anything."""
        folds: dict[type[e.Event], Check] = {}
        for event_class in self._core.request_events:
            moves = {source: dest for (source, moving), dest in self._core.table.items() if moving is event_class}
            if any(source is not dest for source, dest in moves.items()):
                folds[event_class] = self._moving(moves, is_decided=issubclass(event_class, e.RequestDecision))
        folds |= {
            e.RequestArrived: self._arrived,
            e.RequestReleased: self._released,
            e.RequestQuarantined: self._quarantined,
            e.LoadFailed: self._load_failed,
            e.ChunkKeysObserved: self._keys_observed,
            e.StepScheduled: self._step_scheduled,
            e.TransferReported: self._told_time,
            e.LogNote: self._told_time,
            e.CacheReset: self._reset,
        }
        also: dict[type[e.Event], Check] = {
            e.LookupRequested: self._lookup_requested,
            e.BlocksAllocated: self._blocks_allocated,
            e.RequestPreempted: self._preempted,
            e.SessionContinued: self._session_continued,
            e.TokensRolledBack: self._rolled_back,
            e.RequestFinished: self._finished,
        }
        return [*folds.items(), *also.items()]

    def _moving(self, moves: dict[RequestState, RequestState], *, is_decided: bool) -> Check:
        get, in_generation, dest_of = self.get, self.in_generation, moves.get

        def move(event: Any, _step: ReplayedEvent, _projections: Projections) -> None:  # noqa: ANN401
            # A decision about an earlier generation must not move this one.
            life = in_generation(event) if is_decided else get(event.request_id)
            if life is not None:
                life.state = dest_of(life.state, life.state)

        return move

    # --- where a life begins and ends ------------------------------------------------------------

    def _arrived(self, event: e.RequestArrived, _step: ReplayedEvent, _projections: Projections) -> None:
        self.time_ns = event.time_ns
        earlier = self.get(event.request_id)
        if earlier is not None:
            self._over(earlier)
        num_tokens = event.num_prompt_tokens
        life = Life(event.request_id, event.ordinal, num_tokens, num_tokens)
        self._lives[event.request_id] = self._by_ordinal[event.ordinal] = life

    def _released(self, event: e.RequestReleased, _step: ReplayedEvent, _projections: Projections) -> None:
        life = self.in_generation(event)
        if life is not None:
            self._over(life)

    def _over(self, life: Life) -> None:
        self._count(life, 0)
        if self.get(life.request_id) is life:
            del self._lives[life.request_id]
        self._by_ordinal.pop(life.ordinal, None)

    # --- what happens to it ----------------------------------------------------------------------

    def _lookup_requested(self, event: e.LookupRequested, _step: ReplayedEvent, _projections: Projections) -> None:
        self.time_ns = event.time_ns
        life = self.get(event.request_id)
        if life is not None:
            life.num_tokens = event.num_tokens
            life.holds_blocks = False  # vLLM asks only about requests without computed tokens

    def _blocks_allocated(self, event: e.BlocksAllocated, _step: ReplayedEvent, _projections: Projections) -> None:
        self.time_ns = event.time_ns
        life = self.get(event.request_id)
        if life is not None:
            life.holds_blocks = True

    def _preempted(self, event: e.RequestPreempted, _step: ReplayedEvent, _projections: Projections) -> None:
        self.time_ns = event.time_ns
        life = self.get(event.request_id)
        if life is not None:
            life.generation += 1
            life.holds_blocks = False
            self._count(life, 0)

    def _session_continued(self, event: e.SessionContinued, _step: ReplayedEvent, _projections: Projections) -> None:
        self.time_ns = event.time_ns
        life = self.get(event.request_id)
        if life is not None:
            if life.is_stale and event.num_computed_tokens:
                life.stale_generation += 1  # the next turn is computed on top of what the reset made stale
            life.generation += 1
            life.num_tokens, life.num_prompt_tokens = event.num_tokens, event.num_prompt_tokens
            del life.keys[event.num_computed_tokens // self._chunk_size :]  # other tokens follow, so other keys
            self._count(life, event.num_computed_tokens)

    def _rolled_back(self, event: e.TokensRolledBack, _step: ReplayedEvent, _projections: Projections) -> None:
        self.time_ns = event.time_ns
        life = self.get(event.request_id)
        if life is not None:
            life.generation += event.num_computed_tokens == 0
            self._count(life, event.num_computed_tokens)

    def _finished(self, event: e.RequestFinished, _step: ReplayedEvent, _projections: Projections) -> None:
        self.time_ns = event.time_ns
        life = self.get(event.request_id)
        if life is not None:
            life.num_tokens = event.num_tokens
            life.holds_blocks = False
            self._count(life, self.num_computed_tokens(life))

    def _load_failed(self, event: e.LoadFailed, _step: ReplayedEvent, _projections: Projections) -> None:
        life = self.of(event.ordinal)
        if life is not None:
            life.num_failed_loads += 1
            life.computes_first |= life.generation == event.generation

    def _quarantined(self, event: e.RequestQuarantined, _step: ReplayedEvent, _projections: Projections) -> None:
        life = self.of(event.ordinal)
        if life is not None:
            life.quarantined = True

    def _keys_observed(self, event: e.ChunkKeysObserved, _step: ReplayedEvent, _projections: Projections) -> None:
        life = self.get(event.request_id)
        if life is not None and event.first_chunk <= len(life.keys):  # behind a gap they would stand for other chunks
            life.keys[event.first_chunk :] = event.keys

    def _reset(self, event: e.CacheReset, _step: ReplayedEvent, _projections: Projections) -> None:
        self.time_ns = event.time_ns
        for life in self:
            if life.holds_blocks:
                life.stale_generation = life.generation

    def _told_time(
        self, event: e.TransferReported | e.LogNote, _step: ReplayedEvent, _projections: Projections
    ) -> None:
        self.time_ns = event.time_ns

    # --- steps -----------------------------------------------------------------------------------

    def _step_scheduled(self, event: e.StepScheduled, _step: ReplayedEvent, _projections: Projections) -> None:
        """Count: each steady request of before one token, but for those that are paused or told of."""
        self.time_ns = event.time_ns
        life_of = self.of
        for ordinal in event.paused:
            life = life_of(ordinal)
            if life is not None:
                self._count(life, self.num_computed_tokens(life))
        self.num_steps += 1
        num_told = 0
        steady: list[Life] = []
        for ordinal, num_computed_tokens, num_scheduled_tokens, num_tokens in event.advanced:
            num_told += num_scheduled_tokens
            life = life_of(ordinal)
            if life is not None:
                life.num_tokens = num_tokens
                life.computes_first = False
                self._count(life, num_computed_tokens + num_scheduled_tokens)
                if num_scheduled_tokens == 1 and num_computed_tokens + 1 >= num_tokens:
                    steady.append(life)
        self.num_scheduled_tokens = num_told + self.num_steady
        for life in steady:
            life.steady_since = self.num_steps
        self.num_steady += len(steady)

    def _count(self, life: Life, num_computed_tokens: int) -> None:
        life.counted_tokens = num_computed_tokens
        if life.steady_since != _NEVER:
            life.steady_since = _NEVER
            self.num_steady -= 1


_TAKEN_OVER = (
    "state",
    "generation",
    "num_failed_loads",
    "counted_tokens",
    "steady_since",
)
