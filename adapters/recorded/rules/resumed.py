"""Preempted requests: whether a connector offers them the KV that it has."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvledger.adapters.recorded.payloads import LookupReturned, Transferred
from kvledger.lifecycle import Core, on
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import AuditModel, Checker, Visits

MAX_KEYS = 1 << 20
"""Maximum number of different keys that are remembered. If there are more, the rule no longer knows how long the
connector keeps blocks."""
NEVER = -1


@attrs.frozen
class _Held:
    """Tokens of a request that the connector had, because it offered them."""

    num_tokens: int
    saved_at: int
    """Number of blocks that all requests had saved before these tokens: before the last save of each of them."""
    sequence: int
    """Sequence number of the event that shows that the connector had the tokens."""


@attrs.define
class _Account:
    held: _Held | None = None
    is_resumed: bool = False
    has_been_offered: bool = False
    """Whether the request was offered tokens since its last preemption."""
    num_computed_tokens: int = 0
    """Computed tokens at the request's last lookup."""
    num_tokens: int = 0


class ResumeCoversOutput(Checker):
    """RESUME_COVERS_OUTPUT: a preempted request is looked up with all its tokens and offered its stored tokens.

    If a connector does not offer the stored tokens, no output is wrong. The tokens are recomputed, which takes time.

    Verifies: the core's rule of the same name, RESUME_COVERS_OUTPUT. Also verifies that the connector offers a
    preempted request tokens if two conditions are true:

    - Before the preemption, an answer covered more than 2 n + b tokens of the request. vLLM now finds n tokens
      computed, and b is the block size.
    - The connector is likely to have these tokens: since their save, at most N blocks were saved. N is known from the
      log: some block was offered again although N blocks had been saved since its last use. A use of a block is a
      lookup or save of a request with this block.

    Does not verify: tokens that were saved and never offered, because no event shows when they are stored; offers after
    a failed load; offers for models with several groups of layers; offers of tokens that were saved before a reset.
    """

    rule = "RESUME_COVERS_OUTPUT"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._core = Core.standard().rules[self.rule](model)
        self._forget()
        self._block_size = model.configuration.block_size
        self._knows_all = len(model.configuration.windows) == 1

    def _forget(self) -> None:
        self._accounts: dict[int, _Account] = {}
        self._seen_at: dict[bytes, int] = {}
        """Key of a block → number of different blocks that had been saved at the last lookup or save of a request with
        this block."""
        self._saved_at: dict[bytes, int] = {}
        """Key of a block → number of blocks, with repetitions, that had been saved before this block's last save."""
        self._num_saved_blocks = 0
        self._num_survived = 0
        """Largest number of different blocks that were saved between the last use of a block and a later offer of this
        block."""

    def visits(self) -> Visits:
        """Return pairs (event class, method): first of the core's rule, then of this rule."""
        return [*self._core.visits(), *super().visits()]

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        self._forget()

    @on(e.SessionContinued, e.RequestReleased)
    def _over(self, event: e.SessionContinued | e.RequestReleased) -> None:
        if self.moment.life is not None:
            self._accounts.pop(self.moment.life.ordinal, None)

    @on(e.RequestPreempted)
    def _preempted(self, _event: e.RequestPreempted) -> None:
        account = None if self.moment.life is None else self._accounts.get(self.moment.life.ordinal)
        if account is not None:
            account.is_resumed, account.has_been_offered = True, False

    @on(LookupReturned)
    def _answered(self, answer: LookupReturned) -> None:
        life = self.moment.life
        if not self._knows_all or life is None:
            return
        account = self._accounts.setdefault(life.ordinal, _Account())
        account.num_computed_tokens, account.num_tokens = answer.num_computed_tokens, answer.num_tokens
        if answer.num_external_tokens:
            account.has_been_offered = True
            self._offered(account, answer.num_computed_tokens + answer.num_external_tokens, life.keys)
        self._seen(life.keys)

    @on(Transferred)
    def _copied(self, copy: Transferred) -> None:
        life = self.moment.life
        if not self._knows_all or life is None or copy.is_load:
            return
        first = max(copy.first_block, 0)
        for key in life.keys[first : first + len(copy.block_ids)]:
            self._saved_at[key] = self._num_saved_blocks
        self._num_saved_blocks += len(copy.block_ids)
        self._seen(life.keys)

    def _seen(self, keys: Sequence[bytes]) -> None:
        if len(self._seen_at) > MAX_KEYS:
            self._knows_all = False
            self._forget()
        # A lookup or a save may keep its blocks from being evicted; the log does not show whether it does.
        self._seen_at.update(dict.fromkeys(keys, len(self._saved_at)))

    def _offered(self, account: _Account, num_tokens: int, keys: Sequence[bytes]) -> None:
        """Note that the connector has the first `num_tokens` tokens of a request whose blocks have these keys."""
        keys = keys[: num_tokens // self._block_size]
        if keys and keys[-1] in self._seen_at:
            self._num_survived = max(self._num_survived, len(self._saved_at) - self._seen_at[keys[-1]])
        saved_at = min((self._saved_at.get(key, NEVER) for key in keys), default=NEVER)
        account.held = None if saved_at == NEVER else _Held(num_tokens, saved_at, self.moment.sequence)

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        life = self.moment.life
        account = None if life is None else self._accounts.get(life.ordinal)
        if life is None or account is None or not account.is_resumed or account.held is None:
            return
        account.is_resumed = False
        held = account.held
        num_tokens = min(held.num_tokens, account.num_tokens - 1)
        has_survived = self._num_saved_blocks - held.saved_at <= self._num_survived
        if account.has_been_offered or life.num_failed_loads or not has_survived:
            return
        if num_tokens <= 2 * account.num_computed_tokens + self._block_size:
            return
        detail = (
            f"the connector offers nothing after the preemption, though it had {held.num_tokens} tokens of the "
            f"request, so all tokens after the first {account.num_computed_tokens} are computed again"
        )
        self.broken(detail, held.sequence)
