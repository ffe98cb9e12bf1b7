"""BLOCK_REUSE_FENCED: nobody is given a block that a copy for another request still reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import JOB_SETTLED, Violation, violation
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import ReplayedEvent
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.windows import NULL_BLOCK


class BlockReuseFenced:
    """Blocks that are given to be filled are not those of a save beside the steps which no step waits for.

    Verifies: this for every block that an allocation or a step gives, beyond what is shared from the prefix cache,
    where the log says that the save's request still has the block, or that it is held for the save.
    Does not verify: blocks that the request has lost (SRC_BLOCK_STABLE), saves within a step, and the order of copies
    and forwards on the device.
    """

    rule: ClassVar[str] = "BLOCK_REUSE_FENCED"
    looks_at: ClassVar[frozenset[type[e.Event]]] = frozenset(
        {
            e.LookupRequested,
            e.BlocksAllocated,
            e.StepScheduled,
            e.SaveIssued,
            *JOB_SETTLED,
            e.RequestArrived,
            e.RequestPreempted,
            e.RequestFinished,
            e.RequestReleased,
            e.BlocksHeld,
        }
    )

    def __init__(self) -> None:
        self._read_by: dict[int, int] = {}
        """Block id -> job id of a save beside the steps."""
        self._saves: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Job id -> (sequence, blocks)."""
        self._num_own: dict[str, int] = {}
        """Request id -> blocks at the front of its table that the next allocation does not give anew."""
        self._held: set[str] = set()

    def check(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Compare what is given with what is read."""
        event = step.event
        if isinstance(event, e.StepScheduled):
            if event.extended and self._read_by:
                for ordinal, block_ids in event.extended:
                    yield from self._check_given(ordinal, block_ids, step, projections)
        elif isinstance(event, e.BlocksAllocated):
            record = projections.tracker.get(event.request_id)
            num_own = self._num_own.get(event.request_id)
            if self._read_by and record is not None and num_own is not None:
                yield from self._check_given(record.ordinal, event.block_ids[num_own:], step, projections)
            self._num_own[event.request_id] = len(event.block_ids)
        elif isinstance(event, e.SaveIssued | e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed):
            self._follow_copy(event, step.sequence)
        elif isinstance(event, e.RequestEvent):
            self._follow_request(event, projections)

    def _follow_copy(
        self, event: e.SaveIssued | e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed, sequence: int
    ) -> None:
        if not isinstance(event, e.SaveIssued):
            for block_id in self._saves.pop(event.job_id, (0, ()))[1]:
                if self._read_by.get(block_id) == event.job_id:
                    del self._read_by[block_id]
        elif event.is_async:
            self._saves[event.job_id] = (sequence, event.block_ids)
            self._read_by |= dict.fromkeys(event.block_ids, event.job_id)

    def _follow_request(self, event: e.RequestEvent, projections: Projections) -> None:
        if isinstance(event, e.LookupRequested):
            num_blocks = event.num_computed_tokens // projections.configuration.block_size
            self._num_own[event.request_id] = num_blocks * len(projections.configuration.windows)
        elif isinstance(event, e.BlocksHeld):
            self._held.add(event.request_id)
        else:
            self._num_own.pop(event.request_id, None)
            if isinstance(event, e.RequestReleased | e.RequestArrived):
                self._held.discard(event.request_id)

    def _check_given(
        self, ordinal: int, block_ids: Iterable[int], step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation]:
        for job_id in sorted({self._read_by[block] for block in block_ids if block in self._read_by}):
            job = projections.transfers.get(job_id)
            record = None if job is None else projections.tracker.by_ordinal(job.ordinal)
            if job is None or record is None or job.is_fenced or job.ordinal == ordinal:
                continue
            ended = record.state is RequestState.FINISHED
            has_them = record.request_id in self._held if ended else record.generation == job.generation
            if has_them and (ended or record.holds_blocks):
                given = sorted(set(block_ids) & set(job.block_ids) - {NULL_BLOCK})
                whom = projections.tracker.by_ordinal(ordinal)
                detail = f"blocks {given} are given away, but save {job_id} of {job.request_id!r} still reads them"
                yield violation(
                    self.rule,
                    step,
                    projections,
                    detail,
                    self._saves[job_id][0],
                    request_id="" if whom is None else whom.request_id,
                )
