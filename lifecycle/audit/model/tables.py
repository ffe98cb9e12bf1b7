"""Which blocks each life holds, and which it held until the current step. The audit's own; see `lives.py`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.model.lives import NEVER, Life, Lives
from kvledger.lifecycle.audit.model.moment import Moment
from kvledger.lifecycle.geometry import Geometry
from kvledger.lifecycle.marks import on

if TYPE_CHECKING:
    from kvledger.lifecycle.audit.model.start import Start


class Tables:
    """Ordinal -> block ids, 4 bytes each. To be folded before the lives, which are forgotten when they are over."""

    def __init__(self, lives: Lives, geometry: Geometry, moment: Moment) -> None:
        self._moment = moment
        self._geometry = geometry
        self._lives = lives
        self._held: dict[int, array[int]] = {}
        self._lost: dict[int, array[int]] = {}

    def of(self, ordinal: int) -> Sequence[int]:
        """The blocks that this life holds now, in token order."""
        return self._held.get(ordinal, ())

    def held_by(self, life: Life | None) -> Sequence[int]:
        """The same; empty where nobody lives."""
        return () if life is None else self.of(life.ordinal)

    def lost_by(self, life: Life | None) -> Sequence[int]:
        """The blocks that it lost since the last step; intact until the next one's forward."""
        return () if life is None else self._lost.get(life.ordinal, ())

    def begin(self, start: Start) -> None:
        """Take over the tables where an audit starts in the middle of a log."""
        self._held.update((ordinal, array("I", table)) for ordinal, table in start.held.items() if len(table))
        self._lost.update((ordinal, array("I", table)) for ordinal, table in start.lost.items() if len(table))

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        life = self._moment.life
        if life is not None:
            life.num_old, life.num_own = life.num_own, len(event.block_ids)
            self._held[life.ordinal] = array("I", event.block_ids)

    @on(e.BlockTableObserved)
    def _observed(self, event: e.BlockTableObserved) -> None:
        if self._moment.life is not None:
            self._held[self._moment.life.ordinal] = array("I", event.block_ids)

    @on(e.LookupRequested)
    def _asked(self, event: e.LookupRequested) -> None:
        # Who is asked about holds nothing; after a failed asynchronous load vLLM frees the blocks without a word.
        life = self._moment.life
        if life is not None and self._moment.is_legal:
            life.num_own = event.num_computed_tokens // self._geometry.block_size * len(self._geometry.window_sizes)
            self._held.pop(life.ordinal, None)

    @on(e.RequestPreempted, e.RequestFinished)
    def _taken(self, event: e.RequestPreempted | e.RequestFinished) -> None:
        life = self._moment.life
        if life is not None:
            life.num_own = NEVER
            table = self._held.pop(life.ordinal, None)
            if table is not None:
                self._lost[life.ordinal] = table

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        self._lost.clear()
        for ordinal, block_ids in event.extended:
            table = self._held.get(ordinal)
            if table is not None:
                table.extend(block_ids)

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived) -> None:
        life = self._moment.life
        if life is not None:
            self._forget(life.ordinal)

    def _forget(self, ordinal: int) -> None:
        self._held.pop(ordinal, None)
        self._lost.pop(ordinal, None)

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased) -> None:
        if self._lives.in_generation(event) is not None:
            self._forget(event.ordinal)
