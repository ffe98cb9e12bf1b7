"""Blocks of copies: rules that need a decoder for the connector's metadata."""

from __future__ import annotations

from collections.abc import Sequence

from kvledger.adapters.recorded.payloads import Transferred
from kvledger.lifecycle import events as e
from kvledger.lifecycle import on
from kvledger.lifecycle.audit import AuditModel, Checker
from kvledger.lifecycle.events import NULL_BLOCK


class RuleOfTables(Checker):
    """Base of rules that need the last block table of each life.

    A copy may read blocks that its request has just lost.
    """

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._num_groups = len(model.configuration.windows)
        self._last: dict[int, Sequence[int]] = {}

    @on(e.RequestPreempted, e.RequestFinished)
    def _keep_table(self, _event: e.RequestEvent) -> None:
        if self.moment.life is not None:
            self._last[self.moment.life.ordinal] = tuple(self.tables.lost_by(self.moment.life))

    @on(e.RequestReleased)
    def _forget_table(self, event: e.RequestReleased) -> None:
        self._last.pop(event.ordinal, None)

    def table_of(self, copy: Transferred) -> Sequence[int] | None:
        """Return the request's blocks in the copy's group, in token order. If the group is unknown, return all blocks.

        None: the life has no blocks and has lost none.
        """
        life = self.moment.life
        table = None if life is None else self.tables.of(life.ordinal) or self._last.get(life.ordinal)
        if not table:
            return None
        return table if copy.group < 0 else table[copy.group :: self._num_groups]


class TableEq(RuleOfTables):
    """TABLE_EQ: a copy's blocks are in the request's block table, in the order of the copy.

    Verifies: the copy's first block is at the position in the table that the copy names. Each other block of the copy
    is later in the table than the copy's previous block. A copy may leave out blocks in between that are stored already
    (OffloadingConnector does so, 0.32).
    Does not verify: copies of a connector without a decoder; blocks whose tokens have left a window; that a copy leaves
    out only blocks that are stored already.
    """

    rule = "TABLE_EQ"

    @on(Transferred)
    def _copied(self, copy: Transferred) -> None:
        table = self.table_of(copy)
        if table is None or copy.first_block < 0:
            return
        start = copy.first_block
        for block_id, place in zip(copy.block_ids, copy.places(table), strict=False):
            if place is None:
                self.broken(_misplaced(copy, block_id, start, table))
                return
            start = place + 1


class SrcBlockOwned(RuleOfTables):
    """SRC_BLOCK_OWNED: a save reads blocks that its request holds, or has just lost.

    Verifies: the request of each save holds every block that the save reads, or has just lost it. The rule checks saves
    that a decoder has read.
    Does not verify: the block's position (TABLE_EQ); the block's content; saves whose request the metadata does not
    name.
    """

    rule = "SRC_BLOCK_OWNED"

    @on(Transferred)
    def _copied(self, copy: Transferred) -> None:
        table = self.table_of(copy)
        if table is None or copy.is_load:
            return
        own = {NULL_BLOCK, *table}
        foreign = next((block for block in copy.block_ids if block not in own), None)
        if foreign is not None:
            self.broken(f"copy {copy.job} reads block {foreign}, which does not belong to the request")


def _misplaced(copy: Transferred, block_id: int, start: int, table: Sequence[int]) -> str:
    if start > copy.first_block:
        return (
            f"copy {copy.job} takes block id {block_id} after position {start - 1} of the request's block table, "
            "but the table does not have this id after that position"
        )
    entry = f"id {table[start]}" if start < len(table) else "no block"
    return f"copy {copy.job} takes block id {block_id} for position {start} of the block table, which has {entry} there"
