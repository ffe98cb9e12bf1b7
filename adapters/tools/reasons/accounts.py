"""The class `Accounts`, which gives every missed and every recomputed token its reason.

The reader calls this class with each event. The class keeps an account for each life: which tokens the life was
offered, got, and had to compute. An account depends only on events of its own request, on events about the same chunks,
and on events about all requests.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from kvledger.adapters.tools.reasons.admissions import Admissions
from kvledger.adapters.tools.reasons.chunk_events import ChunkEvents
from kvledger.adapters.tools.reasons.computing import Computing
from kvledger.adapters.tools.reasons.explain import Explainer
from kvledger.adapters.tools.reasons.memory import Account, Memory, State
from kvledger.adapters.tools.reasons.moments import Moments
from kvledger.adapters.tools.reasons.recorded import RecordedChunks
from kvledger.adapters.tools.reasons.request_history import RequestHistory
from kvledger.adapters.tools.reasons.sums import OfferFate, Sums
from kvledger.lifecycle import BlocksRegion, RequestState, on
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Life, Model, Visitor, Visits, marked


class Accounts(Visitor[Model]):
    """Keeps an account for each life of a request, and the history of each chunk.

    Args:
        model: the reader's model.
        request_id: the only request whose accounts are kept; None for all requests.
        on_end: called with each life's history when the life ends. `histories` has the lives that have not ended.
        keeps_histories: whether histories contain more than token counts.
    """

    needs = ("lives", "tables", "copies")
    state: State

    def __init__(
        self,
        model: Model,
        *,
        request_id: str | None = None,
        on_end: Callable[[RequestHistory], None] | None = None,
        keeps_histories: bool = False,
    ) -> None:
        super().__init__(model)
        self._on_end = on_end
        self._memory = memory = Memory(model, request_id, keeps_histories=keeps_histories)
        self.state = memory.state
        self._admissions = Admissions(memory, Explainer(model.configuration, memory))
        self._recorded = RecordedChunks(model, lambda: memory.chunks, lambda: memory.state.recorded)
        self._parts = (
            ChunkEvents(memory),
            self._recorded,
            self._admissions,
            Computing(memory, self._admissions),
            self,
            *([Moments(memory)] if keeps_histories else []),
        )
        for life, account in memory.lives():  # from a snapshot
            account.is_computing = life.blocks is not BlocksRegion.NONE

    def index(self) -> None:
        """Use the restored state."""
        self._memory.use(self.state)

    def visits(self) -> Visits:
        """Return (event class, method to call) for each event class that a part gets."""
        return [(kind, visit) for part in self._parts for kind, visit in marked(part) if issubclass(kind, e.Event)]

    def sums(self) -> Sums:
        """Return the token counts so far. Tokens whose fate is undecided count as `PENDING` or `UNDER_WAY`."""
        sums = self._admissions.undecided()
        sums.add(self.state.ended)
        for account in self.state.accounts.values():
            sums.add(account.sums)
        return sums

    @property
    def histories(self) -> list[RequestHistory]:
        """Histories of the lives that have not ended."""
        return [self._history(life, account) for life, account in self._memory.lives()]

    def lost(self, _first_sequence: int, _last_sequence: int) -> None:
        """Forget the chunks, and count offers that are pending as lost. The missing events may have changed both."""
        self._memory.chunks.forget()
        self.state.recorded.forget()
        self.state.is_blind = True
        for account in self.state.accounts.values():
            was_computing = account.is_computing
            self._admissions.leave(account, OfferFate.LOST)
            account.tail, account.is_computing = None, was_computing

    def ended(self, life: Life) -> None:
        """Close the account of the life."""
        self._recorded.forget(life.ordinal)
        account = self._memory.account(life)
        if account is None:
            return
        self._admissions.leave(account)
        if self._on_end is not None:
            self._on_end(self._history(life, account))
        self.state.ended.add(account.sums)
        self._admissions.end(life)
        del self.state.accounts[life.request_id]

    def _history(self, life: Life, account: Account) -> RequestHistory:
        sums = self._admissions.undecided((life, account))
        sums.add(account.sums)
        history = account.history or RequestHistory(life.request_id, life.ordinal, sums)
        return attrs.evolve(
            history,
            ordinal=life.ordinal,
            sums=sums,
            spent=self._memory.model.lives.spent(life) if life.has_known_beginning else None,
            num_preemptions=life.num_preemptions,
            has_finished=life.state is RequestState.FINISHED,
        )

    # --- what happens to a request ---------------------------------------------------------------

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted) -> None:
        account = self._memory.present(event.request_id)
        if account is not None:
            self._admissions.leave(account)
            account.tail, account.taken_back_from, account.computed_end = None, 0, 0
            account.never_computed = 0, 0
            account.deferrals, account.num_deferred = (), 0

    @on(e.SessionContinued)
    def _session_continued(self, event: e.SessionContinued) -> None:
        account = self._memory.present(event.request_id)
        if account is not None:
            self._admissions.leave(account)
            account.is_computing = True
            account.tail, account.taken_back_from, account.computed_end = None, 0, event.num_computed_tokens
            account.never_computed = 0, 0

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished) -> None:
        account = self._memory.present(event.request_id)
        if account is not None:
            self._admissions.leave(account)
            account.tail = None

    @on(e.RequestQuarantined)
    def _quarantined(self, event: e.RequestQuarantined) -> None:
        account = self._memory.decided(event)
        if account is not None:
            account.quarantine = account.quarantine or (self.moment.sequence, event.cause)
            account.tail = None
            if event.cause == account.undelivered_sequence:  # no load will follow
                self._admissions.give_up_undelivered(account)

    @on(e.InvariantViolated)
    def _violated(self, event: e.InvariantViolated) -> None:
        account = self._memory.present(event.request_id)
        if account is not None:
            account.broken_rule = self.moment.sequence
