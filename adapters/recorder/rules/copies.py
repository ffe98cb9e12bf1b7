"""Which blocks a copy reads or writes, where a decoder has read that from the connector's metadata."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from kvledger.adapters.recorder import said
from kvledger.adapters.recorder.payloads import payload_of
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Check, Model, Moment, Violation
from kvledger.lifecycle.windows import NULL_BLOCK


class _Tables:
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

    def of(self, moment: Moment, group: int) -> Sequence[int] | None:
        """The blocks of one group, in token order; None where the life holds none and has lost none."""
        life = moment.life
        if life is None:
            return None
        table = self._model.tables.of(life.ordinal) or self._last.get(life.ordinal)
        return None if not table else table[group :: self._num_groups]


class TableEq:
    """TABLE_EQ: a copy's blocks stand in the request's table where the copy says that they stand.

    Verifies: this for each copy of which the metadata says where in the table its blocks begin.
    Does not verify: copies of a connector without a decoder; blocks that a window has left.
    """

    rule: ClassVar[str] = "TABLE_EQ"

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._tables = _Tables()
        return [*self._tables.begin_checks(model), (e.ExtensionObserved, self._said)]

    def _said(self, event: e.ExtensionObserved, moment: Moment) -> list[Violation] | None:
        copy = payload_of(event)
        if not isinstance(copy, said.Transferred) or copy.first_block < 0:
            return None
        table = self._tables.of(moment, copy.group)
        if table is None:
            return None
        held = tuple(table[copy.first_block : copy.first_block + len(copy.block_ids)])
        wrong = [
            place
            for place, block_id in enumerate(copy.block_ids)
            if place >= len(held) or (block_id != held[place] and NULL_BLOCK not in (block_id, held[place]))
        ]
        if not wrong:
            return None
        place = wrong[0]
        stands = f"block {held[place]}" if place < len(held) else f"nothing, its table has {len(table)} blocks"
        detail = (
            f"copy {copy.job} takes block {copy.block_ids[place]} for block {copy.first_block + place} of the "
            f"request, where {stands} stands"
        )
        return [_violation(self.rule, moment, detail)]


class SrcBlockOwned:
    """SRC_BLOCK_OWNED: a save reads blocks that its request holds, or has just lost.

    Verifies: this for each block of each save that a decoder has read.
    Does not verify: in which place the block stands (TABLE_EQ); what it holds.
    """

    rule: ClassVar[str] = "SRC_BLOCK_OWNED"

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._tables = _Tables()
        return [*self._tables.begin_checks(model), (e.ExtensionObserved, self._said)]

    def _said(self, event: e.ExtensionObserved, moment: Moment) -> list[Violation] | None:
        copy = payload_of(event)
        if not isinstance(copy, said.Transferred) or copy.is_load:
            return None
        table = self._tables.of(moment, copy.group)
        if table is None:
            return None
        foreign = [block for block in copy.block_ids if block != NULL_BLOCK and block not in set(table)]
        if not foreign:
            return None
        detail = f"copy {copy.job} reads block {foreign[0]}, which is not the request's"
        return [_violation(self.rule, moment, detail)]


def _violation(rule: str, moment: Moment, detail: str) -> Violation:
    life = moment.life
    request_id, generation = ("", None) if life is None else (life.request_id, life.generation)
    return Violation(rule, moment.sequence, request_id, generation, detail, ())
