"""Which blocks a copy reads or writes, where a decoder has read that from the connector's metadata."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from kvledger.adapters.recorder import payloads
from kvledger.adapters.recorder.payloads import payload_of
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Check, Model, Moment, Violation
from kvledger.lifecycle.windows import NULL_BLOCK


class Tables:
    """The last block table of each life: a copy may read blocks that its request has just lost."""

    def begin_checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event; the model is before these."""
        self._model = model
        self._num_groups = len(model.configuration.windows)
        self._last: dict[int, Sequence[int]] = {}
        return [
            (e.RequestPreempted, self._lost),
            (e.RequestFinished, self._lost),
            (e.RequestReleased, self._released),
        ]

    def _lost(self, _event: e.RequestEvent, moment: Moment) -> None:
        if moment.life is not None:
            self._last[moment.life.ordinal] = tuple(self._model.tables.lost_by(moment.life))

    def _released(self, event: e.RequestReleased, _moment: Moment) -> None:
        self._last.pop(event.ordinal, None)

    def of(self, copy: payloads.Transferred, moment: Moment) -> Sequence[int] | None:
        """The blocks of the copy's group, or of all, in token order; None where the life holds and has lost none."""
        life = moment.life
        table = None if life is None else self._model.tables.of(life.ordinal) or self._last.get(life.ordinal)
        if not table:
            return None
        return table if copy.group < 0 else table[copy.group :: self._num_groups]


class TableEq:
    """TABLE_EQ: a copy's blocks stand in the request's table, in the order of the copy.

    Verifies: the first block where the copy says that it stands, each other one behind the one before; what is stored
    already may be left out between them (OffloadingConnector does so, 0.32).
    Does not verify: copies of a connector without a decoder; blocks that a window has left; that nothing else is left
    out.
    """

    rule: ClassVar[str] = "TABLE_EQ"

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._tables = Tables()
        return [*self._tables.begin_checks(model), (e.ExtensionObserved, self._said)]

    def _said(self, event: e.ExtensionObserved, moment: Moment) -> list[Violation] | None:
        copy = payload_of(event)
        if not isinstance(copy, payloads.Transferred) or copy.first_block < 0:
            return None
        table = self._tables.of(copy, moment)
        if table is None:
            return None
        start = copy.first_block
        for block_id, place in zip(copy.block_ids, copy.places(table), strict=False):
            if place is None:
                return [_violation(self.rule, moment, _misplaced(copy, block_id, start, table))]
            start = place + 1
        return None


class SrcBlockOwned:
    """SRC_BLOCK_OWNED: a save reads blocks that its request holds, or has just lost.

    Verifies: this for each block of each save that a decoder has read.
    Does not verify: in which place the block stands (TABLE_EQ); what it holds; saves of which the metadata does not
    say for whom they are.
    """

    rule: ClassVar[str] = "SRC_BLOCK_OWNED"

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._tables = Tables()
        return [*self._tables.begin_checks(model), (e.ExtensionObserved, self._said)]

    def _said(self, event: e.ExtensionObserved, moment: Moment) -> list[Violation] | None:
        copy = payload_of(event)
        if not isinstance(copy, payloads.Transferred) or copy.is_load:
            return None
        table = self._tables.of(copy, moment)
        if table is None:
            return None
        own = {NULL_BLOCK, *table}
        foreign = next((block for block in copy.block_ids if block not in own), None)
        if foreign is None:
            return None
        detail = f"copy {copy.job} reads block {foreign}, which is not the request's"
        return [_violation(self.rule, moment, detail)]


def _misplaced(copy: payloads.Transferred, block_id: int, start: int, table: Sequence[int]) -> str:
    if start > copy.first_block:
        return (
            f"copy {copy.job} takes block {block_id} behind block {start - 1} of the request, where it does not stand"
        )
    stands = f"block {table[start]}" if start < len(table) else "nothing"
    return f"copy {copy.job} takes block {block_id} for block {start} of the request, where {stands} stands"


def _violation(rule: str, moment: Moment, detail: str) -> Violation:
    life = moment.life
    request_id, generation = ("", None) if life is None else (life.request_id, life.generation)
    return Violation(rule, moment.sequence, request_id, generation, detail, ())
