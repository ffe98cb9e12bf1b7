"""The order in which a request's blocks are saved: a rule that needs a decoder for the connector's metadata."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvledger.adapters.recorded import payloads
from kvledger.adapters.recorded.rules.copies import RuleOfTables
from kvledger.lifecycle import events as e
from kvledger.lifecycle import on
from kvledger.lifecycle.audit import AuditModel

MAX_KEYS = 1 << 20
"""Maximum number of different keys that are remembered. If there are more, it is not known which blocks are stored."""


@attrs.define
class _Account:
    num_blocks: int = 0
    """Number of blocks, from the first on, that are judged already."""
    nameless: list[int] = attrs.field(factory=list)
    """Indexes of saved blocks whose keys are not known yet."""
    hits: list[int] = attrs.field(factory=list)
    """Tokens of the hit in each answer since the request's last preemption."""


class StoreContiguous(RuleOfTables):
    """STORE_CONTIGUOUS: the saved blocks of a request have no hole, because a lookup finds nothing after a hole.

    If a connector breaks this rule, no output is wrong. The KV after a hole is computed again, which takes time.

    Verifies: each block of the request before the last block of a save was saved for a request with the same tokens,
    was loaded, or was in the hit of an answer. Each hole is reported once. If a save begins at the sum of the hits of
    several answers, the finding says that lookups have moved the save's start.
    Does not verify: anything in a log without its beginning, or after a copy whose tokens the log does not show; groups
    with a window; that saved blocks stay stored; that anything is saved at all.
    """

    rule = "STORE_CONTIGUOUS"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._accounts: dict[int, _Account] = {}
        self._stored: set[bytes] = set()
        self._knows_all = True
        self._block_size = model.configuration.block_size
        self._group = next((group for group, window in enumerate(model.configuration.windows) if not window), None)

    def begin(self) -> None:
        """Begin in the middle of a log: judge nothing, because earlier saves are not known."""
        self._knows_all = False

    def _account(self) -> _Account:
        """Return the account of the event's life. If the event has no life, return a new account that is not kept."""
        return (
            _Account() if self.moment.life is None else self._accounts.setdefault(self.moment.life.ordinal, _Account())
        )

    @on(e.RequestPreempted)
    def _preempted(self, _event: e.RequestPreempted) -> None:
        self._account().hits.clear()

    @on(e.SessionContinued)
    def _continued(self, event: e.SessionContinued) -> None:
        if self.moment.life is not None:  # the tokens after that are replaced
            account, num_blocks = self._account(), event.num_computed_tokens // self._block_size
            account.num_blocks = min(account.num_blocks, num_blocks)
            account.nameless = [place for place in account.nameless if place < num_blocks]

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased) -> None:
        self._accounts.pop(event.ordinal, None)

    @on(e.ChunkKeysObserved)
    def _named(self, _event: e.ChunkKeysObserved) -> None:
        life = self.moment.life
        account = None if life is None else self._accounts.get(life.ordinal)
        if life is not None and account is not None and account.nameless:
            named = [place for place in account.nameless if place < len(life.keys)]
            account.nameless = [place for place in account.nameless if place >= len(life.keys)]
            self._store(life.keys[place] for place in named)

    def _store(self, keys: Iterable[bytes]) -> None:
        self._stored.update(keys)
        if len(self._stored) > MAX_KEYS:
            self._knows_all = False
            self._stored.clear()

    @on(payloads.LookupReturned)
    def _answered(self, answer: payloads.LookupReturned) -> None:
        if self._knows_all and self.moment.life is not None and answer.num_external_tokens:
            hit = answer.num_computed_tokens + answer.num_external_tokens
            self._account().hits.append(hit)
            self._store(self.moment.life.keys[: hit // self._block_size])

    @on(payloads.Undecoded)
    def _undecoded(self, _undecoded: payloads.Undecoded) -> None:
        self._knows_all = False

    @on(payloads.TransferredFor)
    def _copied_for(self, copied: payloads.TransferredFor) -> None:
        life = self.lives.get(copied.request_id)
        if not copied.copy.is_load and life is not None and copied.copy.first_block >= 0:
            self._store(
                life.keys[copied.copy.first_block :]
            )  # its table is gone: all blocks that it may save count as saved
        elif not copied.copy.is_load:
            self._knows_all = False

    @on(payloads.Transferred)
    def _copied(self, copy: payloads.Transferred) -> None:
        self._knows_all &= copy.first_block >= 0
        if self._knows_all and copy.group == self._group:
            self._judge(copy)

    def _judge(self, copy: payloads.Transferred) -> None:
        life, table = self.moment.life, self.table_of(copy)
        if life is None or table is None:
            return
        copied = [place for place in copy.places(table) if place is not None]
        if len(copied) < len(copy.block_ids):  # TABLE_EQ reports what is wrong
            copied = list(range(copy.first_block, copy.first_block + len(copy.block_ids)))
        account, keys = self._account(), life.keys
        left_out = set(range(account.num_blocks, min(len(keys), copied[-1]))).difference(copied)
        holes = () if copy.is_load else sorted(place for place in left_out if keys[place] not in self._stored)
        account.num_blocks = max(account.num_blocks, copied[-1] + 1)
        self._store(keys[place] for place in copied if place < len(keys))
        account.nameless += [place for place in copied if place >= len(keys)]
        if holes:
            detail = (
                f"copy {copy.job} saves from block {copied[0]} of the request on, but no copy has saved block "
                f"{holes[0]}, so no lookup finds later blocks"
            )
            if len(account.hits) > 1 and sum(account.hits) // self._block_size == copied[0]:
                detail += f"; the hits of {len(account.hits)} answers add up to its start, so lookups moved the start"
            self.broken(detail)
