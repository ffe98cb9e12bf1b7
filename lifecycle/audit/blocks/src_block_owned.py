"""SRC_BLOCK_OWNED: a save copies the request's own blocks, at the places where its chunks or its tail lie."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import on
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.windows import NO_SLOT, NULL_BLOCK, blocks_at

_FINISHED, _PREEMPTED = RequestState.FINISHED, RequestState.PREEMPTED


class SrcBlockOwned(Checker):
    """The source blocks of a save are exactly those of its chunks, or of its tail, in the request's table.

    Verifies: the blocks, their order and number against the table that the log folds to, the chunks each once and in
    order; a tail is copied from the blocks of its tokens in the lost table. Blocks that are free are copied before the
    step's forward, and no others; only where the configuration says so asynchronously, and never what a preemption
    took; all this for models that free nothing by a window.
    Does not verify: that the folded table is the scheduler's (TABLE_EQ), that the blocks stay untouched until the copy
    is done (SRC_BLOCK_STABLE), nor saves that a finished request should not get at all (FINISH_IS_LAST).
    """

    rule = "SRC_BLOCK_OWNED"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._pages_per_chunk = model.geometry.pages_per_chunk
        self._async_saves = model.configuration.async_saves
        self._forgets = model.geometry.windows.forget

    @on(e.SaveIssued)
    def _save_issued(self, event: e.SaveIssued) -> None:
        if len(event.chunks) > 1 and any(chunk >= following for chunk, following in pairwise(event.chunks)):
            detail = f"save {event.job_id} is of chunks {list(event.chunks)}, which do not follow one another"
            self.broken(detail, event.cause)
            return
        life, block_ids, in_flight = self.moment.life, event.block_ids, self.jobs.current
        table = None if life is None else self.tables.of(life.ordinal)
        if (
            event.before_forward is not (not table and not event.is_async)
            or (event.is_async and (not self._async_saves or self.moment.state_before is _PREEMPTED))
        ) and not self._forgets:
            self._at_another_time(event)
            return
        if not table and (event.before_forward or self.moment.state_before is _FINISHED):
            table = self.tables.lost_by(self.moment.life)
        if table and in_flight is not None and not in_flight.leaves_out and len(event.slots) == len(block_ids):
            chunks, num_pages = event.chunks, self._pages_per_chunk
            if num_pages and len(block_ids) == num_pages * len(chunks) and chunks[0] >= 0:
                first_page = chunks[0] * num_pages
                if len(block_ids) == 1:  # nearly always one chunk, often of one page
                    if first_page < len(table) and table[first_page] == block_ids[0]:
                        return
                elif (len(chunks) == 1 or chunks == tuple(range(chunks[0], chunks[-1] + 1))) and _is_same(
                    table[first_page : first_page + len(block_ids)], block_ids
                ):
                    return
            else:
                pages = self.geometry.pages_of(chunks)
                if pages and pages[-1] < len(table) and block_ids == blocks_at(pages, table):
                    return
        self._check(event)

    def _at_another_time(self, event: e.SaveIssued) -> None:
        if self.moment.life is None or (
            self.moment.state_before is _FINISHED and not len(self.tables.lost_by(self.moment.life))
        ):
            return  # of nobody, or a save that its end did not cause: LEGAL_TRANSITION and FINISH_IS_LAST name it
        when = "before the forward" if event.before_forward else "asynchronously" if event.is_async else "with the step"
        has = "still has" if self.tables.of(self.moment.life.ordinal) else "has lost"
        detail = f"save {event.job_id} copies {when} out of blocks that the request {has}"
        self.broken(detail, event.cause)

    @on(e.TailSaveIssued)
    def _check(self, event: e.SaveIssued | e.TailSaveIssued) -> None:
        """Look the tokens up in the table."""
        table = self.tables.held_by(self.moment.life)
        if self.moment.state_before is RequestState.FINISHED and not len(self.tables.lost_by(self.moment.life)):
            return  # a save that its end did not cause; FINISH_IS_LAST names it
        pages: Iterable[int]
        if isinstance(event, e.TailSaveIssued):
            table = self.tables.lost_by(self.moment.life)
            pages = self.geometry.pages_spanning(event.first_token, event.num_tokens)
            what = f"tokens {event.first_token} to {event.first_token + event.num_tokens}"
        else:
            if not len(table) and (event.before_forward or self.moment.state_before is RequestState.FINISHED):
                table = self.tables.lost_by(self.moment.life)
            pages = self.geometry.pages_of(event.chunks)
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
            self.broken(detail, event.cause)
        elif len(event.slots) != len(event.block_ids):
            detail = f"{len(event.block_ids)} blocks are copied to {len(event.slots)} slots"
            self.broken(detail, event.cause)


def _is_same(blocks: Sequence[int], block_ids: tuple[int, ...]) -> bool:
    if type(blocks) is array:  # comparing arrays costs a third of comparing tuples
        try:
            return blocks == array(blocks.typecode, block_ids)
        except OverflowError:
            return False  # no table has such blocks
    return tuple(blocks) == block_ids
