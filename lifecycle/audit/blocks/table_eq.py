"""TABLE_EQ: the block table that the log folds to is the scheduler's own."""

from __future__ import annotations

from collections.abc import Sequence

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import on
from kvledger.lifecycle.windows import NULL_BLOCK

_ANY = -1
"""No number of blocks: the table is to be looked at as a whole."""


class TableEq(Checker):
    """A request's table has a place for every token that is scheduled, and no block twice.

    Verifies: at each step that tells a request's counts, that the folded table reaches to its last scheduled token;
    in allocations and in the first step behind them, that no block stands twice; and that the connector never had to
    write down the scheduler's own table (`blocks.observed`), which it does only where the folded one differs.
    Does not verify: which block stands where, where the connector did not compare; tables of quarantined requests.
    """

    rule = "TABLE_EQ"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._allocated: dict[int, tuple[int, int]] = {}
        """Ordinal -> (sequence, number of blocks that do not stand twice) of an allocation since the last step."""
        self._block_size = model.configuration.block_size
        self._num_groups = len(model.configuration.windows)

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        if self._allocated:
            self._check_allocated()
        if event.advanced:
            self._check_reach(event)

    @on(e.BlockTableObserved)
    def _observed(self, event: e.BlockTableObserved) -> None:
        if self.moment.life is not None and self.moment.life.ordinal in self._allocated:
            self._allocated[self.moment.life.ordinal] = (self._allocated[self.moment.life.ordinal][0], _ANY)
        detail = f"the scheduler's table has {len(event.block_ids)} blocks and is not the one that the log folds to"
        self.broken(detail)

    @on(e.BlocksAllocated)
    def _given(self, event: e.BlocksAllocated) -> None:
        twice = _twice(event.block_ids)
        if self.moment.life is not None:
            self._allocated[self.moment.life.ordinal] = (self.moment.sequence, _ANY if twice else len(event.block_ids))
        if twice:
            self.broken(f"blocks {twice} stand twice in the table that was given")

    def _check_allocated(self) -> None:
        of_life, life_of = self.tables.of, self.lives.of
        for ordinal, (sequence, num_blocks) in self._allocated.items():
            table = of_life(ordinal)
            if table is None or len(table) == num_blocks:  # as it was given: looked at already
                continue
            life, twice = life_of(ordinal), _twice(table)
            if twice and life is not None:
                detail = f"blocks {twice} stand in the table already and were appended once more"
                self.broken(detail, sequence, request_id=life.request_id)
        self._allocated.clear()

    def _check_reach(self, event: e.StepScheduled) -> None:
        life_of, of_life = self.lives.of, self.tables.of
        block_size, num_groups = self._block_size, self._num_groups
        for ordinal, num_computed_tokens, num_scheduled_tokens, _ in event.advanced:
            num_tokens = num_computed_tokens + num_scheduled_tokens
            table = of_life(ordinal)
            num_blocks = 0 if table is None else len(table)
            if num_blocks * block_size < num_tokens * num_groups:
                life = life_of(ordinal)
                if life is not None and not life.quarantined:
                    what = f"a table of {num_blocks} blocks of {block_size} tokens"
                    self.broken(f"{num_tokens} tokens are scheduled on {what}", request_id=life.request_id)


def _twice(block_ids: Sequence[int]) -> list[int]:
    """Blocks that stand more than once, but for the one that stands for nothing."""
    if len(set(block_ids)) == len(block_ids):
        return []
    seen: set[int] = set()
    return sorted({block for block in block_ids if block in seen or seen.add(block)} - {NULL_BLOCK})  # type: ignore[func-returns-value]
