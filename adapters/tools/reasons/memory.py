"""The state that `Accounts` keeps in addition to the reader's model. All of it is computed from events."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import msgspec

from kvledger.adapters.tools.reasons import chunk_history, recorded
from kvledger.adapters.tools.reasons.chunk_history import ChunkFact, ChunkHistory
from kvledger.adapters.tools.reasons.reason import Reason
from kvledger.adapters.tools.reasons.request_history import Admission, RequestHistory
from kvledger.adapters.tools.reasons.sums import Sums
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import NEVER, Life, Model


@attrs.define
class Tail:
    """The tail of a preempted request, and the latest fact about the save of this tail."""

    first_token: int
    end_token: int
    fact: ChunkFact
    before_reset: int = 0
    """Sequence number of the last reset of only vLLM's prefix cache since the tail was computed; 0: no such reset."""


@attrs.define
class Answer:
    """An answered lookup. vLLM has not allocated blocks for the request since the answer."""

    sequence: int
    event: e.LookupAnswered


@attrs.define
class Load:
    """A load in flight."""

    ordinal: int
    """Ordinal of the load's life; `NEVER`: the life has ended. Only the sums of the whole log then count the load."""
    admission: int
    """Sequence number of the load's admission; 0: not in the log."""
    first_token: int
    num_tokens: int


@attrs.define
class Account:
    """Counts of the tokens that one life of a request was offered, got, and had to compute."""

    sums: Sums = attrs.field(factory=Sums)
    history: RequestHistory | None = None
    """History of the life; None if histories are not kept."""
    tail: Tail | None = None
    answer: Answer | None = None
    last_lookup: e.LookupAnswered | e.LookupDeferred | None = None
    """Latest answer or deferral since the request last got blocks; None: no lookup since then."""
    admission: Admission | None = None
    allocated_without_answer: int = 0
    """Sequence number of an allocation without a preceding lookup; 0: none. The next step completes the admission."""
    is_computing: bool = False
    """Whether a step has scheduled the request since its admission."""
    started_at: int = 0
    """Sequence number of the last admission after which a step ran the request. If the cache is reset later, the
    tokens that were computed between this admission and the reset are stale."""
    deferrals: tuple[int, ...] = ()
    """Sequence numbers of the first and the last of consecutive `lookup.deferred` events."""
    num_deferred: int = 0
    undelivered: int = 0
    """Tokens that were claimed and for which no load has been issued."""
    undelivered_sequence: int = 0
    quarantine: tuple[int, ...] = ()
    """Sequence numbers of `request.quarantined` and of its cause; empty: not quarantined."""
    withheld: int = 0
    """Sequence number of the `decision.withheld` about the answer to the last lookup; 0 if there is none."""
    hook_failed: int = 0
    broken_rule: int = 0
    """Sequence number of the last `invariant.violated`."""
    load_failed: tuple[int, ...] = ()
    """Sequence numbers of the last `load.failed` and of its cause. Empty again when a step starts the request."""
    computed_end: int = 0
    """The first token after those that were computed since the admission. Only steps that list the request count."""
    taken_back_from: int = 0
    """Number of tokens that the request had computed when the scheduler took some back; 0: none is still taken back."""
    never_computed: tuple[int, int] = (0, 0)
    """`(first, end)` of tokens that were claimed, and then neither loaded nor computed."""
    taken_back: tuple[int, ...] = ()
    taken_back_reason: Reason = Reason.ROLLED_BACK


class State(msgspec.Struct, forbid_unknown_fields=True):
    """State of `Accounts`, as plain values."""

    accounts: dict[str, Account] = {}
    """Request id → account of its present life."""
    chunks: chunk_history.State = msgspec.field(default_factory=chunk_history.State)
    ended: Sums = msgspec.field(default_factory=Sums)
    """Sums of all lives that have ended."""
    loads: dict[int, Load] = {}
    """Job id → load."""
    preempted: list[str] = []
    """Requests that were preempted since the last step."""
    recorded: recorded.State = msgspec.field(default_factory=recorded.State)
    is_blind: bool = False
    """Whether events are missing. Even a chunk that no event names may then have been saved."""


class Memory:
    """The log reader's `Model` and this package's `State`, with functions that search both.

    All parts of `Accounts` share one memory.

    Keeps only the accounts of the request `only`. If `only` is None, keeps the accounts of all requests.
    """

    def __init__(self, model: Model, only: str | None, *, keeps_histories: bool) -> None:
        self.model = model
        self._only = only
        self._keeps_histories = keeps_histories
        self.use(State())

    def use(self, state: State) -> None:
        """Continue from this state."""
        self.state = state
        self.chunks = ChunkHistory(state.chunks)
        for account in state.accounts.values():
            if account.history is not None and account.admission is not None:
                account.history.admissions[-1] = account.admission  # the same object again: it keeps changing

    def is_kept(self, request_id: str) -> bool:
        """Whether the accounts of this request are kept."""
        return self._only is None or request_id == self._only

    def account(self, life: Life | None) -> Account | None:
        """Return the account of a life; make it if necessary. None: there is no life, or its account is not kept."""
        if life is None or not self.is_kept(life.request_id):
            return None
        account = self.state.accounts.get(life.request_id)
        if account is None:
            history = RequestHistory(life.request_id, NEVER, Sums()) if self._keeps_histories else None
            account = self.state.accounts[life.request_id] = Account(history=history)
        return account

    def num_held_blocks(self, *, with_lost_by: Life | None = None) -> int:
        """Return the number of blocks that requests hold, or that `with_lost_by` has lost since the last step.

        0 if events are missing or a group of layers has a window.
        """
        if self.state.is_blind or self.model.layout.has_windows:
            return 0
        return self.model.tables.num_held(with_lost_by=with_lost_by)

    def lives(self) -> Iterator[tuple[Life, Account]]:
        """Yield the present lives whose accounts are kept."""
        for life in self.model.lives:
            account = self.account(life)
            if account is not None:
                yield life, account

    def present(self, request_id: str) -> Account | None:
        """Return the account of the request's present life."""
        return self.account(self.model.lives.get(request_id))

    def decided(self, decision: e.RequestDecision) -> Account | None:
        """Return the account of the life that a decision names."""
        return self.account(self.model.lives.of(decision.ordinal))
