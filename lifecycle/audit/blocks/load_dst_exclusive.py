"""LOAD_DST_EXCLUSIVE: nobody else fills the blocks that a load fills."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import Check, Moment
from kvledger.lifecycle.audit.model.start import Start
from kvledger.lifecycle.windows import NO_SLOT


class LoadDstExclusive:
    """A block is the destination of at most one load in flight, and held by that load's request.

    Verifies: a load's blocks are those of its tokens in the request's table, each once, and no load in flight of a
    request that still holds its blocks fills one of them.
    Does not verify: that no other request's table holds the block, and that no forward in flight writes it. A
    request can be preempted before its load is reported, and its blocks be filled for another one: then the
    order of the copies on the device decides, which no log of the scheduler shows.
    """

    rule: ClassVar[str] = "LOAD_DST_EXCLUSIVE"

    _model: Model

    def __init__(self) -> None:
        self._filled_by: dict[int, tuple[int, int]] = {}
        """Block id -> (job id, sequence of the load)."""
        self._blocks_of: dict[int, tuple[int, ...]] = {}

    def begin(self, start: Start) -> None:
        """Take over the loads in flight of requests that still hold their blocks."""
        for job in start.jobs:
            if job.is_load and self._model.jobs.is_own(job):
                pairs = zip(job.slots, job.block_ids, strict=False)
                self._blocks_of[job.job_id] = filled = tuple(block_id for slot, block_id in pairs if slot != NO_SLOT)
                self._filled_by |= dict.fromkeys(filled, (job.job_id, 0))

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._model = model
        return [
            (e.LoadIssued, self._load_issued),
            (e.RequestPreempted, self._blocks_taken),
            (e.RequestFinished, self._blocks_taken),
            (e.LoadCompleted, self._settled),
            (e.LoadFailed, self._settled),
        ]

    def _load_issued(self, event: e.LoadIssued, moment: Moment) -> Iterator[Violation]:
        """Compare a load's blocks with the table and with the loads in flight."""
        yield from self._check_load(event, moment)
        filled = _filled_blocks(event)
        self._blocks_of[event.job_id] = filled
        self._filled_by |= dict.fromkeys(filled, (event.job_id, moment.sequence))

    def _blocks_taken(self, event: e.RequestPreempted | e.RequestFinished, moment: Moment) -> None:
        if self._blocks_of:
            for job_id, job in self._model.jobs:
                if job.request_id == event.request_id:
                    self._let_go(job_id)

    def _settled(self, event: e.LoadCompleted | e.LoadFailed, _moment: Moment) -> None:
        self._let_go(event.job_id)

    def _let_go(self, job_id: int) -> None:
        for block_id in self._blocks_of.pop(job_id, ()):
            if self._filled_by.get(block_id, (0, 0))[0] == job_id:
                del self._filled_by[block_id]

    def _check_load(self, event: e.LoadIssued, moment: Moment) -> Iterator[Violation]:
        table = self._model.tables.held_by(moment.life)
        pages = self._model.geometry.pages_spanning(event.first_token, event.num_tokens)
        expected = tuple(table[pages.start : pages.stop])
        if event.block_ids != expected:
            detail = (
                f"load {event.job_id} fills blocks {list(event.block_ids)}, "
                f"in the request's table its tokens have {list(expected)}"
            )
            yield violation(self.rule, moment, detail, event.cause)
        filled = _filled_blocks(event)
        if len(set(filled)) < len(filled):
            detail = f"load {event.job_id} fills a block twice: {list(event.block_ids)}"
            yield violation(self.rule, moment, detail, event.cause)
        rivals = {self._filled_by[block_id] for block_id in filled if block_id in self._filled_by}
        for job_id, sequence in sorted(rivals):
            detail = f"load {event.job_id} fills blocks that load {job_id} is still filling"
            yield violation(self.rule, moment, detail, sequence, event.cause)


def _filled_blocks(event: e.LoadIssued) -> tuple[int, ...]:
    """Without those that stand in the table for what a window does not see."""
    if NO_SLOT not in event.slots:
        return event.block_ids
    return tuple(block_id for slot, block_id in zip(event.slots, event.block_ids, strict=False) if slot != NO_SLOT)
