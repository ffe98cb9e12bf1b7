"""Which blocks each life holds, and which blocks it lost since the last step."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NULL_BLOCK
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.layout import Layout
from kvledger.lifecycle.reader.lives import Lives
from kvledger.lifecycle.reader.moment import Moment
from kvledger.lifecycle.reader.records import NEVER, Life
from kvledger.lifecycle.states import BlocksRegion


class StoredTables(msgspec.Struct, forbid_unknown_fields=True):
    """State of `Tables`, as plain values: ordinal → block ids in token order."""

    held: dict[int, list[int]]
    lost: dict[int, list[int]]
    """Ordinal → ids of the blocks that the life lost since the last step."""


class Tables:
    """Ordinal → block ids, 4 bytes each. Fold this before `Lives`, which forgets a life that is over."""

    def __init__(self, lives: Lives, layout: Layout, moment: Moment) -> None:
        self._moment = moment
        self._layout = layout
        self._lives = lives
        self._held: dict[int, array[int]] = {}
        self._lost: dict[int, array[int]] = {}
        self._num_holders: Counter[int] = Counter()
        """Block → number of tables that have it. Groups with a window are left out, because vLLM calls no hook when it
        frees a block that a window has left."""
        sizes = layout.windows
        self._num_groups = layout.num_groups
        self._counted_groups = [group for group, size in enumerate(sizes) if not size]
        self._counts_all = len(self._counted_groups) == len(sizes)

    def of(self, ordinal: int) -> Sequence[int]:
        """Return the blocks that this life holds, in token order."""
        return self._held.get(ordinal, ())

    def held_by(self, life: Life | None) -> Sequence[int]:
        """Return the blocks that the life holds; empty if there is no life."""
        return () if life is None else self.of(life.ordinal)

    def lost_by(self, life: Life | None) -> Sequence[int]:
        """Return the blocks that the life lost since the last step. They are intact until the next forward pass."""
        return () if life is None else self._lost.get(life.ordinal, ())

    def num_held(self, *, with_lost_by: Life | None = None) -> int:
        """Count the distinct blocks that requests hold, in groups without a window.

        Args:
            with_lost_by: also count the blocks that this life has lost since the last step.
        """
        lost = set(self._counted(self.lost_by(with_lost_by)))
        return len(self._num_holders) + len(lost.difference(self._num_holders))

    def other_holders(self, ordinal: int, block_ids: Sequence[int]) -> Iterator[tuple[Life, int]]:
        """Yield (life, lowest of these block ids that it holds) for each other life that holds one of them.

        Quarantined lives are left out, because their blocks in the log may be wrong. Lives whose load has failed are
        left out, because vLLM may free their blocks before the next lookup.
        """
        own = set(self._counted(self.of(ordinal)))
        suspects = {block for block in block_ids if self._num_holders.get(block, 0) > (block in own)}
        if not self._counts_all:
            suspects.discard(NULL_BLOCK)
        if not suspects:
            return
        for life in self._lives:
            if life.ordinal == ordinal or life.blocks is BlocksRegion.NONE or life.quarantined or life.computes_first:
                continue
            shared = suspects.intersection(self._counted(self.of(life.ordinal)))
            if shared:
                yield life, min(shared)

    def stored(self) -> StoredTables:
        """Return the state."""
        held = {ordinal: list(table) for ordinal, table in self._held.items()}
        return StoredTables(held, {ordinal: list(table) for ordinal, table in self._lost.items()})

    def resume(self, stored: StoredTables) -> None:
        """Restore a stored state."""
        for ordinal, table in stored.held.items():
            self._hold(ordinal, table)
        self._lost.update((ordinal, array("I", table)) for ordinal, table in stored.lost.items())

    def lost(self) -> None:
        """Forget the tables, because events are missing."""
        self._held.clear()
        self._lost.clear()
        self._num_holders.clear()

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        life = self._moment.life
        if life is not None:
            num_held = len(self.of(life.ordinal))  # in a next turn, more than its allocation gave
            life.num_old = life.num_own if life.num_own == NEVER else max(life.num_own, num_held)
            life.num_own = len(event.block_ids)
            self._hold(life.ordinal, event.block_ids)

    @on(e.BlockTableObserved)
    def _observed(self, event: e.BlockTableObserved) -> None:
        if self._moment.life is not None:
            self._hold(self._moment.life.ordinal, event.block_ids)

    @on(e.LookupRequested)
    def _asked(self, event: e.LookupRequested) -> None:
        # vLLM looks up only requests without blocks. After a failed asynchronous load it frees them and calls no hook.
        life = self._moment.life
        if life is not None and self._moment.is_legal:
            life.num_own = event.num_computed_tokens // self._layout.block_size * self._num_groups
            self._release(life.ordinal)

    @on(e.RequestPreempted, e.RequestFinished)
    def _taken(self, event: e.RequestPreempted | e.RequestFinished) -> None:
        life = self._moment.life
        if life is not None:
            life.num_own = NEVER
            table = self._release(life.ordinal)
            if table is not None:
                self._lost[life.ordinal] = table

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        self._lost.clear()
        for ordinal, block_ids in event.extended:
            table = self._held.get(ordinal)
            if table is not None:
                self._num_holders.update(self._counted(block_ids, len(table)))
                table.extend(block_ids)

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived) -> None:
        life = self._moment.life
        if life is not None:
            self._forget(life.ordinal)

    def _forget(self, ordinal: int) -> None:
        self._release(ordinal)
        self._lost.pop(ordinal, None)

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased) -> None:
        if self._lives.in_generation(event) is not None:
            self._forget(event.ordinal)

    def _hold(self, ordinal: int, block_ids: Sequence[int]) -> None:
        self._release(ordinal)
        self._held[ordinal] = array("I", block_ids)
        self._num_holders.update(self._counted(block_ids))

    def _release(self, ordinal: int) -> array[int] | None:
        table = self._held.pop(ordinal, None)
        if table is not None:
            num_holders = self._num_holders
            for block in self._counted(table):
                if num_holders[block] > 1:
                    num_holders[block] -= 1
                else:
                    del num_holders[block]
        return table

    def _counted(self, block_ids: Sequence[int], first_page: int = 0) -> Iterable[int]:
        """Return those of the blocks that belong to groups without a window. `first_page`: page of the first block."""
        if self._counts_all:
            return block_ids
        num_groups = self._num_groups
        starts = ((group - first_page) % num_groups for group in self._counted_groups)
        return [block for start in starts for block in block_ids[start::num_groups]]
