"""Blocks that hold nothing that can be relied on: a load into them failed, or they were computed on top of such.

A block is filled again when it is written from its first position on, on top of blocks that are filled, or when it is
given anew, to be computed or loaded by whomever. It must not know who may hit a block, nor what is decided about it.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NULL_BLOCK
from kvledger.lifecycle.geometry import Geometry
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections import Projection
from kvledger.lifecycle.projections.block_table import BlockTable
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.ranges import BlockId, Count, Int64, JobId, NumTokens, Ordinal


class State(msgspec.Struct, forbid_unknown_fields=True):
    """The blocks, and what they may come from."""

    blocks: dict[Int64, None] = {}
    loads: dict[JobId, tuple[tuple[BlockId, ...], bool]] = {}
    """Job id -> blocks of a load in flight, and whether it is asynchronous."""
    lost: list[array] = []  # type: ignore[type-arg]  # in Python 3.11 it takes no argument when it runs
    """Tables that were lost since the last step; a failure of that step concerns them, too. Nobody changes them."""
    lost_before: list[array] = []  # type: ignore[type-arg]
    """And in the step before: with two steps in flight, the next one is scheduled before the failure is known."""
    num_local_tokens: dict[Ordinal, NumTokens] = {}
    """While a block is unfilled: what each life of a request has of vLLM's prefix cache, by its last lookup."""
    num_failures: Count = 0
    """How often blocks were added."""


class UnfilledBlocks(Projection):
    """A set of block ids.

    To be folded behind the block table, before the tracker, which forgets lives, and before the transfers fold
    failures.
    """

    def __init__(self, tracker: RequestTracker, tables: BlockTable, geometry: Geometry) -> None:
        self._tracker = tracker
        self._tables = tables
        self._geometry = geometry
        self.state = State()

    @property
    def blocks(self) -> AbstractSet[int]:
        """Their ids."""
        return self.state.blocks.keys()

    @property
    def num_failures(self) -> int:
        """How often blocks were added."""
        return self.state.num_failures

    def spoil(self, block_ids: Iterable[int]) -> bool:
        """Whether one of these blocks is unfilled."""
        return bool(self.state.blocks) and not self.state.blocks.keys().isdisjoint(block_ids)

    @on(e.LookupRequested)
    def _lookup_requested(self, event: e.LookupRequested, _sequence: int) -> None:
        if self.state.blocks:
            self.state.num_local_tokens[self._tracker.ordinal(event.request_id)] = event.num_computed_tokens

    @on(e.BlocksAllocated)
    def _blocks_allocated(self, event: e.BlocksAllocated, _sequence: int) -> None:
        num_tokens = self._forgotten(event) if self.state.num_local_tokens else None
        if num_tokens is not None:  # another connector may load into the new ones, of which nothing is reported
            self._fill(event.block_ids[self._geometry.pages_spanning(0, num_tokens).stop :])

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived, _sequence: int) -> None:
        self._forgotten(event)

    def _forgotten(self, event: e.RequestEvent) -> int | None:
        return self.state.num_local_tokens.pop(self._tracker.ordinal(event.request_id), None)

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued, _sequence: int) -> None:
        self.state.loads[event.job_id] = event.block_ids, event.is_async
        self._fill(event.block_ids)

    @on(e.LoadCompleted)
    def _load_completed(self, event: e.LoadCompleted, _sequence: int) -> None:
        self.state.loads.pop(event.job_id, None)

    @on(e.LoadFailed)
    def _load_failed(self, event: e.LoadFailed, _sequence: int) -> None:
        block_ids, is_async = self.state.loads.pop(event.job_id, ((), False))
        if is_async:
            # Nobody computes on such a block before it is there. Who names one all the same held it before: its window
            # has left it, or its table was lost.
            self._mark(block_ids)
        else:
            self._add(block_ids)

    @on(e.LoadErrorsObserved)
    def _load_errors_observed(self, event: e.LoadErrorsObserved, _sequence: int) -> None:
        self._add(event.block_ids)

    def _add(self, block_ids: tuple[int, ...]) -> None:
        """These, and whatever lies behind one of them in a table: it was computed on top."""
        failed = dict.fromkeys(block_ids)
        held = (self._tables.of_life(record.ordinal) or () for record in self._tracker)
        for table in (*held, *self.state.lost, *self.state.lost_before):
            self.state.blocks.update(dict.fromkeys(table[_first_of(failed, table) :]))
        self._mark(block_ids)

    def _mark(self, block_ids: Iterable[int]) -> None:
        self.state.blocks.update(dict.fromkeys(block_ids))
        self._fill((NULL_BLOCK,))
        self.state.num_failures += 1

    def _fill(self, block_ids: Iterable[int]) -> None:
        blocks = self.state.blocks
        for block_id in block_ids if blocks else ():
            blocks.pop(block_id, None)

    @on(e.RequestPreempted, e.RequestFinished)
    def _taken(self, event: e.RequestPreempted | e.RequestFinished, _sequence: int) -> None:
        self._forgotten(event)
        lost = self._tables.lost(event.request_id)
        if isinstance(lost, array) and lost:
            self.state.lost.append(lost)

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled, _sequence: int) -> None:
        self.state.lost_before, self.state.lost = self.state.lost, []
        if not self.state.blocks:
            return
        block_size, num_groups = self._geometry.windows.block_size, self._geometry.windows.num_groups
        for ordinal, num_computed_tokens, num_scheduled_tokens, _ in event.advanced:
            table = self._tables.of_life(ordinal) or ()
            first = self._geometry.pages_spanning(0, num_computed_tokens).stop
            end = self._geometry.pages_spanning(num_computed_tokens, num_scheduled_tokens).stop
            self._written(table, num_computed_tokens, first, end)
        for ordinal, block_ids in event.extended:  # to who decodes a token a step, which nothing else records
            table = self._tables.of_life(ordinal) or ()
            first = len(table) - len(block_ids)
            self._written(table, first // num_groups * block_size, first, len(table))

    def _written(self, table: Sequence[int], num_computed_tokens: int, first: int, end: int) -> None:
        """What is written is filled, unless something unfilled is seen by its tokens, which lie behind so many."""
        windows = self._geometry.windows
        if windows.forget:
            # A log may count more tokens than it has blocks.
            num_blocks = min(first // windows.num_groups, len(table) // windows.num_groups + 1)
            seen = windows.pages_seen(num_computed_tokens, range(num_blocks))
            unfilled = first if self.spoil(table[page] for page in seen if page < len(table)) else end
        else:
            unfilled = _first_of(self.state.blocks, table[:first])
            unfilled = unfilled if unfilled < first else end
        if unfilled < end:
            self.state.blocks.update(dict.fromkeys(table[unfilled:end]))
            self._fill((NULL_BLOCK,))
        else:
            self._fill(table[first:end])


def _first_of(block_ids: Container[int], table: Sequence[int]) -> int:
    """Where the first of these blocks stands; the length of the table where none does."""
    return next((place for place, block_id in enumerate(table) if block_id in block_ids), len(table))
