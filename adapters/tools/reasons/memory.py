"""What the reasons remember of a log, next to what the reader's model knows. Everything in it comes from events."""

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
    """The part-filled last chunk of a preempted request, and what became of its copy."""

    first_token: int
    end_token: int
    fact: ChunkFact
    before_reset: int = 0
    """The last reset of vLLM's prefix cache alone that came after it was computed; 0 if there is none."""


@attrs.define
class Answer:
    """An answered lookup that no allocation has claimed."""

    sequence: int
    event: e.LookupAnswered


@attrs.define
class Load:
    """A load in flight."""

    ordinal: int
    """Of its life; `NEVER` once that is over. Then what becomes of the load is counted for the whole log."""
    admission: int
    """Sequence number of the admission that it is for; 0: it is not in the log."""
    first_token: int
    num_tokens: int


@attrs.define
class Account:
    """What one life of a request was offered, given and left to compute."""

    sums: Sums = attrs.field(factory=Sums)
    history: RequestHistory | None = None
    """None where histories are not kept."""
    tail: Tail | None = None
    answer: Answer | None = None
    last_lookup: e.LookupAnswered | e.LookupDeferred | None = None
    """Since it was last given blocks."""
    admission: Admission | None = None
    allocated_without_answer: int = 0
    """Sequence number of an allocation that no lookup preceded; the step that starts from it has the rest."""
    is_computing: bool = False
    """Whether it was in a step since it was admitted."""
    started_at: int = 0
    """Sequence number of the last admission that a step followed. What was computed since is stale after a reset."""
    deferrals: tuple[int, ...] = ()
    """First and last `lookup.deferred` in a row."""
    num_deferred: int = 0
    undelivered: int = 0
    """Tokens claimed for which no load has been issued."""
    undelivered_sequence: int = 0
    quarantine: tuple[int, ...] = ()
    """`request.quarantined` and its cause; empty: none in the log."""
    withheld: int = 0
    """The `decision.withheld` that took back what its last lookup was answered."""
    hook_failed: int = 0
    broken_rule: int = 0
    """The last `invariant.violated`."""
    load_failed: tuple[int, ...] = ()
    """The last `load.failed` and its cause, until a step computes."""
    computed_end: int = 0
    """How far steps say that it computed since it was admitted."""
    taken_back_from: int = 0
    """How far it had computed when the scheduler took tokens back."""
    never_computed: tuple[int, int] = (0, 0)
    """First token and the one after the last, of tokens that were claimed, not loaded, and not computed since."""
    taken_back: tuple[int, ...] = ()
    taken_back_reason: Reason = Reason.ROLLED_BACK


class State(msgspec.Struct, forbid_unknown_fields=True):
    """Plain values."""

    accounts: dict[str, Account] = {}
    """Request id → account of its present life."""
    chunks: chunk_history.State = msgspec.field(default_factory=chunk_history.State)
    ended: Sums = msgspec.field(default_factory=Sums)
    """Of all lives that are over."""
    loads: dict[int, Load] = {}
    """By job id."""
    preempted: list[str] = []
    """The requests that were preempted since the last step."""
    recorded: recorded.State = msgspec.field(default_factory=recorded.State)
    is_blind: bool = False
    """Whether events are missing, so that silence about a chunk says nothing."""


class Memory:
    """The model, the state, and what is found in it: one object for all parts of the reasons.

    Accounts are kept of `only` one request, or of all.
    """

    def __init__(self, model: Model, only: str | None, *, keeps_histories: bool) -> None:
        self.model = model
        self._only = only
        self._keeps_histories = keeps_histories
        self.use(State())

    def use(self, state: State) -> None:
        """Go on with this state."""
        self.state = state
        self.chunks = ChunkHistory(state.chunks)
        for account in state.accounts.values():
            if account.history is not None and account.admission is not None:
                account.history.admissions[-1] = account.admission  # one object, which goes on

    def is_kept(self, request_id: str) -> bool:
        """Whether the accounts of this request are kept."""
        return self._only is None or request_id == self._only

    def account(self, life: Life | None) -> Account | None:
        """The account of a life, which may begin here; None for no life, and for one whose account is not kept."""
        if life is None or not self.is_kept(life.request_id):
            return None
        account = self.state.accounts.get(life.request_id)
        if account is None:
            history = RequestHistory(life.request_id, NEVER, Sums()) if self._keeps_histories else None
            account = self.state.accounts[life.request_id] = Account(history=history)
        return account

    def num_held_blocks(self, *, with_lost_by: Life | None = None) -> int:
        """Blocks that all requests hold together; 0 if events are missing, or a group of layers has a window."""
        if self.state.is_blind or self.model.layout.has_windows:
            return 0
        return self.model.tables.num_held(with_lost_by=with_lost_by)

    def lives(self) -> Iterator[tuple[Life, Account]]:
        """The present lives whose accounts are kept."""
        for life in self.model.lives:
            account = self.account(life)
            if account is not None:
                yield life, account

    def present(self, request_id: str) -> Account | None:
        """The account of the request's present life."""
        return self.account(self.model.lives.get(request_id))

    def decided(self, decision: e.RequestDecision) -> Account | None:
        """The account of the life that a decision names."""
        return self.account(self.model.lives.of(decision.ordinal))
