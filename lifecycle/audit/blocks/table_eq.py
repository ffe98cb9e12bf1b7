"""TABLE_EQ: the block table that the log folds to is the scheduler's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.lives import Lives
from kvledger.lifecycle.audit.model.moment import Check, Moment
from kvledger.lifecycle.audit.model.tables import Tables
from kvledger.lifecycle.windows import NULL_BLOCK

_ANY = -1
"""No number of blocks: the table is to be looked at as a whole."""


class TableEq:
    """A request's table has a place for every token that is scheduled, and no block twice.

    Verifies: at each step that tells a request's counts, that the folded table reaches to its last scheduled token;
    in allocations and in the first step behind them, that no block stands twice; and that the connector never had to
    write down the scheduler's own table (`blocks.observed`), which it does only where the folded one differs.
    Does not verify: which block stands where, where the connector did not compare; tables of quarantined requests.
    """

    rule: ClassVar[str] = "TABLE_EQ"

    def __init__(self) -> None:
        self._lives: Lives
        self._tables: Tables
        self._allocated: dict[int, tuple[int, int]] = {}
        """Ordinal -> (sequence, number of blocks that do not stand twice) of an allocation since the last step."""
        self._block_size = self._num_groups = 1

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._lives, self._tables = model.lives, model.tables
        self._block_size, self._num_groups = model.configuration.block_size, len(model.configuration.windows)
        return [
            (e.StepScheduled, self._step_scheduled),
            (e.BlocksAllocated, self._given),
            (e.BlockTableObserved, self._observed),
        ]

    def _step_scheduled(self, event: e.StepScheduled, moment: Moment) -> Iterable[Violation] | None:
        found = None
        if self._allocated:
            found = self._check_allocated(moment)
        if event.advanced:
            too_short = self._check_reach(event, moment)
            if too_short is not None:
                found = [*(found or ()), *too_short]
        return found

    def _observed(self, event: e.BlockTableObserved, moment: Moment) -> list[Violation]:
        if moment.life is not None and moment.life.ordinal in self._allocated:
            self._allocated[moment.life.ordinal] = (self._allocated[moment.life.ordinal][0], _ANY)
        detail = f"the scheduler's table has {len(event.block_ids)} blocks and is not the one that the log folds to"
        return [violation(self.rule, moment, detail)]

    def _given(self, event: e.BlocksAllocated, moment: Moment) -> list[Violation] | None:
        twice = _twice(event.block_ids)
        if moment.life is not None:
            self._allocated[moment.life.ordinal] = (moment.sequence, _ANY if twice else len(event.block_ids))
        if not twice:
            return None
        return [violation(self.rule, moment, f"blocks {twice} stand twice in the table that was given")]

    def _check_allocated(self, moment: Moment) -> list[Violation] | None:
        found = None
        of_life, life_of = self._tables.of, self._lives.of
        for ordinal, (sequence, num_blocks) in self._allocated.items():
            table = of_life(ordinal)
            if table is None or len(table) == num_blocks:  # as it was given: looked at already
                continue
            life, twice = life_of(ordinal), _twice(table)
            if twice and life is not None:
                detail = f"blocks {twice} stand in the table already and were appended once more"
                broken = violation(self.rule, moment, detail, sequence, request_id=life.request_id)
                found = [*(found or ()), broken]
        self._allocated.clear()
        return found

    def _check_reach(self, event: e.StepScheduled, moment: Moment) -> list[Violation] | None:
        found = None
        life_of, of_life = self._lives.of, self._tables.of
        block_size, num_groups = self._block_size, self._num_groups
        for ordinal, num_computed_tokens, num_scheduled_tokens, _ in event.advanced:
            num_tokens = num_computed_tokens + num_scheduled_tokens
            table = of_life(ordinal)
            num_blocks = 0 if table is None else len(table)
            if num_blocks * block_size < num_tokens * num_groups:
                life = life_of(ordinal)
                if life is None or life.quarantined:
                    continue
                detail = f"{num_tokens} tokens are scheduled on a table of {num_blocks} blocks of {block_size} tokens"
                broken = violation(self.rule, moment, detail, request_id=life.request_id)
                found = [*(found or ()), broken]
        return found


def _twice(block_ids: Sequence[int]) -> list[int]:
    """Blocks that stand more than once, but for the one that stands for nothing."""
    if len(set(block_ids)) == len(block_ids):
        return []
    seen: set[int] = set()
    return sorted({block for block in block_ids if block in seen or seen.add(block)} - {NULL_BLOCK})  # type: ignore[func-returns-value]
