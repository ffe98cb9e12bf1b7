"""Each life of a request as the log tells it: its state, its counts, its keys. The audit's own.

Made from observations and recorded decisions alone, apart from `projections/` on purpose: a mistake there must not hide
itself. It must not know blocks, chunks in the pool or jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.model.moment import Check, EventChecks, Moment
from kvledger.lifecycle.machine import CompiledRegions
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.states import BlocksRegion, RequestState
from kvledger.lifecycle.table import Gating

if TYPE_CHECKING:
    from kvledger.lifecycle.audit.model.start import Start

NEVER = -1
PLACES = tuple((state, blocks) for state in RequestState for blocks in BlocksRegion)
"""Where a request can be in phase and blocks. Lives know their place in this list: hashing states costs."""
_EVERY_PLACE = tuple(range(len(PLACES)))
_REFUSED = -1
_PREEMPTED = RequestState.PREEMPTED


class Seen(msgspec.Struct, frozen=True, gc=False):
    """How many chunks of a life were committed from the first one on, and what that was true for."""

    num_chunks: int
    last_key: bytes
    """Of all that were known then. It hashes all before it, so an equal last key means equal keys."""
    num_keys: int
    num_added: int
    num_removed: int


class Life(msgspec.Struct, gc=False):
    """One life of a request id, from its arrival until it is released or another one takes its id."""

    request_id: str
    ordinal: int
    num_prompt_tokens: int
    num_tokens: int
    """Prompt and output, as of the last event that has it."""
    place: int = 0
    """Its place in `PLACES`; the next two are what stands there."""
    state: RequestState = RequestState.NEW
    blocks: BlocksRegion = BlocksRegion.NONE
    generation: int = 0
    num_failed_loads: int = 0
    computes_first: bool = False
    """Its load failed, and no step has computed anything for it since."""
    quarantined: bool = False
    stale_generation: int = NEVER
    """The generation that a reset has made stale; nothing of it may be saved."""
    counted_tokens: int = 0
    """Computed or scheduled tokens when they were last recorded."""
    decoding_since: int = NEVER
    """Number of the step since which it decodes one token a step without being recorded."""
    settled: tuple[int, int] = (0, 0)
    """Tokens that were certainly written, as far as the log shows, and the event that says so; 0: only a bound."""
    num_own: int = NEVER
    """Blocks at the front of its table that the next allocation does not give anew; `NEVER`: not known."""
    num_old: int = NEVER
    """The same of its last allocation."""
    finished_at: int = 0
    """Event of its end; 0: not ended, or before the audit began."""
    held_at: int = NEVER
    """Event that held its blocks for a copy; 0: before the audit began."""
    keys: list[bytes] = msgspec.field(default_factory=list)
    """Of its chunks, from the first one on, as far as they were observed."""
    seen: Seen | None = None
    """Kept by `Chunks`."""

    @property
    def name(self) -> tuple[str, int, int]:
        """What a decision about it begins with: request id, ordinal, generation."""
        return self.request_id, self.ordinal, self.generation

    @property
    def is_stale(self) -> bool:
        """Whether what it has computed is from before a reset."""
        return self.stale_generation == self.generation


class Lives:
    """Request id -> its present life; ordinal -> that very life.

    Phase and blocks go where the tables say; so an event is legal if they have a row for it.
    """

    def __init__(
        self,
        compiled: CompiledRegions,
        gating: Gating,
        events: Iterable[type[e.Event]],
        chunk_size: int,
        moment: Moment,
    ) -> None:
        self._moment = moment
        self._compiled, self._gating = compiled, gating
        self._events = tuple(events)
        self._chunk_size = chunk_size
        self._lives: dict[str, Life] = {}
        self._by_ordinal: dict[int, Life] = {}
        # The dicts' own methods, because they are asked for every event. So the dicts are changed, never replaced.
        self.get: Callable[[str], Life | None] = self._lives.get
        """The present life of an id, for observations; None where there is none."""
        self.of: Callable[[int], Life | None] = self._by_ordinal.get
        """That life, for decisions; None once it is over."""
        self._dests = {trigger: self._dests_of(trigger) for trigger in {*compiled.legal, *compiled.after}}
        self._of_a_step = self._dests["tokens.scheduled"]
        self.num_steps = 0
        self.time_ns = 0
        self.num_decoding = 0
        """Lives that decode one token a step without being recorded."""
        self.num_scheduled_tokens = 0
        """What the requests of the last step add up to."""

    def __iter__(self) -> Iterator[Life]:
        return iter(self._lives.values())

    def in_generation(self, decision: e.RequestDecision) -> Life | None:
        """The decision's life, if it still is in the generation that the decision names."""
        life = self.of(decision.ordinal)
        return life if life is not None and life.generation == decision.generation else None

    def num_computed_tokens(self, life: Life) -> int:
        """Tokens computed or in flight after the last step."""
        if life.decoding_since == NEVER:
            return life.counted_tokens
        return life.counted_tokens + self.num_steps - life.decoding_since

    def begin(self, start: Start) -> None:
        """Take over who is known where an audit starts in the middle of a log."""
        self.num_steps, self.time_ns = start.num_steps, start.time_ns
        for life in start.lives:
            self.num_decoding += life.decoding_since != NEVER
            life.settled = (self.num_computed_tokens(life), 0)
            self._lives[life.request_id] = self._by_ordinal[life.ordinal] = life

    def meetings(self) -> EventChecks:
        """(event class, fold) for events of requests, to be done first of all: whom each concerns, whether it may be.

        Phase and blocks go where it leads; the rest follows with `folds`.
        """
        return [
            (event_class, self._meeting(event_class))
            for event_class in self._events
            if issubclass(event_class, e.RequestEvent)
        ]

    # --- phase and blocks ------------------------------------------------------------------------

    def _dests_of(self, trigger: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(Where it leads from each place, or `_REFUSED`; where it leads although it is refused)."""
        legal, after = self._compiled.legal.get(trigger), self._compiled.after.get(trigger, {})
        allowed = [place if legal is None else legal.get(place) for place in PLACES]
        is_folded = "tracker" in self._gating.closed_fold.get(trigger.partition("/")[0], ("tracker",))
        refused = [after.get(place, place) if is_folded else place for place in PLACES]
        return (
            tuple(_REFUSED if dest is None else PLACES.index(dest) for dest in allowed),
            tuple(PLACES.index(dest) for dest in refused),
        )

    def _meeting(self, event_class: type[e.Event]) -> Check:
        get, moment = self.get, self._moment
        if event_class is e.RequestArrived:
            return self._meet_arrival
        dests = {
            trigger: self._dests.get(trigger, (_EVERY_PLACE, _EVERY_PLACE)) for trigger in e.triggers_of(event_class)
        }
        only = dests.get(event_class.id)
        is_decided = issubclass(event_class, e.RequestDecision)

        def meet(event: Any) -> None:  # noqa: ANN401 -- of its class
            moment.life = life = get(event.request_id)
            if life is None:
                moment.state_before, moment.is_legal = None, False
                return
            place = life.place
            moment.state_before, moment.blocks_before = life.state, life.blocks
            legal, refused = only or dests[e.trigger_of(event)]
            dest = legal[place]
            if dest == place:
                moment.is_legal = True
                return
            moment.is_legal = dest != _REFUSED
            if dest == _REFUSED:
                dest = refused[place]
            # A decision about an earlier generation must not move this one.
            if not is_decided or (event.generation == life.generation and event.ordinal == life.ordinal):
                life.place = dest
                life.state, life.blocks = PLACES[dest]

        return meet

    def _meet_arrival(self, event: e.RequestArrived) -> None:
        moment = self._moment
        moment.life = moment.earlier = earlier = self.get(event.request_id)
        moment.state_before = None if earlier is None else earlier.state
        moment.is_legal = earlier is None or earlier.state is RequestState.FINISHED

    # --- where a life begins and ends ------------------------------------------------------------

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived) -> None:
        self.time_ns = event.time_ns
        if self._moment.earlier is not None:
            self._over(self._moment.earlier)
        num_tokens = event.num_prompt_tokens
        self._moment.life = life = Life(event.request_id, event.ordinal, num_tokens, num_tokens)
        self._lives[event.request_id] = self._by_ordinal[event.ordinal] = life

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased) -> None:
        life = self.in_generation(event)
        if life is not None:
            self._over(life)

    def _over(self, life: Life) -> None:
        self._count(life, 0)
        if self.get(life.request_id) is life:
            del self._lives[life.request_id]
        self._by_ordinal.pop(life.ordinal, None)

    # --- what happens to it ----------------------------------------------------------------------

    @on(e.LookupRequested)
    def _lookup_requested(self, event: e.LookupRequested) -> None:
        self.time_ns = event.time_ns
        life = self._moment.life
        if life is not None and self._moment.is_legal:
            life.num_tokens = event.num_tokens
            life.stale_generation = NEVER  # vLLM asks only about requests without computed tokens

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted) -> None:
        self.time_ns = event.time_ns
        life = self._moment.life
        if life is not None:
            self._moment.was_stale = life.is_stale
            life.generation += 1
            life.settled = (event.num_intact_tokens, self._moment.sequence)
            self._count(life, 0)

    @on(e.SessionContinued)
    def _session_continued(self, event: e.SessionContinued) -> None:
        self.time_ns = event.time_ns
        life = self._moment.life
        if life is not None:
            if life.is_stale and event.num_computed_tokens:
                life.stale_generation += 1  # the next turn is computed on top of what the reset made stale
            life.generation += 1
            life.num_tokens, life.num_prompt_tokens = event.num_tokens, event.num_prompt_tokens
            del life.keys[event.num_computed_tokens // self._chunk_size :]  # other tokens follow, so other keys
            self._cut(life, event.num_computed_tokens)

    @on(e.TokensRolledBack)
    def _rolled_back(self, event: e.TokensRolledBack) -> None:
        self.time_ns = event.time_ns
        life = self._moment.life
        if life is not None:
            life.generation += event.num_computed_tokens == 0
            self._cut(life, event.num_computed_tokens)

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished) -> None:
        self.time_ns = event.time_ns
        life = self._moment.life
        if life is not None:
            self._moment.was_stale = life.is_stale
            life.num_tokens, life.finished_at = event.num_tokens, self._moment.sequence
            life.settled = (min(event.num_intact_tokens, event.num_tokens - 1), self._moment.sequence)
            self._count(life, self.num_computed_tokens(life))

    @on(e.BlocksHeld)
    def _held(self, event: e.BlocksHeld) -> None:
        life = self.of(event.ordinal)
        if life is not None and life.held_at == NEVER:
            life.held_at = self._moment.sequence

    @on(e.LoadFailed)
    def _load_failed(self, event: e.LoadFailed) -> None:
        life = self.of(event.ordinal)
        if life is not None:
            life.num_failed_loads += 1
            life.computes_first |= life.generation == event.generation

    @on(e.RequestQuarantined)
    def _quarantined(self, event: e.RequestQuarantined) -> None:
        life = self.of(event.ordinal)
        if life is not None:
            life.quarantined = True

    @on(e.ChunkKeysObserved)
    def _keys_observed(self, event: e.ChunkKeysObserved) -> None:
        life = self._moment.life
        if (
            life is not None and self._moment.is_legal and event.first_chunk <= len(life.keys)
        ):  # behind a gap they would stand for other chunks
            life.keys[event.first_chunk :] = event.keys

    @on(e.CacheReset)
    def _reset(self, event: e.CacheReset) -> None:
        self.time_ns = event.time_ns
        for life in self:
            if life.blocks is not BlocksRegion.NONE:
                life.stale_generation = life.generation

    @on(e.BlocksAllocated)
    def _blocks_allocated(self, event: e.BlocksAllocated) -> None:
        self.time_ns = event.time_ns
        if self._moment.life is not None and self._moment.state_before is _PREEMPTED:
            self._moment.life.settled = (0, 0)  # they are others than those it had: nothing is written yet

    @on(e.TransferReported, e.LogNote)
    def _keep_time(self, event: e.TransferReported | e.LogNote) -> None:
        self.time_ns = event.time_ns

    # --- steps -----------------------------------------------------------------------------------

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        """Count: one token for each that decoded one before, but for those that are paused or recorded."""
        self.time_ns = event.time_ns
        life_of = self.of
        legal = self._of_a_step[0]
        self._moment.refused_rows = self._moment.rows_of_nobody = ()
        for ordinal in event.paused:
            life = life_of(ordinal)
            if life is None or life.decoding_since == NEVER:
                self._moment.rows_of_nobody = [*self._moment.rows_of_nobody, ordinal]
            else:
                self._count(life, self.num_computed_tokens(life))
        self.num_steps += 1
        num_recorded = 0
        decoding: list[Life] = []
        for ordinal, num_computed_tokens, num_scheduled_tokens, num_tokens in event.advanced:
            num_recorded += num_scheduled_tokens
            life = life_of(ordinal)
            if life is not None:
                life.num_tokens = num_tokens
                life.computes_first = False
                if legal[life.place] != life.place:
                    self._scheduled(life)
                self._count(life, num_computed_tokens + num_scheduled_tokens)
                if num_scheduled_tokens == 1 and num_computed_tokens + 1 >= num_tokens:
                    decoding.append(life)
            else:
                self._moment.rows_of_nobody = [*self._moment.rows_of_nobody, ordinal]
        self.num_scheduled_tokens = num_recorded + self.num_decoding
        for life in decoding:
            life.decoding_since = self.num_steps
        self.num_decoding += len(decoding)
        for ordinal, _, num_settled_tokens in event.settled:
            life = life_of(ordinal)
            if life is not None:
                life.settled = (num_settled_tokens, self._moment.sequence)

    def _scheduled(self, life: Life) -> None:
        legal, refused = self._of_a_step
        dest = legal[life.place]
        if dest == _REFUSED:
            self._moment.refused_rows = [*self._moment.refused_rows, (life, life.state, life.blocks)]
            dest = refused[life.place]
        life.place = dest
        life.state, life.blocks = PLACES[dest]

    def _cut(self, life: Life, num_computed_tokens: int) -> None:
        num_settled_tokens, sequence = life.settled
        life.settled = (min(num_settled_tokens, num_computed_tokens), self._moment.sequence if sequence else 0)
        self._count(life, num_computed_tokens)

    def _count(self, life: Life, num_computed_tokens: int) -> None:
        life.counted_tokens = num_computed_tokens
        if life.decoding_since != NEVER:
            life.decoding_since = NEVER
            self.num_decoding -= 1
