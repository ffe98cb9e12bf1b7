"""Looks at the pages of every copy at the moment it is made, with the tokens in hand that they must belong to.

Wrong KV in the host pool is seen here even if nobody ever loads it. What is wrong is kept and told after the step,
because a worker takes an exception in a copy for a failed copy. One thing nobody can know when a save is decided:
that in a step still in flight the load of its blocks has failed. Such a save may be made, but it must not be taken up
as done. Durations are replaced, so that no clock but the world's reaches the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import torch

from kvledger.adapters.lab.simulation.expected import Expected
from kvledger.adapters.lab.simulation.hashed_model import NUM_LAYERS
from kvledger.lifecycle import Ready
from kvledger.lifecycle import events as e
from kvledger.storage.kv import CopyResult

if TYPE_CHECKING:
    from kvledger.adapters.lab.simulation.engine import SimulatedEngine
    from sim.copies import Copies

Pages = dict[tuple[int, int], torch.Tensor]
"""(block, slot) -> the KV that its first positions must hold."""
_Pairs = tuple[tuple[int, int], ...]
"""(block, slot), in the order of the job."""


@attrs.frozen
class _Expected:
    """A job that was handed out and not copied yet."""

    job_id: int
    pairs: _Pairs
    pages: Pages


class WrongPages(AssertionError):
    """Bytes were copied that are not the KV of the tokens they are kept for."""


class PageWatch:
    """Knows for every job that was handed out what its pages must hold, and compares when they are copied."""

    def __init__(self, engine: SimulatedEngine, truth_of: Callable[[int], Expected], ns_per_page: int = 1000) -> None:
        self._ns_per_page = ns_per_page
        self._engine = engine
        self._side = engine.connector.scheduler_side
        self._worker: Any = engine.worker
        self._kv_caches = engine.model.kv_caches
        self._block_size = engine.model.block_size
        self._truth_of = truth_of
        self._expected: dict[tuple[int, int], deque[_Expected]] = {}
        """By the first pair of the job."""
        self.wrong: list[str] = []
        self._issued_in: dict[int, int] = {}
        """Saves that have not been made -> steps that the scheduler knew of when they were decided."""
        self._unusable: dict[int, str] = {}
        """Saves that nobody could know to be wrong when they were made -> what is wrong."""
        self.num_pages_checked = 0
        journal = self._side.journal
        ledger = self._side.ledger
        advance = ledger.advance

        def advance_and_expect(ready: Ready) -> None:
            for job in ready.jobs:
                self._expect(job)
            advance(ready)

        ledger.advance = advance_and_expect  # type: ignore[method-assign]
        observe = journal.observe

        def observe_and_judge(event: e.Event) -> list[e.Event]:
            decisions = observe(event)
            for decision in decisions:
                if isinstance(decision, e.SaveIssued | e.TailSaveIssued):
                    self._issued_in[decision.job_id] = engine.num_steps_processed
                elif isinstance(decision, e.SaveCompleted) and decision.job_id in self._unusable:
                    self.wrong.append(f"job {decision.job_id} is taken up as saved: {self._unusable[decision.job_id]}")
            return decisions

        journal.observe = observe_and_judge  # type: ignore[method-assign]

    def attach(self, copies: Copies) -> None:
        """See the copies of both engines."""
        for name in ("save", "load", "async_save", "async_load"):
            copies.wrap(name, self._watched)

    def raise_if_wrong(self) -> None:
        """Tell the first page that was wrong."""
        if self.wrong:
            raise WrongPages(self.wrong[0])

    def _expect(self, job: e.LoadIssued | e.SaveIssued | e.TailSaveIssued) -> None:
        projections = self._side.ledger.projections
        in_flight = projections.jobs.get(job.job_id)
        if in_flight is None or in_flight.ordinal < 0:
            self.wrong.append(f"job {job.job_id} was handed out, but nobody is waiting for it")
            return
        pairs = tuple(zip(job.block_ids, job.slots, strict=True))
        if in_flight.epoch != projections.jobs.epoch:
            # KV from before a reset, which is never committed.
            self._expect_pages(job.job_id, pairs, {})
            return
        if in_flight.is_doubtful:
            self._unusable[job.job_id] = "it was doubtful before it was made"
            self._expect_pages(job.job_id, pairs, {})
            return
        truth = self._truth_of(in_flight.ordinal)
        if isinstance(job, e.SaveIssued):
            size = projections.configuration.chunk_size
            blocks = projections.geometry.blocks_of(job.chunks)
            ends = {block: (block + 1) * self._block_size for block in blocks}
            if size < self._block_size:
                ends = {chunk * size // self._block_size: (chunk + 1) * size for chunk in sorted(job.chunks)}
        else:
            end = job.first_token + job.num_tokens
            blocks = projections.geometry.blocks_spanning(job.first_token, job.num_tokens)
            ends = {block: min(end, (block + 1) * self._block_size) for block in blocks}
        pages = {
            (block_id, slot): torch.tensor(truth.hashes(block * self._block_size, ends[block]), dtype=torch.int64)
            for block, block_id, slot in zip(blocks, job.block_ids, job.slots, strict=True)
        }
        self._expect_pages(job.job_id, pairs, pages)

    def _expect_pages(self, job_id: int, pairs: _Pairs, pages: Pages) -> None:
        self._expected.setdefault(pairs[0], deque()).append(_Expected(job_id, pairs, pages))

    def _jobs_of(self, pairs: _Pairs, first_id: int = 0) -> list[_Expected] | None:
        """The jobs that a copy of these pairs is for, in the order of their issue; None where it is for anything else.

        The latest that fit: an earlier one of the same pairs was never copied.
        """
        if not pairs:
            return []
        for job in reversed(self._expected.get(pairs[0], deque())):
            size = len(job.pairs)
            if job.job_id > first_id and job.pairs == pairs[:size]:
                others = self._jobs_of(pairs[size:], job.job_id)
                if others is not None:
                    return [job, *others]
        return None

    def _made(self, job: _Expected) -> None:
        self._expected[job.pairs[0]].remove(job)
        if not self._expected[job.pairs[0]]:
            del self._expected[job.pairs[0]]

    def _watched(self, name: str, copy: Callable[..., Any]) -> Callable[..., Any]:
        is_save = name.endswith("save")

        def watched(*arguments: Any) -> Any:
            block_ids, slots = map(tuple, arguments if is_save else arguments[::-1])
            jobs = self._jobs_of(tuple(zip(block_ids, slots, strict=True)))
            if jobs is None:
                self.wrong.append(f"{name} of blocks {block_ids} and slots {slots}, which is no job")
                return copy(*arguments)
            pages: Pages = {}
            for job in jobs:
                pages |= self._without_unusable(job.job_id, job.pages) if is_save else job.pages
            if is_save:
                self._compare_blocks("saves wrong KV from", pages)
            begun = copy(*arguments)
            for job in jobs:  # where it could not begin, each may be copied alone
                self._made(job)
            return _WatchedCopy(begun, partial(self._compare_destination, pages, is_save=is_save), self._ns_per_page)

        return watched

    def _without_unusable(self, job_id: int, pages: Pages) -> Pages:
        issued_in = self._issued_in.get(job_id, 0)
        right = {}
        for (block_id, slot), expected in pages.items():
            page = next(iter(self._kv_caches.values()))[block_id, 0, : len(expected), 0]
            if self._engine.unfilled_in(block_id) >= issued_in and not torch.equal(page, expected):
                self._unusable[job_id] = f"block {block_id} (slot {slot}) held what a failed load left there"
            else:
                right[block_id, slot] = expected
        return right

    def _compare_destination(self, pages: Pages, *, is_save: bool) -> None:
        if is_save:
            buffer = self._worker._worker_side._pool.buffer
            slots = buffer.view(torch.int64).view(len(buffer), NUM_LAYERS, self._block_size, 2)
            for (block_id, slot), expected in pages.items():
                for layer in range(NUM_LAYERS):
                    self._compare(f"slot {slot}, saved from block {block_id}, is wrong", slots[slot, layer], expected)
        else:
            self._compare_blocks("loads wrong KV into", pages)

    def _compare_blocks(self, what: str, pages: Pages) -> None:
        for (block_id, slot), expected in pages.items():
            for layer in self._kv_caches.values():
                self._compare(f"{what} block {block_id} (slot {slot})", layer[block_id, 0], expected)

    def _compare(self, what: str, page: torch.Tensor, expected: torch.Tensor) -> None:
        self.num_pages_checked += 1
        if not torch.equal(page[: len(expected), 0], expected):
            wrong = int((page[: len(expected), 0] != expected).sum())
            self.wrong.append(f"{what}: {wrong} of {len(expected)} positions")


@attrs.define
class _WatchedCopy:
    """A copy that has been started; what it wrote is compared once, when its end is first seen."""

    _copy: Any
    _compare: Callable[[], None] | None
    _ns_per_page: int

    def done(self) -> bool:
        """Whether the bytes are in place."""
        done: bool = self._copy.done()
        if done:
            self._seen()
        return done

    def precede(self) -> None:
        """From here on they are, as far as anybody can see."""
        self._copy.precede()
        self._seen()

    def result(self) -> Any:
        """Return when they are."""
        result = self._copy.result()
        self._seen()
        if isinstance(result, CopyResult):  # without the real clock
            result = attrs.evolve(result, duration_ns=self._ns_per_page * result.num_pages)
        return result

    def _seen(self) -> None:
        if self._compare is not None:
            self._compare()
            self._compare = None
