"""Each life of a request, computed from the log: its state, its counts, its keys.

This module uses observations and recorded decisions, and no code of `projections/`, so that an error in that code
cannot hide itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.machine import Standing, Tables
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.ranges import Count, SumOfTokens
from kvledger.lifecycle.reader.chains import Chains
from kvledger.lifecycle.reader.moment import Moment, Visits, num_intact_tokens
from kvledger.lifecycle.reader.records import NEVER, Life, Spent
from kvledger.lifecycle.reader.sub_states import SubStates
from kvledger.lifecycle.states import BlocksRegion, RequestState


class StoredLives(msgspec.Struct, forbid_unknown_fields=True):
    """State of `Lives`, as plain values."""

    lives: list[tuple[Life, int]]
    """(life without its keys, number of the list with its keys in `Chains`), in the order of arrival."""
    num_steps: Count
    num_scheduled_tokens: SumOfTokens
    num_arrived: Count
    last_steps: tuple[int, int]
    has_hook_failed: bool
    is_partial: bool
    stopped_extensions: dict[str, int]


class Lives:
    """The present lives of all request ids, by request id and by ordinal.

    The transition tables define how events move state and blocks. An event is legal if the tables have a row for it. If
    events are missing, lives continue as partial lives, and an event about an unknown request id begins a partial life.
    """

    def __init__(self, tables: Tables, chunk_size: int, moment: Moment) -> None:
        self._moment = moment
        self._dests = {trigger: dict(_dests(trigger, tables)) for trigger in tables.legal}
        """Trigger → phase and blocks before → (phase and blocks after, whether there is a row)."""
        self._events = tables.request_events
        self._may_refuse = frozenset(filter(tables.may_refuse, self._events))
        """Classes of observations that states may refuse."""
        self._sub_states = SubStates(tables)
        self._chunk_size = chunk_size
        self._lives: dict[str, Life] = {}
        self._by_ordinal: dict[int, Life] = {}
        self._is_partial = False
        """Whether events are missing."""
        self._over_now: list[Life] = []
        self.num_steps = 0
        self.last_steps = (0, 0)
        """Sequence numbers of the last step and the one before it; 0 if there was none."""
        self.num_arrived = 0
        """Number of lives so far, which is the ordinal of the next one."""
        self.has_hook_failed = False
        self.num_decoding = 0
        """Number of lives that decode one token per step without a row in `StepScheduled`."""
        self.num_scheduled_tokens = 0
        """Scheduled tokens of all requests in the last step."""

    def __iter__(self) -> Iterator[Life]:
        return iter(self._lives.values())

    def get(self, request_id: str) -> Life | None:
        """Return the present life of a request id; None if there is none. Observations are about this life."""
        return self._lives.get(request_id)

    def of(self, ordinal: int) -> Life | None:
        """Return the life with this ordinal, which a decision names; None after the life is over."""
        return self._by_ordinal.get(ordinal)

    def in_generation(self, decision: e.RequestDecision) -> Life | None:
        """Return the decision's life if it is in the generation that the decision names; else None."""
        life = self.of(decision.ordinal)
        return life if life is not None and life.generation == decision.generation else None

    @property
    def num_open(self) -> int:
        """Number of lives that have not finished."""
        return sum(life.state is not RequestState.FINISHED for life in self)

    def path_before_observation(self, life: Life) -> str:
        """Return the life's state and sub-state (`Life.path`) before the last observation.

        Empty if the life began with that observation, or if the state was unknown.
        """
        return life.path_before if life.moved_at == self._moment.cause else life.path

    def num_computed_tokens(self, life: Life) -> int:
        """Return how many tokens of the life are computed or in flight after the last step."""
        if life.decoding_since == NEVER:
            return life.counted_tokens
        return life.counted_tokens + self.num_steps - life.decoding_since

    def num_computed_before_step(self, life: Life) -> int:
        """Return how many tokens of the life were computed or in flight before the last step."""
        if life.row[0] == self.num_steps:
            return life.row[1]
        return self.num_computed_tokens(life) - (life.decoding_since != NEVER)  # else it was not in the step

    def num_steps_decoding(self, life: Life) -> int:
        """Return for how many steps in a row the life has been steady."""
        return 0 if life.decoding_since == NEVER else self.num_steps - life.decoding_since

    def stored(self, chains: Chains) -> StoredLives:
        """Return the state."""
        return StoredLives(
            [(msgspec.structs.replace(life, keys=[]), chains.number_of(life.keys)) for life in self],
            self.num_steps,
            self.num_scheduled_tokens,
            self.num_arrived,
            self.last_steps,
            self.has_hook_failed,
            self._is_partial,
            dict(self.stopped_extensions),
        )

    def resume(self, stored: StoredLives, chains: Chains) -> None:
        """Restore a stored state."""
        self.num_steps, self.num_scheduled_tokens = stored.num_steps, stored.num_scheduled_tokens
        self.num_arrived, self.last_steps = stored.num_arrived, stored.last_steps
        self.has_hook_failed, self._is_partial = stored.has_hook_failed, stored.is_partial
        self._sub_states.stopped = dict(stored.stopped_extensions)
        for life, chain in stored.lives:
            life.keys = chains.chains[chain]
            self._lives[life.request_id] = life
            if life.ordinal != NEVER:
                self._by_ordinal[life.ordinal] = life
            self.num_decoding += life.decoding_since != NEVER

    def spent(self, life: Life) -> Spent:
        """Return how the life has spent its time until now."""
        return life.spent.with_time_in(life.state, self._moment.time_ns - life.state_since_ns)

    def pop_over(self) -> list[Life]:
        """Return the lives that ended since the last call."""
        over, self._over_now = self._over_now, []
        return over

    def lost(self) -> None:
        """Mark all lives as partial, because events are missing. From here on, their counts are only bounds."""
        self._is_partial = True
        for life in self:
            life.is_partial = True
            self._count(life, self.num_computed_tokens(life))
            life.settled = life.settled[0], 0
            life.num_own = life.num_old = NEVER

    def meetings(self) -> Visits:
        """Return pairs (event class, fold) for all classes of events about one request.

        These folds run before all others. They find the event's life, record whether the event is legal, and update the
        life's state and blocks.
        """
        events = [event_class for event_class in self._events if event_class is not e.RequestArrived]
        return [(e.RequestArrived, self._meet_arrival), *((event_class, self._meet) for event_class in events)]

    # --- state and blocks ------------------------------------------------------------------------

    def _meet(self, event: e.RequestEvent) -> None:
        moment = self._moment
        moment.life = life = self._lives.get(event.request_id)
        if self._is_partial:
            moment.life = life = self._met_late(event, life)
        if life is None:
            moment.state_before, moment.path_before, moment.is_legal = None, "", False
            moment.is_refused = type(event) in self._may_refuse
            return
        standing = moment.state_before, moment.blocks_before = life.state, life.blocks
        moment.path_before, moment.num_computed_tokens = life.path, self.num_computed_tokens(life)
        trigger = e.trigger_of(event)
        dests = self._dests.get(trigger, {})
        dest, moment.is_legal = dests.get(standing, (standing, True))
        moment.is_refused = not (moment.is_legal or life.is_partial) and type(event) in self._may_refuse
        # A decision about an earlier generation must not move this one.
        if isinstance(event, e.RequestDecision) and self.in_generation(event) is not life:
            return
        self._sub_states.move(event, trigger, life)
        if dest != standing:
            self._move(life, *dest, is_legal=moment.is_legal)
        if not life.is_state_known:
            self._tell_state(life, dests)
        if life.path != moment.path_before:
            self._note_path(life, moment.path_before)

    def _note_path(self, life: Life, path: str) -> None:
        """Record that the life's path changes at this event. Only the first change at an observation counts."""
        if life.moved_at != self._moment.cause:
            life.moved_at, life.path_before = self._moment.cause, path

    def _move(self, life: Life, state: RequestState, blocks: BlocksRegion, *, is_legal: bool) -> None:
        life.blocks = blocks
        if state is not life.state:
            life.spent = self.spent(life)
            life.state, life.state_since_ns = state, self._moment.time_ns
            if not is_legal:  # so no row of a sub-state was taken
                life.sub_state = ""

    def _meet_arrival(self, event: e.RequestArrived) -> None:
        moment = self._moment
        moment.life = moment.earlier = earlier = self.get(event.request_id)
        moment.state_before = None if earlier is None else earlier.state
        moment.path_before = "" if earlier is None else earlier.path
        moment.num_computed_tokens = 0 if earlier is None else self.num_computed_tokens(earlier)
        moment.is_legal, moment.is_refused = earlier is None or earlier.state is RequestState.FINISHED, False

    # --- after a gap -----------------------------------------------------------------------------

    def _met_late(self, event: e.RequestEvent, life: Life | None) -> Life | None:
        """In a log with missing events, return the life that an event is about. Begin the life if it is unknown."""
        if not isinstance(event, e.RequestDecision):
            return self._begin_late(event.request_id) if life is None else life
        if life is not None and NEVER < life.ordinal < event.ordinal:  # the id was used again while events are missing
            self._over(life)
            life = None
        if life is None and not isinstance(event, e.RequestReleased) and event.ordinal not in self._by_ordinal:
            life = self._begin_late(event.request_id)
        if life is not None and life.ordinal == NEVER:
            life.ordinal = event.ordinal
            self._by_ordinal[event.ordinal] = life
        if life is not None and life.is_partial and life.ordinal == event.ordinal:
            life.generation = max(life.generation, event.generation)
        return life

    def _begin_late(self, request_id: str) -> Life:
        life = Life(request_id, NEVER, 0, 0, is_partial=True, is_state_known=False)
        life.state_since_ns = self._moment.time_ns
        self._lives[request_id] = life
        return life

    @staticmethod
    def _tell_state(life: Life, dests: Mapping[Standing, tuple[Standing, bool]]) -> None:
        """Set the state of a life whose state is unknown, if the event can lead to one state only."""
        states = {state for (state, _), is_legal in dests.values() if is_legal}
        if len(states) == 1:
            life.state, life.is_state_known = states.pop(), True

    # --- begin and end of a life -----------------------------------------------------------------

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived) -> None:
        # In a damaged log another id may have the ordinal.
        for earlier in filter(None, dict.fromkeys((self.get(event.request_id), self.of(event.ordinal)))):
            self._over(earlier)
        self.num_arrived = max(self.num_arrived, event.ordinal + 1)
        num_tokens, now_ns = event.num_prompt_tokens, event.time_ns
        self._moment.life = life = Life(event.request_id, event.ordinal, num_tokens, num_tokens)
        life.skips_prefix_cache, life.is_salted = event.skips_prefix_cache, event.is_salted
        life.arrived_at = life.moved_at = self._moment.sequence
        life.arrived_ns = life.state_since_ns = now_ns
        self._lives[event.request_id] = self._by_ordinal[event.ordinal] = life

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased) -> None:
        life = self.in_generation(event)
        if life is not None:
            self._over(life)

    def _over(self, life: Life) -> None:
        self._count(life, self.num_computed_tokens(life))
        self._over_now.append(life)
        if self.get(life.request_id) is life:
            del self._lives[life.request_id]
        self._by_ordinal.pop(life.ordinal, None)

    # --- events in a life ------------------------------------------------------------------------

    @on(e.LookupRequested)
    def _lookup_requested(self, event: e.LookupRequested) -> None:
        life = self._moment.life
        if life is not None and self._moment.is_legal:
            life.num_tokens = event.num_tokens
            life.stale_generation = NEVER  # vLLM looks up only requests without computed tokens

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted) -> None:
        life = self._moment.life
        if life is not None:
            self._about_to_stop(life)
            life.generation += 1
            life.num_preemptions += 1
            life.num_tokens_before_preemption = max(life.num_tokens_before_preemption, event.num_settled_tokens)
            life.preempted_at = self._moment.sequence
            life.num_tokens = event.num_tokens
            life.settled = (num_intact_tokens(event), self._moment.sequence)
            self._count(life, 0)

    @on(e.SessionContinued)
    def _session_continued(self, event: e.SessionContinued) -> None:
        life = self._moment.life
        if life is not None:
            if life.is_stale and event.num_computed_tokens:
                life.stale_generation += 1  # the next turn is computed on top of what the reset made stale
            life.generation += 1
            life.num_tokens, life.num_prompt_tokens = event.num_tokens, event.num_prompt_tokens
            life.num_tokens_before_preemption = min(life.num_tokens_before_preemption, event.num_computed_tokens)
            life.keys = life.keys[: event.num_computed_tokens // self._chunk_size]  # other tokens follow, so other keys
            self._cut(life, event.num_computed_tokens)

    @on(e.TokensRolledBack)
    def _rolled_back(self, event: e.TokensRolledBack) -> None:
        life = self._moment.life
        if life is not None:
            life.generation += event.num_computed_tokens == 0
            life.num_tokens = max(life.num_tokens, self.num_computed_tokens(life))  # a rollback cuts no tokens
            self._cut(life, event.num_computed_tokens)

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished) -> None:
        life = self._moment.life
        if life is not None:
            self._about_to_stop(life)
            life.num_tokens, life.finished_at = event.num_tokens, self._moment.sequence
            life.settled = (min(num_intact_tokens(event), event.num_tokens - 1), self._moment.sequence)
            self._count(life, self.num_computed_tokens(life))

    def _about_to_stop(self, life: Life) -> None:
        self._moment.was_stale, self._moment.num_steps_decoded = life.is_stale, self.num_steps_decoding(life)
        life.settled_before = life.settled[0]

    @on(e.HookFailed)
    def _hook_failed(self, _event: e.HookFailed) -> None:
        self.has_hook_failed = True

    @on(e.BlocksHeld)
    def _held(self, event: e.BlocksHeld) -> None:
        life = self.of(event.ordinal)
        if life is not None and life.held_at == NEVER:
            life.held_at = self._moment.sequence

    @on(e.ExtensionStopped)
    def _extension_stopped(self, event: e.ExtensionStopped) -> None:
        for life in self:
            if life.sub_state:
                self._note_path(life, life.path)
        self._sub_states.stop(event.extension, self._moment.sequence, self)

    @property
    def stopped_extensions(self) -> Mapping[str, int]:
        """Extension that was stopped → sequence number of the event that stopped it."""
        return self._sub_states.stopped

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
            life.quarantined_at = life.quarantined_at or self._moment.sequence

    @on(e.ChunkKeysObserved)
    def _keys_observed(self, event: e.ChunkKeysObserved) -> None:
        life = self._moment.life
        if life is None or not self._moment.is_legal:
            return
        if event.first_chunk == len(life.keys):
            life.keys += event.keys
        elif event.first_chunk < len(life.keys):  # keys after a gap would name other chunks
            life.keys = [*life.keys[: event.first_chunk], *event.keys]

    @on(e.CacheReset)
    def _reset(self, event: e.CacheReset) -> None:
        for life in self:
            if life.blocks is not BlocksRegion.NONE:
                life.stale_generation = life.generation
                life.reset_at = self._moment.sequence

    @on(e.BlocksAllocated)
    def _blocks_allocated(self, event: e.BlocksAllocated) -> None:
        if self._moment.life is not None and self._moment.state_before is RequestState.PREEMPTED:
            self._moment.life.settled = (0, 0)  # new blocks, in which nothing is written yet

    # --- steps -----------------------------------------------------------------------------------

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        """Fold a step. A steady life gets one token, unless the step pauses the life or has a row for it."""
        self._moment.refused_rows, self._moment.unknown_rows, self._moment.moved_rows = [], [], []
        for ordinal in event.paused:
            life = self.of(ordinal)
            if life is None or life.decoding_since == NEVER:
                self._moment.unknown_rows.append(ordinal)
            else:
                self._count(life, self.num_computed_tokens(life))
        self.num_steps += 1
        self.last_steps = self._moment.sequence, self.last_steps[0]
        self.num_scheduled_tokens = 0
        decoding: list[Life] = []
        for ordinal, num_computed_tokens, num_scheduled_tokens, num_tokens in event.advanced:
            self.num_scheduled_tokens += num_scheduled_tokens
            life = self.of(ordinal)
            if life is None:
                self._moment.unknown_rows.append(ordinal)
                continue
            self._row(life, num_computed_tokens)
            life.num_tokens = num_tokens
            life.computes_first = False
            self._run(life)
            self._count(life, num_computed_tokens + num_scheduled_tokens)
            if num_scheduled_tokens == 1 and num_computed_tokens + 1 >= num_tokens:
                decoding.append(life)
        self.num_scheduled_tokens += self.num_decoding
        for life in decoding:
            life.decoding_since = self.num_steps
        self.num_decoding += len(decoding)
        for ordinal, _, num_settled_tokens, _ in event.settled:
            life = self.of(ordinal)
            if life is not None:
                life.settled_before, life.settled = life.settled[0], (num_settled_tokens, self._moment.sequence)

    def _run(self, life: Life) -> None:
        (state, blocks), is_legal = self._dests["tokens.scheduled"][life.state, life.blocks]
        if not is_legal:
            self._moment.refused_rows.append((life, life.state, life.blocks))
        if state is not life.state or not life.is_state_known:
            self._note_path(life, life.path)
        self._move(life, state, blocks, is_legal=is_legal)
        life.is_state_known = True

    def _row(self, life: Life, num_computed_tokens: int) -> None:
        """Store the life's row of this step. Add it to `moved_rows` if it has more tokens than the reader counted."""
        counted = self.num_computed_tokens(life) - (life.decoding_since != NEVER)
        if num_computed_tokens > counted:
            self._moment.moved_rows.append((life, counted, num_computed_tokens))
        life.row = self.num_steps, num_computed_tokens

    def _cut(self, life: Life, num_computed_tokens: int) -> None:
        num_settled_tokens, sequence = life.settled
        life.settled = (min(num_settled_tokens, num_computed_tokens), self._moment.sequence if sequence else 0)
        self._count(life, num_computed_tokens)

    def _count(self, life: Life, num_computed_tokens: int) -> None:
        life.counted_tokens = num_computed_tokens
        if life.decoding_since != NEVER:
            life.decoding_since = NEVER
            self.num_decoding -= 1


def _dests(trigger: str, tables: Tables) -> Iterator[tuple[Standing, tuple[Standing, bool]]]:
    is_folded = "tracker" in tables.gating.closed_fold.get(trigger.partition("/")[0], ("tracker",))
    for standing, dest in tables.after[trigger].items():
        is_legal = standing in tables.legal[trigger]
        yield standing, (dest if is_legal or is_folded else standing, is_legal)
