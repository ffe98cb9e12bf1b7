"""DELAY_FREE_CONTRACT: blocks of a finished request are held for a copy out of them, once, and then let go."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import on


class DelayFreeContract(Checker):
    """vLLM is asked to keep a request's blocks only at its end, at most once, and only while a copy reads them.

    Verifies: what holds blocks is the end of that very request; an asynchronous save reads them then, and no
    asynchronous load fills them; a held request is released when its last job is settled, when vLLM gets it back.
    Does not verify: that vLLM was informed, and how often.
    """

    rule = "DELAY_FREE_CONTRACT"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._finished: dict[str, int] = {}
        """Request id -> sequence of its end, where its blocks are not held."""
        self._held: dict[str, tuple[int, int]] = {}
        """Request id -> sequence and ordinal."""
        model.forgotten.at((e.RequestReleased,), self._finished, self._held)

    @on(e.RequestFinished)
    def _request_finished(self, event: e.RequestFinished) -> None:
        self._finished[event.request_id] = self.moment.sequence

    @on(e.BlocksHeld)
    def _blocks_held(self, event: e.BlocksHeld) -> None:
        self._check_hold(event)
        self._held[event.request_id] = self.moment.sequence, event.ordinal

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived) -> None:
        held_at, ordinal = self._held.pop(event.request_id, (0, 0))
        self._finished.pop(event.request_id, None)
        if held_at and self.jobs.reads_blocks_of(ordinal):
            detail = "a request arrives under an id whose blocks are still held, so vLLM would free them twice"
            self.broken(detail, held_at)

    def _check_hold(self, event: e.BlocksHeld) -> None:
        finished_at = self._finished.get(event.request_id, 0)
        life = self.moment.life
        if event.request_id in self._held:
            detail = "its blocks are held a second time"
        elif event.cause != finished_at or not finished_at:
            detail = "its blocks are held, but not because it ended"
        elif life is None or not self.jobs.reads_blocks_of(life.ordinal):
            detail = "its blocks are held, but no copy reads them"
        elif self.jobs.is_loading(life.ordinal, life.generation, outside_steps=True):
            detail = "its blocks are held for a save, but vLLM keeps them for a load: it would hear of two ends"
        else:
            return
        self.broken(detail, finished_at, self._held.get(event.request_id, (0, 0))[0])
