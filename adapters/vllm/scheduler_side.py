"""The scheduler's half: every hook call becomes observations, every decision an answer or a job.

It reads live vLLM objects once and copies values into events; the requests it holds are only there to be read in a
later hook. Nothing here may raise into vLLM (`guard.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.cache_events import CacheEvents, ChunkBlocks
from kvledger.adapters.vllm.chunk_keys import ChunkKeySource
from kvledger.adapters.vllm.contract import breach_of_answer
from kvledger.adapters.vllm.digests import DigestedPages
from kvledger.adapters.vllm.event_log import OpenedLog
from kvledger.adapters.vllm.guard import guarded
from kvledger.adapters.vllm.journal import NOT_WRITTEN, Journal
from kvledger.adapters.vllm.log_ids import LogIds
from kvledger.adapters.vllm.metadata import JobReport, StepJobs, WorkerReports, WorkerStart
from kvledger.adapters.vllm.noticing import Noticing
from kvledger.adapters.vllm.prefix_cache import PrefixCache
from kvledger.adapters.vllm.step_jobs import NO_JOBS, no_copies, step_jobs
from kvledger.adapters.vllm.step_reader import StepReader
from kvledger.adapters.vllm.trace_context import trace_parent
from kvledger.lifecycle import (
    Channel,
    Core,
    Ledger,
    LedgerConfiguration,
    Ready,
    RequestState,
    Rule,
    TrustRegion,
    raise_if_unstoppable,
)
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

NO_HIT: tuple[int | None, bool] = (0, False)
ASK_AGAIN = (None, False)
_REMEDY = (
    "start all processes of the engine with the same versions of kvledger and vLLM and the same "
    "kv_connector_extra_config (host_bytes counts all ranks together); where they are the same, this is a defect of "
    "kvledger that its log and this line describe"
)
_NOTHING_FOUND = (NO_HIT, False)
_MAX_ENDED = 1024
"""Ended requests of which another child's late report of an end is recognized."""
_NOBODY: tuple[str, ...] = ()
_NO_EVENTS: Sequence[KVCacheEvent] = ()
_UNKNOWN_RANGE: range | None = None


class SchedulerSide:
    """Owns the ledger; the only writer of its log."""

    def __init__(
        self,
        core: Core,
        configuration: LedgerConfiguration,
        log: OpenedLog,
        keys: ChunkKeySource,
        *,
        speculates: bool = False,
        zeroes_new_blocks: bool = False,
        declined: Sequence[str] = (),
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.journal = Journal(core, configuration, log, clock=clock)
        self._is_shut_down = False
        self._projections = self.journal.projections
        self._tracker = self.journal.tracker
        self._block_size = configuration.block_size
        self.ids = LogIds()
        self._requests: dict[str, Request] = {}
        """By their ids in the log, as in everything else here but what comes from vLLM and goes there."""
        self._ended_with_blocks: deque[str] = deque(maxlen=_MAX_ENDED)
        self.prefix_cache = PrefixCache(configuration.block_size)
        self._num_failures_seen = 0
        self.digested = DigestedPages(self._projections)
        self._cache_events: CacheEvents | None = None
        self._admits = False
        self._has_spared = False
        self._last_step_ns = 0
        self._notice = Noticing(self.journal, keys, speculates=speculates, zeroes_new_blocks=zeroes_new_blocks)
        self._reader = StepReader(
            self._projections, self._requests, self._notice.keys, self.journal.observe, speculates=speculates
        )
        self.journal.observe(e.LogNote("connector started", self.journal.now()))
        for remark in log.remarks:
            self.journal.observe(e.LogNote(remark, self.journal.now()))
        for reason in declined:
            self.journal.decline(reason)
        self.journal.commit()

    @property
    def ledger(self) -> Ledger:
        """The connector's state, and its log."""
        return self.journal.ledger

    @property
    def log(self) -> OpenedLog:
        """Where the log goes."""
        return self.journal.log

    def hook_failed(self, hook: str, request_id: str, error: BaseException) -> None:
        """Called by the guard."""
        self.journal.hook_failed(hook, request_id, error)

    def compare(self, starts: Sequence[WorkerStart]) -> str:
        """Compare what the workers have with what is counted on here; return what does not agree, or nothing.

        Where a worker declines the model, nobody is served.
        """
        if self.journal.is_disabled:
            return ""
        for start in starts:
            if start.declined:
                for reason in start.declined:
                    self.journal.decline(reason)
                return ""
        disagreement = "; ".join(filter(None, (self._disagreement(start) for start in starts)))
        return f"{disagreement}; {_REMEDY}" if disagreement else ""

    def _disagreement(self, start: WorkerStart) -> str:
        configuration = self.journal.configuration
        if start.num_slots != configuration.num_slots:
            return (
                f"rank {start.rank} has a host pool of {start.num_slots} slots ({start.slot_bytes} bytes each), the "
                f"scheduler counts on {configuration.num_slots}"
            )
        if configuration.copies_async and not start.copies_async:
            return f"rank {start.rank} cannot copy while steps run, the scheduler counts on it"
        return ""

    # --- hooks, in the order in which a request meets them; each commits before it returns --------------

    def on_new_request(self, request: Request) -> None:
        """A request was accepted."""
        self._arrive(request)
        self.journal.commit()

    @guarded(default=None, hook_name="on_new_request")
    def _arrive(self, request: Request) -> None:
        if self.journal.is_disabled:
            return
        self._notice_reset()
        request = self.ids.arrived(request, self._is_known)
        self._requests[request.request_id] = request
        ordinal = self.journal.ledger.next_ordinal
        now, parent = self.journal.now(), trace_parent(request.trace_headers)
        self.journal.observe(e.RequestArrived(request.request_id, ordinal, request.num_prompt_tokens, now, parent))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Answer a lookup: how many tokens, and whether they come asynchronously. None asks to be asked again.

        A lookup that repeats the last one, answer and all, is written with the next frame.
        """
        request = self.ids.of(request)
        answer, is_repeated = self._look_up(request, num_computed_tokens)
        if is_repeated or self.journal.commit():
            return answer
        if answer != NO_HIT:
            self._withhold_answer(request)
        return NO_HIT

    @guarded(default=_NOTHING_FOUND, hook_name="get_num_new_matched_tokens")
    def _look_up(self, request: Request, num_computed_tokens: int) -> tuple[tuple[int | None, bool], bool]:
        """The answer, and whether nothing but a repetition was recorded."""
        if self.journal.is_disabled:
            return _NOTHING_FOUND
        self._notice_reset()
        before, first_sequence = self._last_answer(request), self.ledger.next_sequence
        self._notice.preemption(request)
        self._notice.keys(request)
        asked = e.LookupRequested(request.request_id, num_computed_tokens, request.num_tokens, self.journal.now())
        decided = _answer_among(self.journal.observe(asked))
        if isinstance(decided, e.LookupDeferred):
            return ASK_AGAIN, False
        if decided is None:
            return _NOTHING_FOUND
        breach = breach_of_answer(decided, asked, self._projections)
        if breach:
            self._refuse_answer(request, breach)
            return _NOTHING_FOUND
        has_only_asked = self.ledger.next_sequence == first_sequence + 2
        is_repeated = self.journal.is_whole and has_only_asked and before == self._last_answer(request)
        return (decided.num_external_tokens, decided.is_async), is_repeated

    def _last_answer(self, request: Request) -> int:
        """Where the log has this incarnation's last lookup and its answer in full; 0 where something came between."""
        record = self._tracker.get(request.request_id)
        return 0 if record is None or record.answer is None else record.written_at

    def _refuse_answer(self, request: Request, breach: str) -> None:
        record = self._tracker.get(request.request_id)
        if (
            record is None or record.trust is TrustRegion.TRUSTED
        ):  # of a quarantined request it is known that it is helped no more
            self.journal.withhold(request.request_id, Rule.VLLM_CONTRACT.value, breach)

    @guarded(default=None, hook_name="get_num_new_matched_tokens")
    def _withhold_answer(self, request: Request) -> None:
        self.journal.withhold(request.request_id, "", NOT_WRITTEN)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks were given: what is claimed of the answer is loaded, or vLLM is told what cannot be delivered."""
        request = self.ids.of(request)
        is_issued = self._claim(request, blocks, num_external_tokens)
        if num_external_tokens and not is_issued:
            self._refuse_load(request, blocks, num_external_tokens)
        self.journal.commit()

    @guarded(default=None, hook_name="update_state_after_alloc")
    def _refuse_load(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        # The scheduler now counts on these blocks being filled. Reported as load errors, they are recomputed
        # (kv_load_failure_policy "recompute") or fail this one request ("fail"). With several groups every load is
        # asynchronous, and vLLM takes reports of requests only.
        promised = self._promised_blocks(request, num_external_tokens)
        block_ids = tuple(versions.flat_table(blocks.get_block_ids()))
        if promised is not None:
            block_ids = block_ids[promised.start : promised.stop]
        self.journal.observe(e.LoadRefused(request.request_id, block_ids, self.journal.now()))

    @guarded(default=False)
    def _claim(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> bool:
        """Whether a load was issued."""
        if self.journal.is_disabled:
            return False
        if not self._admits:  # vLLM admits nobody in a step in which it preempts, so once a step is enough
            self._admits = True
            self._notice.preemptions(self._requests)
        self._notice.preemption(request)
        record = self._tracker.get(request.request_id)
        if record is not None and record.state in {RequestState.CHUNKED_PREFILL, RequestState.RUNNING}:
            # Nobody looks up or allocates for a running request, except for the next turn of a streaming session.
            self._notice.next_turn(request)
        block_ids = tuple(versions.flat_table(blocks.get_block_ids()))
        decisions = self.journal.observe(
            e.BlocksAllocated(request.request_id, block_ids, num_external_tokens, self.journal.now())
        )
        return any(isinstance(decision, e.LoadIssued) for decision in decisions)

    @guarded(default=_UNKNOWN_RANGE)
    def _promised_blocks(self, request: Request, num_external_tokens: int) -> range | None:
        """Which blocks of the table a claimed answer was to fill; blocks before them may be shared with others."""
        record = self._tracker.get(request.request_id)
        answer = None if record is None else record.claimed or record.answer
        if answer is None:
            return None
        return self._projections.geometry.blocks_spanning(answer.num_computed_tokens, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepJobs:
        """Record the step, commit its events as one frame, hand over what the workers are owed."""
        self._record_step(scheduler_output)
        self._admits = False
        self.journal.commit()
        jobs = self._hand_out()
        return jobs if scheduler_output.total_num_scheduled_tokens else attrs.evolve(jobs, is_idle=True)

    @guarded(default=NO_JOBS, hook_name="build_connector_meta")
    def _hand_out(self) -> StepJobs:
        ready = self.journal.ready()
        if not any(ready):
            return NO_JOBS
        try:
            jobs = step_jobs(ready, self.digested.of_job)
        except BaseException as error:  # noqa: BLE001 -- the scheduler counts on these jobs: each is reported as failed
            raise_if_unstoppable(error)
            self.hook_failed("build_connector_meta", "", error)
            ready = self.journal.ready()
            jobs = no_copies(ready)
        sequence = self.ledger.next_sequence
        self._advance(ready)
        if self.ledger.next_sequence > sequence:
            jobs = attrs.evolve(jobs, delivered=sequence)
        if not jobs.failed_loads and not jobs.finished_saves:
            return jobs
        failed_loads, finished_saves = map(self.ids.all_given, (jobs.failed_loads, jobs.finished_saves))
        return attrs.evolve(jobs, failed_loads=failed_loads, finished_saves=finished_saves)

    @guarded(default=None, hook_name="advance")
    def _advance(self, ready: Ready) -> None:
        """Record that it is handed over. What the workers are given is written already, this with the next frame."""
        self.ledger.advance(ready)

    @guarded(default=None)
    def _record_step(self, scheduler_output: SchedulerOutput) -> None:
        if self.journal.is_disabled:
            self.journal.pass_step()
            return
        self._notice_reset()
        scheduler_output = self.ids.of_step(scheduler_output)
        self._notice.preemptions_of_step(scheduler_output, self._requests)
        now_ns = self.journal.now()
        if not scheduler_output.total_num_scheduled_tokens and self._says_nothing(now_ns):
            return
        self._last_step_ns = now_ns
        self.journal.before_step()
        step = self._reader.read(scheduler_output, now_ns)
        added = dict(step.extended)
        for settled in step.settled:
            self._notice.block_table(scheduler_output, settled.ordinal, added.get(settled.ordinal, ()))
        self.journal.observe(step)

    def _says_nothing(self, now_ns: int) -> bool:
        """Whether nobody misses a step that schedules nobody: an engine that waits for a copy makes them in a loop.

        Copies become overdue by steps and by time, so they are written often enough for both. With windows, each step
        says what the one before has freed.
        """
        configuration = self.journal.configuration
        max_silent_ns = configuration.max_silent_ms * 1_000_000
        return (
            (now_ns - self._last_step_ns) * configuration.max_silent_steps < max_silent_ns
            and not self._tracker.computed.decoding
            and not any(self.ledger.ready(Channel.WORKERS))
            and not self._projections.geometry.windows.forget
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Observe what the workers report, and add the requests whose load has arrived.

        Nobody has looked a block up since the step whose output this is was processed.
        """
        invalid_block_ids = frozenset(connector_output.invalid_block_ids or ())
        if invalid_block_ids:
            self._take_back(invalid_block_ids)
            self._take_load_errors(invalid_block_ids)
        self._observe_reports(connector_output)
        self._evict(invalid_block_ids)
        self._refuse_early_ends(connector_output)
        received = self._end_waiting(connector_output)
        self._forget_ids()
        self.journal.commit()
        if received:
            connector_output.finished_recving = {*(connector_output.finished_recving or ()), *received}

    @guarded(default=None, hook_name="update_connector_output")
    def _forget_ids(self) -> None:
        self.ids.forget(self._is_known)

    def _is_known(self, request_id: str) -> bool:
        owed = self.journal.owed
        is_alive = request_id in self._requests or self._tracker.get(request_id) is not None
        return is_alive or owed.is_named(request_id)

    @guarded(default=None, hook_name="update_connector_output")
    def _refuse_early_ends(self, connector_output: KVConnectorOutput) -> None:
        """Remove ends that another child of a `MultiConnector` reports and that vLLM must not have yet.

        vLLM would compute on blocks that a load still fills, free blocks that a copy still uses, or fail an assertion
        because it waits for no end of that request or does not know it any more.
        """
        early_receipts = {
            request_id: life
            for request_id in connector_output.finished_recving or ()
            if (life := self.journal.owed.early_receipt(logged := self.ids.logged(request_id))) != e.NO_LIFE
            or self._is_present(logged)
            or self._is_gone(logged, request_id)
        }
        early_releases = {
            request_id: life
            for request_id in connector_output.finished_sending or ()
            if (life := self.journal.owed.early_release(logged := self.ids.logged(request_id))) != e.NO_LIFE
            or logged in self._requests
            or self._is_gone(logged, request_id)
        }
        if early_receipts:
            connector_output.finished_recving = set(connector_output.finished_recving or ()) - early_receipts.keys()
        if early_releases:
            connector_output.finished_sending = set(connector_output.finished_sending or ()) - early_releases.keys()
        for field, lives in (("finished_recving", early_receipts), ("finished_sending", early_releases)):
            for request_id in sorted(lives):
                logged = self.ids.logged(request_id)
                self.journal.messages.error(
                    "another connector reported an end too early; it was removed before vLLM acted on it",
                    request_id=logged,
                    field=field,
                )
                self.journal.observe(e.EndRefused(logged, lives[request_id], field, self.journal.now()))

    def _is_gone(self, request_id: str, given_id: str) -> bool:
        """Whether vLLM has freed the request's blocks, and forgot it with them.

        False if it ended without blocks: another child may have kept it, and nothing shows whether vLLM knows it still.
        """
        return (
            request_id in self._ended_with_blocks
            and request_id not in self._requests
            and self.prefix_cache.is_freed(given_id)
        )

    def _is_present(self, request_id: str) -> bool:
        """Whether vLLM has the request and waits for no load of it."""
        request = self._requests.get(request_id)
        return request is not None and not versions.is_waiting_for_load(request)

    @guarded(default=_NOBODY, hook_name="update_connector_output")
    def _end_waiting(self, connector_output: KVConnectorOutput) -> tuple[str, ...]:
        """Requests whose load has arrived; others are reported by the workers."""
        ready, owed = self.ledger.ready(Channel.VLLM), self.journal.owed
        finished = (*(connector_output.finished_recving or ()), *(connector_output.finished_sending or ()))
        self._advance(ready._replace(reported=owed.reported_to_vllm(map(self.ids.logged, finished))))
        return self.ids.all_given(ready.received.values())

    @guarded(default=None, hook_name="update_connector_output")
    def _take_back(self, invalid_block_ids: frozenset[int]) -> None:
        self.prefix_cache.take_back(self._requests.values(), invalid_block_ids)

    @guarded(default=None, hook_name="update_connector_output")
    def _evict(self, invalid_block_ids: frozenset[int]) -> None:
        unfilled = self._tracker.unfilled
        if invalid_block_ids or unfilled.num_failures != self._num_failures_seen:
            self._num_failures_seen = unfilled.num_failures
            self.prefix_cache.evict(invalid_block_ids | unfilled.blocks.keys())

    @guarded(default=None, hook_name="update_connector_output")
    def _observe_reports(self, connector_output: KVConnectorOutput) -> None:
        worker_meta = connector_output.kv_connector_worker_meta
        if isinstance(worker_meta, WorkerReports):
            self._take_digests(worker_meta)
            self._take_reports(worker_meta)
            self._take_steps(worker_meta)
            disagreement = self.compare(worker_meta.starts)
            if disagreement:  # too late to refuse the start
                self.journal.decline(disagreement)

    @guarded(default=None, hook_name="update_connector_output")
    def _take_load_errors(self, invalid_block_ids: frozenset[int]) -> None:
        if not self.journal.is_disabled:
            self._notice.load_errors(invalid_block_ids, tuple(self._requests.values()))

    @guarded(default=None, hook_name="update_connector_output")
    def _take_digests(self, worker_reports: WorkerReports) -> None:
        """Before the reports, which settle their jobs."""
        if not self.journal.is_disabled:
            for digested in self.digested.events(worker_reports.reports, self.journal.now()):
                self.journal.observe(digested)

    def _take_reports(self, worker_reports: WorkerReports) -> None:
        by_copy: dict[tuple[tuple[int, ...], bool, tuple[int, ...]], dict[int, JobReport]] = {}
        for report in worker_reports.reports:
            copied = (report.job_ids, report.is_repeated, report.moments)
            by_copy.setdefault(copied, {}).setdefault(report.rank, report)
        for (job_ids, is_repeated, moments), by_rank in by_copy.items():
            if self.journal.is_disabled and not self.journal.owed.is_waiting:
                return
            reports = by_rank.values()
            reported = e.TransferReported(
                job_ids=job_ids,
                ranks_done=tuple(sorted(report.rank for report in reports if report.done)),
                ranks_failed=tuple(sorted(report.rank for report in reports if not report.done)),
                is_repeated=is_repeated,
                num_bytes=self._bytes_of(job_ids, sum(report.num_bytes for report in reports)),
                duration_ns=max(report.duration_ns for report in reports),
                error=next((report.error for report in reports if report.error), ""),
                withheld="",
                time_ns=self.journal.now(),
                moments=moments,
            )
            if not self._take_report(reported):
                self._take_report(reported)

    @guarded(default=None, hook_name="update_connector_output")
    def _take_steps(self, worker_reports: WorkerReports) -> None:
        """After the reports: what is missing among them then is missing."""
        if self.journal.is_disabled:
            return
        ranks: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for step in worker_reports.steps:
            if not step.delivered:  # no `EffectsDelivered`: the step has no jobs that could be missing
                continue
            ranks.setdefault((step.delivered, step.under_way), []).append(step.rank)
        for (delivered, under_way), of_ranks in ranks.items():
            self.journal.observe(e.StepReported(delivered, tuple(sorted(of_ranks)), under_way))

    def _bytes_of(self, job_ids: tuple[int, ...], num_bytes: int) -> tuple[int, ...]:
        """What a copy moved for each of its jobs: all pages are of one size."""
        if len(job_ids) == 1:
            return (num_bytes,)
        jobs = map(self._projections.jobs.get, job_ids)
        num_pages = [0 if job is None else len(job.slots) - job.slots.count(NO_SLOT) for job in jobs]
        return tuple([num_bytes * num // (sum(num_pages) or 1) for num in num_pages])

    def _take_report(self, reported: e.TransferReported) -> bool:
        """Whether it was recorded. Each for itself: somebody may wait for any of them."""
        sequence = self.ledger.next_sequence
        try:
            self.journal.observe(reported)
        except BaseException as error:  # noqa: BLE001 -- as in any hook
            raise_if_unstoppable(error)
            is_recorded = self.ledger.next_sequence > sequence
            self.hook_failed("update_connector_output", "", error)
            return is_recorded
        return True

    def request_finished(self, request: Request, num_blocks: int) -> tuple[bool, None]:
        """The request ends. Its blocks may be freed now, unless an asynchronous copy out of them runs."""
        request = self.ids.of(request)
        life = self.journal.owed.present(request.request_id)
        if not self._finish(request, num_blocks):
            self._finish(request, 0)  # with nothing to save, so that at least nobody remembers it for ever
        if self._requests.pop(request.request_id, None) is not None and num_blocks:
            self._ended_with_blocks.append(request.request_id)
        self.ids.ended(request)
        is_held = self.journal.owed.is_held(life)  # and what is withheld by the commit is reported as sent
        self.journal.commit()
        return is_held, None

    @guarded(default=False, hook_name="request_finished")
    def _finish(self, request: Request, num_blocks: int) -> bool:
        if self.journal.is_disabled:
            if self.journal.owed.is_waiting:
                status, num_tokens = request.status.name, request.num_tokens
                self.journal.observe(e.RequestFinished(request.request_id, status, 0, num_tokens, self.journal.now()))
            return True
        self._notice_reset()
        record = self._tracker.get(request.request_id)
        if record is None:
            return True
        self._notice.preemption(request)
        self._notice.keys(request)
        self._reader.window_left_at_end(record, self.journal.now())
        # vLLM counts tokens as computed as soon as another connector begins to load them; what was scheduled is there.
        num_computed_tokens = min(request.num_computed_tokens, self._tracker.num_computed_tokens(record))
        num_written_tokens = self._notice.num_written_tokens(request, num_computed_tokens)
        self.journal.observe(
            e.RequestFinished(
                request.request_id,
                request.status.name,
                min(num_written_tokens, num_blocks * self._block_size),
                request.num_tokens,
                self.journal.now(),
                self._notice.zeroes_new_blocks,
                request.num_in_flight_tokens,
                request.num_computed_tokens,
            )
        )
        return True

    def reset_cache(self) -> bool:
        """Forget every saved chunk; copies in flight are let go when they are reported."""
        is_reset = self._reset()
        self.journal.commit()
        return is_reset

    @guarded(default=False, hook_name="reset_cache")
    def _reset(self) -> bool:
        if self.journal.is_disabled:
            return True
        self.prefix_cache.take_reset()  # vLLM has reset its own cache right before
        self.journal.observe(e.CacheReset(self.journal.now()))
        # Of requests that the reset preempted nothing is saved: it would be stale, and a copy that waits for a step
        # makes vLLM step an engine that sleeps, whose KV memory is gone (v1/engine/core.py).
        self._notice.preemptions(self._requests)
        return True

    def _notice_reset(self) -> None:
        """Record that vLLM has reset its prefix cache and spared the connector; the first time, tell people too.

        What the preempted requests had computed is saved before that is recorded: it is as old as what was saved.
        """
        if not self.prefix_cache.take_reset():
            return
        if not self._has_spared:
            self._has_spared = True
            self.journal.messages.info(
                "vLLM's prefix cache was reset, kvledger's was not: if the weights have changed, its KV is wrong; call "
                "reset_prefix_cache(reset_connector=True) after a change of weights"
            )
        self._notice.preemptions(self._requests)
        self.journal.observe(e.PrefixCacheReset(self.journal.now()))

    def publish(self, blocks: ChunkBlocks) -> None:
        """From now on tell vLLM which blocks can be loaded, for those who route requests."""
        self._cache_events = CacheEvents(blocks, self._projections, self._requests)
        self.journal.follow = self._cache_events.follow

    @guarded(default=_NO_EVENTS)
    def take_events(self) -> Sequence[KVCacheEvent]:
        """What has changed since the last call, for vLLM to publish; it asks when a step's output was processed."""
        if self._cache_events is None:
            return _NO_EVENTS
        if self.journal.is_disabled:
            self._cache_events.stop()
        return self._cache_events.take(is_written=self.journal.is_whole)

    @guarded(default=False)
    def has_pending_push_work(self) -> bool:
        """Whether steps are needed although no request is left: a copy waits for one, or for its report."""
        return self.journal.has_jobs

    @guarded(default=False)
    def has_pending_block_frees(self) -> bool:
        """Whether vLLM had better wait a step for blocks that are coming back than preempt a request for them."""
        return self.journal.owed.is_freeing

    @guarded(default=None)
    def shutdown(self) -> None:
        """Write the last events and close the log. May be called twice."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        try:
            self.journal.observe(e.LogNote(e.SHUT_DOWN, self.journal.now()))
            self.journal.commit()
        finally:
            self.log.close(self.ledger.next_sequence)


def _answer_among(decisions: Sequence[e.Event]) -> e.LookupAnswered | e.LookupDeferred | None:
    """The answer to a lookup, behind which extensions may have decided; None also for whom it quarantined."""
    for decision in reversed(decisions):
        if isinstance(decision, e.RequestQuarantined):
            return None
        if isinstance(decision, e.LookupAnswered | e.LookupDeferred):
            return decision
    return None
