"""Copies in flight, computed from the log: slots, blocks, time in flight, and which ranks have reported them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.chains import Chains, StoredPrefix
from kvledger.lifecycle.reader.layout import Layout
from kvledger.lifecycle.reader.lives import Lives
from kvledger.lifecycle.reader.moment import Moment
from kvledger.lifecycle.reader.records import NEVER, Copy, Prefix
from kvledger.lifecycle.states import BlocksRegion

Settled = e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed


class Reported(NamedTuple):
    """One job of a report."""

    job_id: int
    job: Copy | None
    """The job, if it is in flight or was given up before every rank had reported it; else None."""
    ranks_before: frozenset[int]
    """Ranks that had reported the job before."""


class StoredCopies(msgspec.Struct, forbid_unknown_fields=True):
    """State of `Copies`, as plain values. Each pair is a copy without its prefix, and that prefix."""

    in_flight: list[tuple[Copy, StoredPrefix]]
    given_up: list[tuple[Copy, StoredPrefix]]
    filled_by: dict[int, int]
    report_sequence: int
    failure_sequence: int
    is_withheld: bool
    epoch: int
    last_id: int


class Copies:
    """Job id → job, from the event that issues it to the event that settles it. Fold this after the lives."""

    def __init__(self, lives: Lives, layout: Layout, num_ranks: int, moment: Moment) -> None:
        self._moment = moment
        self._lives = lives
        self._layout = layout
        self.every_rank = frozenset(range(num_ranks))
        self._jobs: dict[int, Copy] = {}
        self._of_life: defaultdict[int, set[int]] = defaultdict(set)
        self.given_up: dict[int, Copy] = {}
        """Job id → save that was given up before every rank had reported it. A rank may still write its slots."""
        self.let_go: list[Copy] = []
        """Given-up saves that every rank has reported with the current report."""
        self.loads: set[int] = set()
        """Ids of the loads in flight."""
        self.async_saves: set[int] = set()
        """Ids of the asynchronous saves in flight."""
        self.filled_by: dict[int, int] = {}
        """Block → id of the last load in flight that fills it, even if that load's request has lost the block."""
        self.rivals: set[int] = set()
        """Loads that were already filling blocks of the current load."""
        self.current: Copy | None = None
        """The job that the current event issues or settles."""
        self.reported: list[Reported] = []
        """The jobs in the current report."""
        self.report_sequence = 0
        """Sequence number of the last report."""
        self.failure_sequence = 0
        """Sequence number of the last report of a failure."""
        self.is_withheld = False
        """Whether that failure was reported by kvledger in place of the workers."""
        self.epoch = 0
        """Number of resets so far."""
        self.last_id = 0
        """Highest job id so far."""
        self.is_new = True
        """Whether the current job has a higher id than all before it."""

    def __iter__(self) -> Iterator[tuple[int, Copy]]:
        return iter(self._jobs.items())

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, job_id: int) -> Copy | None:
        """Return the job; None if it is not in flight."""
        return self._jobs.get(job_id)

    def of_life(self, ordinal: int) -> list[Copy]:
        """Return the life's jobs in flight, in the order in which they were issued."""
        return [self._jobs[job_id] for job_id in sorted(self._of_life.get(ordinal, ()))]

    def prefixes(self) -> Iterator[Prefix]:
        """Yield the prefixes that copies in flight need in the pool. Copies from before the last reset are left out."""
        return (job.prefix for job in self._jobs.values() if job.epoch == self.epoch)

    def owes(self, ordinal: int) -> bool:
        """Whether a job of this life is in flight."""
        return ordinal in self._of_life

    def is_loading(self, ordinal: int, generation: int, *, outside_steps: bool = False) -> bool:
        """Whether a load of this life and generation is in flight. `outside_steps`: count only asynchronous loads."""
        return any(
            job.is_load and job.generation == generation and (job.is_async or not outside_steps)
            for job in self.of_life(ordinal)
        )

    def reads_blocks_of(self, ordinal: int) -> bool:
        """Whether an asynchronous save reads blocks that this life still has."""
        return any(job.is_async and not job.is_load and not job.is_fenced for job in self.of_life(ordinal))

    def is_own(self, job: Copy) -> bool:
        """Whether the job's request holds blocks and is in the generation of the job."""
        life = self._lives.of(job.ordinal)
        return life is not None and life.generation == job.generation and life.blocks is not BlocksRegion.NONE

    def stored(self, chains: Chains) -> StoredCopies:
        """Return the state."""

        def each(copies: Iterable[Copy]) -> list[tuple[Copy, StoredPrefix]]:
            # Not `NO_PREFIX`, whose cached `key_set` would be stored too.
            return [
                (msgspec.structs.replace(copy, prefix=Prefix(NEVER, (), 0)), chains.stored(copy.prefix))
                for copy in copies
            ]

        return StoredCopies(
            each(self._jobs.values()),
            each(self.given_up.values()),
            dict(self.filled_by),
            self.report_sequence,
            self.failure_sequence,
            self.is_withheld,
            self.epoch,
            self.last_id,
        )

    def resume(self, stored: StoredCopies, chains: Chains) -> None:
        """Restore a stored state."""
        for copy, prefix in (*stored.in_flight, *stored.given_up):
            copy.prefix = chains.prefix(prefix)
        for copy, _ in stored.in_flight:
            self._add(copy)
        self.given_up.update((copy.job_id, copy) for copy, _ in stored.given_up)
        self.filled_by = dict(stored.filled_by)
        self.report_sequence, self.failure_sequence = stored.report_sequence, stored.failure_sequence
        self.is_withheld, self.epoch, self.last_id = stored.is_withheld, stored.epoch, stored.last_id

    def lost(self) -> None:
        """Forget the copies, because events are missing."""
        self._jobs.clear()
        self._of_life.clear()
        self.given_up.clear()
        self.let_go, self.reported = [], []
        self.loads.clear()
        self.async_saves.clear()
        self.filled_by.clear()
        self.rivals.clear()
        self.current = None

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        life = self._lives.of(event.ordinal)
        num_known = 0 if life is None else len(life.keys)
        tokens = range(event.first_token, event.first_token + event.num_tokens)
        chunks = tuple(self._layout.chunks_of_load(tokens, num_known))
        load = self._issued(event, chunks, max(chunks, default=-1) + 1, is_load=True, is_async=event.is_async)
        self.rivals = {self.filled_by[block_id] for block_id in load.filled if block_id in self.filled_by}
        self.filled_by |= dict.fromkeys(load.filled, load.job_id)

    @on(e.SaveIssued)
    def _save_issued(self, event: e.SaveIssued) -> None:
        end_chunk = max(event.chunks, default=-1) + 1
        save = self._issued(event, event.chunks, end_chunk, is_load=False, is_async=event.is_async)
        save.is_before_forward = event.before_forward

    @on(e.TailSaveIssued)
    def _tail_save_issued(self, event: e.TailSaveIssued) -> None:
        end_chunk = event.first_token // self._layout.chunk_size
        self._issued(event, (), end_chunk, is_load=False, is_async=False).is_before_forward = True

    @on(e.EffectsDelivered)
    def _delivered(self, event: e.EffectsDelivered) -> None:
        for job_id in event.job_ids:
            job = self._jobs.get(job_id)
            if job is not None and job.sequence and not job.delivered_at:  # else its hand-out is not known
                job.delivered_at, job.delivered_step = self._moment.sequence, self._lives.num_steps
        for job_id in event.awaited:
            job = self._jobs.get(job_id)
            if job is None:
                continue
            if not any(job.reminders):
                job.asked_at = self._moment.sequence if job.reminders else job.asked_at
            elif job.delivered_at < self._moment.sequence:
                job.awaited_at = job.awaited_at or self._moment.sequence
            job.reminders = ()

    def _issued(
        self,
        event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued,
        chunks: tuple[int, ...],
        end_chunk: int,
        *,
        is_load: bool,
        is_async: bool,
    ) -> Copy:
        life = self._lives.of(event.ordinal)
        known = [] if life is None else life.keys
        self.current = job = Copy(
            sequence=self._moment.sequence,
            job_id=event.job_id,
            request_id=event.request_id,
            ordinal=event.ordinal,
            generation=event.generation,
            is_load=is_load,
            is_async=is_async,
            chunks=chunks,
            keys=tuple([known[chunk] for chunk in chunks if chunk < len(known)]),
            earlier_keys=self._earlier_keys(chunks, known),
            slots=event.slots,
            block_ids=event.block_ids,
            prefix=Prefix.of(life, end_chunk),
            epoch=self.epoch,
            since_step=self._lives.num_steps,
            since_ns=self._moment.time_ns,
            num_tokens=getattr(event, "num_tokens", 0),
            leaves_out=NO_SLOT in event.slots,
        )
        self._add(job)
        self.is_new = event.job_id > self.last_id
        self.last_id = max(self.last_id, event.job_id)
        return job

    def _earlier_keys(self, chunks: Sequence[int], known: Sequence[bytes]) -> tuple[tuple[int, bytes], ...]:
        if not self._layout.chunk_shares_block:
            return ()
        earlier = self._layout.chunks_replaced_by(chunks, len(known))
        return tuple((chunk, known[chunk]) for chunk in earlier)

    def _add(self, job: Copy) -> None:
        self._remove(job.job_id)  # a damaged log: kvledger never uses a job id twice
        self._jobs[job.job_id] = job
        self._of_life[job.ordinal].add(job.job_id)
        if job.is_load:
            self.loads.add(job.job_id)
        elif job.is_async:
            self.async_saves.add(job.job_id)

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported) -> None:
        self.report_sequence = self._moment.sequence
        self.reported, self.let_go = [], []
        if event.ranks_failed:
            self.failure_sequence = self._moment.sequence
            self.is_withheld = bool(event.withheld)
        for job_id in dict.fromkeys(event.job_ids):
            job = self.get(job_id) or self.given_up.get(job_id)
            before = frozenset() if job is None else job.ranks_done | job.ranks_failed
            self.reported.append(Reported(job_id, job, before))
            if job is not None:
                done = self.every_rank.intersection(event.ranks_done) - before
                job.ranks_done |= done
                job.ranks_failed |= self.every_rank.intersection(event.ranks_failed) - before - done
                if job_id in self.given_up and job.ranks_done | job.ranks_failed >= self.every_rank:
                    self.let_go.append(self.given_up.pop(job_id))

    @on(e.TransferAwaited)
    def _awaited(self, event: e.TransferAwaited) -> None:
        job = self._jobs.get(event.job_id)
        if job is None:
            return
        # Only the first reminder restarts the time. A copy that is still not reported after this must fail.
        if event.before_forward or not job.is_asked_after:
            job.since_step, job.since_ns = self._lives.num_steps, self._moment.time_ns
        job.reminders = (*job.reminders, event.before_forward)
        job.is_asked_after |= not event.before_forward
        job.is_fenced |= event.before_forward

    @on(e.LoadCompleted, e.LoadFailed, e.SaveCompleted)
    def _settled(self, event: Settled) -> None:
        self.current = self._remove(event.job_id)

    def _remove(self, job_id: int) -> Copy | None:
        job = self._jobs.pop(job_id, None)
        if job is None:
            return None
        self._of_life[job.ordinal].discard(job.job_id)
        if not self._of_life[job.ordinal]:
            del self._of_life[job.ordinal]
        if job.is_load:
            self.loads.discard(job.job_id)
            for block_id in job.block_ids:
                if self.filled_by.get(block_id) == job.job_id:
                    del self.filled_by[block_id]
        elif job.is_async:
            self.async_saves.discard(job.job_id)
        return job

    @on(e.SaveFailed)
    def _save_failed(self, event: e.SaveFailed) -> None:
        self._settled(event)
        if self.current is not None and not event.quiet:
            self.given_up[event.job_id] = self.current

    @on(e.RequestPreempted, e.RequestFinished)
    def _blocks_taken(self, _event: e.RequestPreempted | e.RequestFinished) -> None:
        life = self._moment.life
        if life is not None:
            for job in self.of_life(life.ordinal):
                job.lost_at = job.lost_at or self._moment.sequence

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        self.epoch += 1
