"""DELAY_FREE_CONTRACT: blocks of a finished request are held for a copy out of them, once, and then let go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.jobs import JobsInFlight
from kvledger.lifecycle.audit.model.moment import Check, Moment


class DelayFreeContract:
    """vLLM is told to keep a request's blocks only at its end, at most once, and only while a copy reads them.

    Verifies: what holds blocks is the end of that very request; a save beside the steps reads them then, and no load
    beside the steps fills them; a held request is released when its last job is settled, which is when vLLM is told.
    Does not verify: that vLLM was told, and how often.
    """

    rule: ClassVar[str] = "DELAY_FREE_CONTRACT"

    _jobs: JobsInFlight

    def __init__(self) -> None:
        self._finished: dict[str, int] = {}
        """Request id -> sequence of its end, where its blocks are not held."""
        self._held: dict[str, tuple[int, int]] = {}
        """Request id -> sequence and ordinal."""

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._jobs = model.jobs
        model.forgotten.at((e.RequestReleased,), self._finished, self._held)
        return [
            (e.RequestFinished, self._request_finished),
            (e.BlocksHeld, self._blocks_held),
            (e.RequestArrived, self._arrived),
        ]

    def _request_finished(self, event: e.RequestFinished, moment: Moment) -> None:
        self._finished[event.request_id] = moment.sequence

    def _blocks_held(self, event: e.BlocksHeld, moment: Moment) -> Iterator[Violation]:
        yield from self._check_hold(event, moment)
        self._held[event.request_id] = moment.sequence, event.ordinal

    def _arrived(self, event: e.RequestArrived, moment: Moment) -> list[Violation] | None:
        held_at, ordinal = self._held.pop(event.request_id, (0, 0))
        self._finished.pop(event.request_id, None)
        if not held_at or not self._jobs.reads_blocks_of(ordinal):
            return None
        detail = "a request arrives under an id whose blocks are still held, so vLLM would free them twice"
        return [violation(self.rule, moment, detail, held_at)]

    def _check_hold(self, event: e.BlocksHeld, moment: Moment) -> Iterator[Violation]:
        finished_at = self._finished.get(event.request_id, 0)
        life = moment.life
        if event.request_id in self._held:
            detail = "its blocks are held a second time"
        elif event.cause != finished_at or not finished_at:
            detail = "its blocks are held, but not because it ended"
        elif life is None or not self._jobs.reads_blocks_of(life.ordinal):
            detail = "its blocks are held, but no copy reads them"
        elif self._jobs.is_loading(life.ordinal, life.generation, outside_steps=True):
            detail = "its blocks are held for a save, but vLLM keeps them for a load: it would hear of two ends"
        else:
            return
        yield violation(self.rule, moment, detail, finished_at, self._held.get(event.request_id, (0, 0))[0])
