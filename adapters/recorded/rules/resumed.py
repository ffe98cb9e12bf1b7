"""What a preempted request is answered, of what the connector has of it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvledger.adapters.recorded.payloads import LookupReturned, Transferred
from kvledger.lifecycle import Core, on
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import AuditModel, Checker, Visits

MAX_KEYS = 1 << 20
"""After so many different ones it is no longer known how much the connector can hold."""
NEVER = -1


@attrs.frozen
class _Held:
    """Tokens of a request that the connector was seen to have."""

    num_tokens: int
    saved_at: int
    """How many blocks had been saved, of everybody, when the first of these was."""
    sequence: int
    """The event that shows it."""


@attrs.define
class _Account:
    """One life."""

    held: _Held | None = None
    is_resumed: bool = False
    has_been_offered: bool = False
    """Since its last preemption."""
    num_computed_tokens: int = 0
    """When it was last looked up."""
    num_tokens: int = 0


class ResumeCoversOutput(Checker):
    """RESUME_COVERS_OUTPUT: a preempted request is looked up with all its tokens, and is given what is there.

    The second half is a matter of speed: what is there and not given is computed again.

    Verifies: the core's rule of this name; and that a resumed request is offered something where the connector had
    offered this very request more than twice of what is computed, and since that was saved too little else was to have
    driven it out: no more than what something that was offered later was seen to survive.
    Does not verify: the second half for what the request itself has saved and was never offered, for nothing says when
    that is done; where a load of it has failed; with several groups of layers; after a reset, of what was before it.
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
        """Key of a block -> different blocks saved when somebody who has it was last looked up or saved."""
        self._saved_at: dict[bytes, int] = {}
        """Key of a block -> blocks saved, the same ones again included, when it was last saved."""
        self._num_saved_blocks = 0
        self._num_survived = 0
        """The most different blocks that were saved after something that was offered later."""

    def visits(self) -> Visits:
        """Those of the core's rule first."""
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
        # A lookup or a save may keep what it concerns from being driven out; whether it does is not known.
        self._seen_at.update(dict.fromkeys(keys, len(self._saved_at)))

    def _offered(self, account: _Account, num_tokens: int, keys: Sequence[bytes]) -> None:
        """The connector has so many tokens of somebody."""
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
            f"nothing is loaded after its preemption, though the connector had {held.num_tokens} of its tokens: "
            f"all but {account.num_computed_tokens} are computed again"
        )
        self.broken(detail, held.sequence)
