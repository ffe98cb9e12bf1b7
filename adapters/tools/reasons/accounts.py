"""The accounts: a fold over a log that gives every missed and every recomputed token its reason.

For all requests, or for one of them. It depends on few events besides a request's own: those that saved, evicted or
tainted the same chunks, and what happened to all. It is total: no event makes it fail, also not behind a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from kvledger.adapters.tools.reasons.admissions import Admissions
from kvledger.adapters.tools.reasons.chunk_events import ChunkEvents
from kvledger.adapters.tools.reasons.computing import Computing
from kvledger.adapters.tools.reasons.explain import Explainer
from kvledger.adapters.tools.reasons.life import UNBORN, Life
from kvledger.adapters.tools.reasons.memory import Memory, State
from kvledger.adapters.tools.reasons.moments import Moments
from kvledger.adapters.tools.reasons.request_history import RequestHistory
from kvledger.adapters.tools.reasons.sums import OfferFate, Sums
from kvledger.lifecycle import LedgerConfiguration, Projection, on
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import num_intact_tokens


class Accounts(Projection):
    """Feed it every event in order with `take`; `lose` where some are missing."""

    def __init__(
        self,
        configuration: LedgerConfiguration,
        *,
        request_id: str | None = None,
        on_end: Callable[[RequestHistory], None] | None = None,
        keeps_histories: bool = False,
        state: State | None = None,
    ) -> None:
        """Start with nothing, or where others stopped.

        Args:
            configuration: as in the log's header.
            request_id: the one request whose accounts are kept; None for all of them.
            on_end: called with each life of a request when it is over; `histories` has the others.
            keeps_histories: whether histories hold more than sums.
            state: what other accounts of the same requests of this log remembered; these change it.
        """
        self._chunk_size = configuration.chunk_size
        self._on_end = on_end
        self.state = State() if state is None else state
        """Everything that these accounts know, as of the last event."""
        memory = Memory(self.state, request_id, keeps_histories=keeps_histories)
        self._lives, self._chunks = memory.lives, memory.chunks
        self._chunk_events = ChunkEvents(configuration.chunk_size, self._lives, self._chunks)
        self._admissions = Admissions(memory, Explainer(configuration, memory), configuration.chunk_size)
        self._moments = Moments(memory) if keeps_histories else None
        self._folds: Mapping[type[e.Event], Callable[..., None]] = {
            **self._chunk_events.folds(),
            **self._admissions.folds(),
            **Computing(self._lives, self._admissions).folds(),
            **self.folds(),
        }

    def take(self, sequence: int, event: e.Event) -> None:
        """Take up the next event."""
        fold = self._folds.get(type(event))
        if fold is not None:
            fold(event, sequence)
        if self._moments is not None:
            self._moments.take(sequence, event)

    def lose(self) -> None:
        """Events are missing here, or the log begins late: what was remembered cannot be relied upon."""
        self._chunks.forget()
        self.state.is_blind = True
        self.state.loading.clear()
        for life in self._lives:
            was_computing = life.is_computing
            self._admissions.leave(life, OfferFate.LOST)
            life.tail, life.is_computing = None, was_computing

    def sums(self) -> Sums:
        """The sums so far, with what is still undecided as such."""
        sums = self._admissions.undecided()
        sums.add(self.state.ended)
        for life in self._lives:
            sums.add(life.sums)
        return sums

    @property
    def histories(self) -> list[RequestHistory]:
        """Of the lives that are not over."""
        return [self._request_history(life) for life in self._lives if self._lives.is_kept(life.request_id)]

    def _request_history(self, life: Life) -> RequestHistory:
        sums = self._admissions.undecided(life)
        sums.add(life.sums)
        if life.history is None:
            return RequestHistory(life.request_id, life.ordinal, sums)
        return attrs.evolve(life.history, ordinal=life.ordinal, sums=sums)

    # --- a request's life ------------------------------------------------------------------------

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived, _sequence: int) -> None:
        self._end(event.request_id)
        self._lives.begin(event.request_id, event.ordinal).num_prompt_tokens = event.num_prompt_tokens

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted, sequence: int) -> None:
        life = self._lives.any(event.request_id)
        # Of any request: whether a chunk or the tail is declined next, which others share or not, follows from these.
        life.mark, life.preempted = max(life.mark, event.num_settled_tokens), sequence
        if not self._lives.is_kept(event.request_id):
            return
        self._admissions.leave(life)
        life.generation += 1
        life.num_preemptions += 1
        life.tail, life.taken_back_from, life.computed_end = None, 0, 0
        life.deferrals, life.num_deferred = (), 0

    @on(e.SessionContinued)
    def _session_continued(self, event: e.SessionContinued, _sequence: int) -> None:
        life = self._lives.any(event.request_id)
        life.cut_keys(event.num_computed_tokens // self._chunk_size)
        life.mark = min(life.mark, event.num_computed_tokens)
        if self._lives.is_kept(event.request_id):
            self._admissions.leave(life)
            life.is_computing = True
            life.generation += 1
            life.num_prompt_tokens = event.num_prompt_tokens
            life.tail, life.taken_back_from, life.computed_end = None, 0, event.num_computed_tokens

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished, _sequence: int) -> None:
        life = self._lives.any(event.request_id)
        self._admissions.leave(life)
        life.tail = None
        self._chunk_events.end_unsettled(life, num_intact_tokens(event))

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased, _sequence: int) -> None:
        life = self._lives.get(event.request_id)
        counts_generations = self._lives.is_kept(event.request_id) and life is not None and life.ordinal != UNBORN
        if life is not None and (not counts_generations or life.generation == event.generation):
            self._end(event.request_id)

    def _end(self, request_id: str) -> None:
        life = self._lives.end(request_id)
        if life is None or not self._lives.is_kept(request_id):
            return
        self._admissions.leave(life)
        if self._on_end is not None:
            self._on_end(self._request_history(life))
        self.state.ended.add(life.sums)
        self._admissions.end(life)

    @on(e.RequestQuarantined)
    def _quarantined(self, event: e.RequestQuarantined, sequence: int) -> None:
        life = self._lives.kept(event.request_id)
        if life is not None:
            life.quarantined = life.quarantined or (sequence, event.cause)
            life.tail = None

    @on(e.InvariantViolated)
    def _violated(self, event: e.InvariantViolated, sequence: int) -> None:
        life = self._lives.get(event.request_id)
        if life is not None:
            life.broken_rule = sequence
