"""Everything that is still to be delivered: copies to the workers, and ends to vLLM (see `copies.py`).

vLLM gets one end for each asynchronous load, and one for each ended request whose blocks it kept. vLLM identifies ends
by request id only and fails an assertion on a second end, so no other module decides about ends. Where possible, this
projection computes ends from observations alone: it counts the ranks that reported. vLLM therefore gets its ends even
after kvledger has stopped deciding. `Owed` folds first and reads no other projection. `jobs.py` says what a copy means
for the cache.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import trigger_of
from kvledger.lifecycle.machine import Tables
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections.base import Projection
from kvledger.lifecycle.projections.copies import (
    NOTHING_OWED,
    BlocksEnd,
    Channel,
    Copy,
    CopyKind,
    Issued,
    LoadEnd,
    OwedEnds,
    PageJob,
    Ready,
    Reminder,
)
from kvledger.lifecycle.ranges import BlockId, JobId, LifeOrdinal, Sequence
from kvledger.lifecycle.states import SourceRegion, WorkRegion


class State(msgspec.Struct, forbid_unknown_fields=True):
    """The queues. Their entries are in the order in which they became pending, because the log contains that order."""

    present: dict[str, LifeOrdinal] = {}
    """Request id → ordinal of its current life, until that life ends."""
    copies: dict[JobId, Copy] = {}
    """Job id → copy, until the copy is settled and nothing about it is pending."""
    unsent: dict[JobId, Issued] = {}
    """Job id → job that no worker has received."""
    reminders: dict[JobId, Reminder] = {}
    """Job id → reminder about the job that no worker has received."""
    under_way: dict[JobId, None] = {}
    """Job ids of asynchronous copies that at least one rank has not reported."""
    ends: dict[LifeOrdinal, OwedEnds] = {}
    """Ordinal → the ends for which vLLM waits, or will wait if it claims the offered tokens."""
    failed: dict[LifeOrdinal, None] = {}
    """Ordinals of lives whose load failed. No worker was asked to report the failure yet."""
    sent: dict[LifeOrdinal, None] = {}
    """Ordinals of ended lives whose kept blocks no copy reads. No worker was asked to report that yet."""
    received: dict[LifeOrdinal, None] = {}
    """Ordinals of lives whose load is complete. vLLM has no report of it yet."""
    to_report: dict[LifeOrdinal, None] = {}
    """Ordinals of lives whose end the workers were asked to report. vLLM has not received that end yet."""
    block_ids: list[BlockId] = []
    """Blocks that vLLM counts as loaded, but that no copy will fill."""
    closed_at: Sequence = 0
    """Sequence number of the last failed `build_connector_meta`. Jobs issued before that failure missed their step."""


class Owed(Projection):
    """The pending copies and ends. Folds any log without failing, and delivers each end once."""

    def __init__(self, tables: Tables, num_ranks: int) -> None:
        self._tables = tables
        self._every_rank = range(num_ranks)
        self.all_ranks = tuple(self._every_rank)
        self.state = State()
        self.index()

    def check(self) -> None:
        """Check that copies are stored under their ids, and that all queued copies and lives are known."""
        state = self.state
        if any(copy.job_id != job_id for job_id, copy in state.copies.items()):
            raise ValueError("a copy is stored under another job id than its own")
        if not state.under_way.keys() <= state.copies.keys():
            raise ValueError("a copy in flight has no stored record")
        if not {*state.failed, *state.sent, *state.received, *state.to_report} <= state.ends.keys():
            raise ValueError("a pending end belongs to a life without a stored record")

    def index(self) -> None:
        """Forget the current report."""
        self.reported: dict[int, Copy | None] = {}
        """Job id in the current report → copy; None if the copy is settled, or was never issued."""
        self.late_ends: list[Copy] = []
        """Saves that had been given up and that the current report ends. No rank writes their slots any more."""

    # --- pending deliveries --------------------------------------------------------------------

    def ready(self, channel: Channel) -> Ready:
        """Return everything that is pending on the channel. It stays pending until `EffectsDelivered` lists it."""
        state = self.state
        if channel is Channel.VLLM:
            return Ready(received=self._named(state.received)) if state.received else NOTHING_OWED
        if not (state.unsent or state.reminders or state.block_ids or state.failed or state.sent):
            return NOTHING_OWED
        return Ready(
            jobs=tuple([each.job for each in state.unsent.values() if each.sequence > state.closed_at]),
            late=tuple([each.job for each in state.unsent.values() if each.sequence <= state.closed_at]),
            awaited=tuple([each.awaited for each in state.reminders.values()]),
            block_ids=tuple(state.block_ids),
            failed=self._named(state.failed),
            sent=self._named(state.sent),
        )

    def _named(self, lives: Iterable[int]) -> dict[int, str]:
        return {ordinal: self.state.ends[ordinal].request_id for ordinal in lives}

    def issued_since(self, sequence: int) -> list[PageJob]:
        """Return the jobs that were issued from this sequence number on, if no worker has received them."""
        return [each.job for each in self.state.unsent.values() if each.sequence >= sequence]

    def lost_fences(self) -> list[int]:
        """Return the ids of jobs for which a step had to wait but did not, because no worker got the reminder.

        Call this when the next step is observed.
        """
        state = self.state
        return [
            job_id
            for job_id, reminder in state.reminders.items()
            if reminder.awaited.before_forward and reminder.sequence <= state.closed_at
        ]

    def reported_to_vllm(self, request_ids: Iterable[str]) -> tuple[int, ...]:
        """Return the ordinals of those lives of the requests for which the workers were asked to report an end."""
        to_report, ends = self.state.to_report, self.state.ends
        if not to_report:
            return ()
        known = set(request_ids)
        return tuple([ordinal for ordinal in to_report if ends[ordinal].request_id in known])

    def early_receipt(self, request_id: str) -> int:
        """Return the ordinal of the request's life whose load cannot have been reported to vLLM yet.

        The load is not over, or it failed and no worker was asked to report the failure. If vLLM gets an end of this
        load now, it is from another connector. Returns `NO_LIFE` if there is no such life.
        """
        ends = self.state.ends
        if not ends:
            return e.NO_LIFE
        not_reported = (LoadEnd.CLAIMED, LoadEnd.UNDER_WAY, LoadEnd.FAILED)
        lives = (self.present(request_id), *self._lives_with_kept_blocks(request_id))
        return next((life for life in lives if life in ends and ends[life].load in not_reported), e.NO_LIFE)

    def early_release(self, request_id: str) -> int:
        """Return the ordinal of the request's ended life whose blocks cannot have been reported as free yet.

        A copy still uses the blocks, or no worker was asked to report them. Returns `NO_LIFE` if there is no such life.
        """
        to_report = self.state.to_report
        lives = self._lives_with_kept_blocks(request_id)
        return next((life for life in lives if life not in to_report), e.NO_LIFE)

    def _lives_with_kept_blocks(self, request_id: str) -> list[int]:
        ends = self.state.ends
        return [
            ordinal
            for ordinal, its in ends.items()
            if its.request_id == request_id and its.blocks is not BlocksEnd.NONE
        ]

    @property
    def is_owing(self) -> bool:
        """Whether jobs, reminders or ends are pending."""
        state = self.state
        return bool(state.unsent or state.reminders or state.failed or state.sent or state.received)

    @property
    def is_waiting(self) -> bool:
        """Whether vLLM waits for an end, or an asynchronous copy is in flight."""
        state = self.state
        return bool(state.under_way) or any(
            its.load is not LoadEnd.NONE or its.blocks is not BlocksEnd.NONE for its in state.ends.values()
        )

    @property
    def is_freeing(self) -> bool:
        """Whether vLLM keeps blocks of an ended request until it receives an end."""
        return any(its.blocks is not BlocksEnd.NONE for its in self.state.ends.values())

    def under_way(self) -> list[Copy]:
        """Return the asynchronous copies that at least one rank has not reported."""
        copies = self.state.copies
        return [copies[job_id] for job_id in self.state.under_way]

    def present(self, request_id: str) -> int:
        """Return the ordinal of the request's current life; `NO_LIFE` if the request is unknown or has ended."""
        return self.state.present.get(request_id, e.NO_LIFE)

    def is_named(self, request_id: str) -> bool:
        """Whether vLLM keeps blocks of an ended life of the request, or still lacks the end of a load that is over."""
        known = (LoadEnd.ARRIVED, LoadEnd.FAILED, LoadEnd.WITH_WORKERS)
        return any(
            its.request_id == request_id and (its.load in known or its.blocks is not BlocksEnd.NONE)
            for its in self.state.ends.values()
        )

    def is_held(self, ordinal: int) -> bool:
        """Whether vLLM must keep the blocks of this life, which is ending."""
        its = self.state.ends.get(ordinal)
        return its is not None and its.blocks in {BlocksEnd.KEPT_FOR_COPY, BlocksEnd.FREE_AGAIN}

    # --- lives ---------------------------------------------------------------------------------

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived, _sequence: int) -> None:
        self._break_promise(self.present(event.request_id))  # the displaced life can no longer claim its answer
        self.state.present[event.request_id] = event.ordinal

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered, _sequence: int) -> None:
        if not event.is_async:
            if event.ordinal in self.state.ends:  # usually false
                self._break_promise(event.ordinal)
        elif event.ordinal >= 0:
            self._ends_of(event.ordinal, event.request_id).is_promised = True

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated, _sequence: int) -> None:
        ordinal = self.present(event.request_id)
        its = self.state.ends.get(ordinal)
        if its is not None and its.is_promised:
            its.is_promised = False
            if event.num_external_tokens and its.load is LoadEnd.NONE:
                its.load = LoadEnd.CLAIMED
            self._forget_if_closed(ordinal, its)

    @on(e.LoadRefused)
    def _refused(self, event: e.LoadRefused, _sequence: int) -> None:
        ordinal, state = self.present(event.request_id), self.state
        its = state.ends.get(ordinal)
        if its is not None and its.is_promised:  # the allocation was not recorded
            its.is_promised = False
            if its.load is LoadEnd.NONE:
                its.load = LoadEnd.CLAIMED
        if its is None or its.load is LoadEnd.NONE:
            state.block_ids.extend(event.block_ids)
        elif its.load is LoadEnd.CLAIMED:  # otherwise the load's job is recorded, and ends by itself
            its.load = LoadEnd.FAILED
            state.failed[ordinal] = None

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished, _sequence: int) -> None:
        state = self.state
        ordinal = state.present.pop(event.request_id, e.NO_LIFE)
        self._break_promise(ordinal)
        its = state.ends.get(ordinal)
        if its is not None and its.load is not LoadEnd.NONE:
            # vLLM keeps the blocks until the load is over anyway, and gets only one end.
            its.blocks = BlocksEnd.KEPT_FOR_LOAD
        else:
            self._hold(ordinal, event.request_id)

    @on(e.BlocksHeld)
    def _held(self, event: e.BlocksHeld, _sequence: int) -> None:
        self._hold(event.ordinal, event.request_id)  # for a save that the request's end has caused

    def _hold(self, ordinal: int, request_id: str) -> None:
        its = self.state.ends.get(ordinal)
        is_kept = its is not None and its.blocks is not BlocksEnd.NONE
        if not is_kept and any(save.source is SourceRegion.OWNED for save in self._saves_under_way(ordinal)):
            self._ends_of(ordinal, request_id).blocks = BlocksEnd.KEPT_FOR_COPY

    def _saves_under_way(self, ordinal: int) -> list[Copy]:
        return [copy for copy in self.under_way() if copy.ordinal == ordinal and copy.kind is CopyKind.SAVE]

    def _ends_of(self, ordinal: int, request_id: str) -> OwedEnds:
        its = self.state.ends.get(ordinal)
        if its is None:
            its = self.state.ends[ordinal] = OwedEnds(request_id)
        return its

    def _break_promise(self, ordinal: int) -> None:
        its = self.state.ends.get(ordinal)
        if its is not None and its.is_promised:
            its.is_promised = False
            self._forget_if_closed(ordinal, its)

    def _forget_if_closed(self, ordinal: int, its: OwedEnds) -> None:
        if its.load is LoadEnd.NONE and its.blocks is BlocksEnd.NONE and not its.is_promised:
            del self.state.ends[ordinal]

    # --- copies --------------------------------------------------------------------------------

    @on(e.LoadIssued, e.SaveIssued)
    def _issued(self, event: e.LoadIssued | e.SaveIssued, sequence: int) -> None:
        is_load = isinstance(event, e.LoadIssued)
        self._begin(event, sequence, CopyKind.LOAD if is_load else CopyKind.SAVE, event.is_async)
        if not event.is_async:
            return
        self.state.under_way[event.job_id] = None
        its = self.state.ends.get(event.ordinal) if is_load else None
        if its is not None and its.load is LoadEnd.CLAIMED:
            its.load, its.load_id = LoadEnd.UNDER_WAY, event.job_id

    @on(e.TailSaveIssued)
    def _tail_issued(self, event: e.TailSaveIssued, sequence: int) -> None:
        self._begin(event, sequence, CopyKind.SAVE, False)  # noqa: FBT003 -- keywords cost, and every save comes by here

    def _begin(self, job: PageJob, sequence: int, kind: CopyKind, is_async: bool) -> None:  # noqa: FBT001
        job_id, state = job.job_id, self.state
        state.copies[job_id] = Copy(
            job_id, kind, job.request_id, job.ordinal, job.generation, job.slots, job.block_ids, is_async
        )
        state.unsent[job_id] = Issued(sequence, job)
        state.under_way.pop(job_id, None)  # a log may use a job id twice

    @on(e.TransferAwaited)
    def _awaited(self, event: e.TransferAwaited, sequence: int) -> None:
        before = self.state.reminders.get(event.job_id)
        if before is None or not before.awaited.before_forward:
            self.state.reminders[event.job_id] = Reminder(sequence, event)
        copy = self.state.copies.get(event.job_id)
        if copy is not None and copy.work is not WorkRegion.GIVEN_UP:
            self._move(copy, trigger_of(event))

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported, _sequence: int) -> None:
        state = self.state
        self.reported, self.late_ends = {}, []
        for job_id in event.job_ids:
            if job_id in state.unsent:
                # A job that breaks vLLM's contract may name blocks of others. `LoadRefused` has the promised blocks.
                self._never_given(job_id, is_counted_on=bool(event.withheld) and event.withheld != e.Withheld.CONTRACT)
            if job_id not in self.reported:
                copy = state.copies.get(job_id)
                self.reported[job_id] = None if copy is None or copy.work is WorkRegion.SETTLED else copy
                if copy is not None:
                    self._count(copy, event)

    def _count(self, copy: Copy, event: e.TransferReported) -> None:
        """Record the ranks that reported. Only the first report of a rank about a copy counts."""
        if event.error and not copy.error:
            copy.error = event.error
        if not copy.ranks_done and not copy.ranks_failed and event.ranks_done == self.all_ranks:
            copy.ranks_done = self.all_ranks
        else:
            known = {*copy.ranks_done, *copy.ranks_failed}
            reported = {*event.ranks_done, *event.ranks_failed}
            copy.repeated_ranks = () if event.is_repeated else tuple(sorted(known & reported))
            new = {rank for rank in reported - known if rank in self._every_rank}
            done = new.intersection(event.ranks_done)
            copy.ranks_done = tuple(sorted({*copy.ranks_done, *done}))
            copy.ranks_failed = tuple(sorted({*copy.ranks_failed, *(new - done)}))
        if len(copy.ranks_done) + len(copy.ranks_failed) < len(self.all_ranks):
            return
        if copy.work is WorkRegion.GIVEN_UP:
            self._move(copy, "transfer.reported/whole")
            self.late_ends.append(copy)
        if copy.job_id in self.state.under_way:
            self._end(copy, has_failed=bool(copy.ranks_failed))
        self._forget_if_settled(copy)

    @on(e.LoadCompleted, e.SaveCompleted)
    def _completed(self, event: e.LoadCompleted | e.SaveCompleted, _sequence: int) -> None:
        copy = self.state.copies.get(event.job_id)
        if copy is not None:
            self._move(copy, event.id)
            self._forget_if_settled(copy)

    @on(e.LoadFailed, e.SaveFailed)
    def _failed(self, event: e.LoadFailed | e.SaveFailed, _sequence: int) -> None:
        state, job_id = self.state, event.job_id
        if job_id in state.unsent:
            self._never_given(job_id, is_counted_on=True)
        state.reminders.pop(job_id, None)
        copy = state.copies.get(job_id)
        if copy is not None:
            if job_id in state.under_way:
                self._end(copy, has_failed=True)
            self._move(copy, trigger_of(event))
            self._forget_if_settled(copy)

    def _never_given(self, job_id: int, *, is_counted_on: bool) -> None:
        job = self.state.unsent.pop(job_id).job
        if is_counted_on and isinstance(job, e.LoadIssued) and not job.is_async:
            self.state.block_ids.extend(job.block_ids)

    def _end(self, copy: Copy, *, has_failed: bool) -> None:
        """Handle an asynchronous copy that is over. An end for which vLLM waits may become pending."""
        state, ordinal = self.state, copy.ordinal
        del state.under_way[copy.job_id]
        its = state.ends.get(ordinal)
        if its is None:
            return
        if copy.kind is CopyKind.LOAD:
            if its.load is LoadEnd.UNDER_WAY and its.load_id == copy.job_id:
                its.load = LoadEnd.FAILED if has_failed else LoadEnd.ARRIVED
                (state.failed if has_failed else state.received)[ordinal] = None
        elif its.blocks is BlocksEnd.KEPT_FOR_COPY and not self._saves_under_way(ordinal):
            its.blocks = BlocksEnd.FREE_AGAIN
            state.sent[ordinal] = None

    def _move(self, copy: Copy, trigger: str) -> None:
        copy.work = self._tables.work[trigger].get(copy.work, copy.work)
        source = self._tables.source.get(trigger)
        if source is not None:
            copy.source = source[copy.source]

    def _forget_if_settled(self, copy: Copy) -> None:
        state, job_id = self.state, copy.job_id
        if (
            copy.work is WorkRegion.SETTLED
            and job_id not in state.under_way
            and job_id not in state.unsent
            and job_id not in state.reminders
        ):
            del state.copies[job_id]

    # --- delivery ------------------------------------------------------------------------------

    @on(e.HookFailed)
    def _hook_failed(self, event: e.HookFailed, sequence: int) -> None:
        if event.hook == "build_connector_meta":
            self.state.closed_at = sequence

    @on(e.EffectsDelivered)
    def _delivered(self, event: e.EffectsDelivered, _sequence: int) -> None:
        state = self.state
        for handed_out, queue in ((event.job_ids, state.unsent), (event.awaited, state.reminders)):
            for job_id in handed_out:
                queue.pop(job_id, None)
                copy = state.copies.get(job_id)
                if copy is not None:
                    self._forget_if_settled(copy)
        if event.block_ids:
            del state.block_ids[: len(event.block_ids)]
        for ordinal in event.failed:
            if ordinal in state.failed:
                del state.failed[ordinal]
                state.ends[ordinal].load = LoadEnd.WITH_WORKERS
                state.to_report[ordinal] = None
        for ordinal in event.sent:
            if ordinal in state.sent:
                del state.sent[ordinal]
                state.ends[ordinal].blocks = BlocksEnd.WITH_WORKERS
                state.to_report[ordinal] = None
        for ordinal in (*event.reported, *event.received):
            self._close(ordinal)

    def _close(self, ordinal: int) -> None:
        """Drop what is pending for a life's load and kept blocks: vLLM has received one end and gets no second one."""
        state = self.state
        its = state.ends.get(ordinal)
        if its is not None:
            for queue in (state.failed, state.sent, state.received, state.to_report):
                queue.pop(ordinal, None)
            its.load, its.load_id, its.blocks = LoadEnd.NONE, 0, BlocksEnd.NONE
            self._forget_if_closed(ordinal, its)
