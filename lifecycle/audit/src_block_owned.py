"""SRC_BLOCK_OWNED: a save copies the request's own blocks, at the places where its chunks or its tail lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.indices import Indices
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.projections.host_slots import NO_SLOT
from kvledger.lifecycle.replay import Check, ReplayedEvent
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.windows import NULL_BLOCK, blocks_at


class SrcBlockOwned:
    """The source blocks of a save are exactly those of its chunks, or of its tail, in the request's table.

    Verifies: the blocks, their order and number against the table that the log folds to; blocks that were just
    lost are copied before the step's forward; a tail is copied from the blocks of its tokens in the lost table.
    Does not verify: that the folded table is the scheduler's (TABLE_EQ), that the blocks stay untouched until the copy
    is done (SRC_BLOCK_STABLE), nor saves that a finished request should not get at all (FINISH_IS_LAST).
    """

    rule: ClassVar[str] = "SRC_BLOCK_OWNED"

    def checks(self, _indices: Indices) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        return [
            (e.SaveIssued, self._save_issued),
            (e.TailSaveIssued, self._check),
        ]

    def _save_issued(
        self, event: e.SaveIssued, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        table = projections.blocks.held(event.request_id)
        if len(table) and len(event.slots) == len(event.block_ids) and NO_SLOT not in event.slots:
            pages = projections.geometry.pages_of(event.chunks)
            if pages and pages[-1] < len(table) and event.block_ids == blocks_at(pages, table):
                return None
        return self._check(event, step, projections)

    def _check(
        self, event: e.SaveIssued | e.TailSaveIssued, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation]:
        """Look the tokens up in the table."""
        table = projections.blocks.held(event.request_id)
        if step.state_before is RequestState.FINISHED and not len(projections.blocks.lost(event.request_id)):
            return  # a save that its end did not cause; FINISH_IS_LAST names it
        pages: Iterable[int]
        if isinstance(event, e.TailSaveIssued):
            table = projections.blocks.lost(event.request_id)
            pages = projections.geometry.pages_spanning(event.first_token, event.num_tokens)
            what = f"tokens {event.first_token} to {event.first_token + event.num_tokens}"
        else:
            if not len(table) and (event.before_forward or step.state_before is RequestState.FINISHED):
                table = projections.blocks.lost(event.request_id)
            pages = projections.geometry.pages_of(event.chunks)
            what = f"chunks {list(event.chunks)}"
        expected = tuple(table[page] if page < len(table) else None for page in pages)
        if NO_SLOT in event.slots and len(event.slots) == len(expected):
            expected = tuple(
                NULL_BLOCK if slot == NO_SLOT else block for slot, block in zip(event.slots, expected, strict=True)
            )
        if event.block_ids != expected:
            detail = (
                f"{what} lie in blocks {list(expected)} of the request's table, "
                f"but save {event.job_id} copies {list(event.block_ids)}"
            )
            yield violation(self.rule, step, projections, detail, event.cause)
        elif len(event.slots) != len(event.block_ids):
            detail = f"{len(event.block_ids)} blocks are copied to {len(event.slots)} slots"
            yield violation(self.rule, step, projections, detail, event.cause)
