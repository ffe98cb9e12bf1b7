"""The scheduler's half: every hook call becomes observations, every decision an answer or a job.

It reads live vLLM objects once, copies values into events and keeps nothing else: the requests it holds are only
there to be read in a later hook. Nothing here may raise into vLLM (`guard.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.chunk_keys import ChunkKeySource
from kvledger.adapters.vllm.event_log import OpenedLog
from kvledger.adapters.vllm.guard import guarded
from kvledger.adapters.vllm.messages import messages
from kvledger.adapters.vllm.metadata import JobReport, PageJob, StepJobs, WorkerReports
from kvledger.adapters.vllm.step_reader import StepReader
from kvledger.lifecycle import HandlerRegistry, Ledger, LedgerConfiguration, RequestState
from kvledger.lifecycle import events as e
from kvledger.lifecycle.ledger import LedgerCorrupt
from kvledger.lifecycle.rules import Rule

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

NO_HIT = (0, False)
_UNKNOWN_RANGE: range | None = None
FREE_NOW = (False, None)


class SchedulerSide:
    """Owns the ledger; the only writer of its log."""

    def __init__(
        self,
        configuration: LedgerConfiguration,
        log: OpenedLog,
        keys: ChunkKeySource,
        *,
        handlers: HandlerRegistry | None = None,
        speculates: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.ledger = Ledger(configuration, log.store, handlers=handlers)
        self.log = log
        self._configuration = configuration
        self._projections = self.ledger.projections
        self._tracker = self._projections.tracker
        self._keys = keys
        self._clock = clock
        self._opened_ns = clock()
        self._speculates = speculates
        self._requests: dict[str, Request] = {}
        self._outbox: list[e.LoadIssued | e.SaveIssued] = []
        self._undeliverable: list[int] = []
        self._messages = messages.bind(log=str(log.directory or "memory"))
        self.is_disabled = False
        self.figures_changed = True
        self._reader = StepReader(
            self._projections, self._requests, self._sync_keys, self._observe, speculates=speculates
        )
        self._observe(e.LogNote("connector started", self._now()))
        self.ledger.commit()

    # --- hooks, in the order of a request's life ---------------------------------------------

    @guarded(default=None)
    def on_new_request(self, request: Request) -> None:
        """A request was accepted."""
        if self.is_disabled:
            return
        self._requests[request.request_id] = request
        ordinal = self._tracker.num_arrived
        self._observe(e.RequestArrived(request.request_id, ordinal, request.num_prompt_tokens, self._now()))

    @guarded(default=NO_HIT)
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Answer a lookup; loads are synchronous, so the second value is False."""
        if self.is_disabled:
            return NO_HIT
        self._notice_preemption(request)
        self._sync_keys(request)
        decisions = self._observe(
            e.LookupRequested(request.request_id, num_computed_tokens, request.num_tokens, self._now())
        )
        for decision in decisions:
            if isinstance(decision, e.LookupAnswered):
                return decision.num_external_tokens, False
        return NO_HIT

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks were given; take up the answer, or tell the worker to report what cannot be delivered."""
        delivered = self._take_up(request, blocks, num_external_tokens)
        if num_external_tokens and not delivered:
            # The scheduler now believes that these blocks will be filled. Reported as load errors, they are
            # recomputed (kv_load_failure_policy "recompute") or fail this one request ("fail").
            promised = self._promised_blocks(request, num_external_tokens)
            block_ids = _only_group(blocks)
            self._undeliverable.extend(block_ids if promised is None else block_ids[promised.start : promised.stop])

    @guarded(default=_UNKNOWN_RANGE)
    def _promised_blocks(self, request: Request, num_external_tokens: int) -> range | None:
        """Which blocks of the table a taken-up answer was to fill; blocks before them may be shared with others."""
        lookups = self._projections.lookups
        answer = lookups.taken_up(request.request_id) or lookups.pending(request.request_id)
        if answer is None:
            return None
        return self._projections.geometry.blocks_spanning(answer.num_computed_tokens, num_external_tokens)

    @guarded(default=False)
    def _take_up(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> bool:
        if self.is_disabled:
            return False
        self._notice_preemption(request)
        record = self._tracker.get(request.request_id)
        if record is not None and record.state in {RequestState.CHUNKED_PREFILL, RequestState.RUNNING}:
            # Nobody looks up or allocates for a running request, except for the next turn of a streaming session.
            self._continue_session(request)
        block_ids = tuple(_only_group(blocks))
        decisions = self._observe(e.BlocksAllocated(request.request_id, block_ids, num_external_tokens, self._now()))
        return any(isinstance(decision, e.LoadIssued) for decision in decisions)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepJobs:
        """Record the step, commit its events as one frame, hand over its jobs."""
        self._record_step(scheduler_output)
        self._commit()
        outbox, self._outbox = self._outbox, []
        undeliverable, self._undeliverable = self._undeliverable, []
        if not outbox and not undeliverable:
            return _NO_JOBS
        return StepJobs(
            saves_before_forward=_page_jobs(
                job for job in outbox if isinstance(job, e.SaveIssued) and job.before_forward
            ),
            loads=_page_jobs(job for job in outbox if isinstance(job, e.LoadIssued)),
            saves=_page_jobs(job for job in outbox if isinstance(job, e.SaveIssued) and not job.before_forward),
            undeliverable_block_ids=tuple(undeliverable),
        )

    @guarded(default=None)
    def _record_step(self, scheduler_output: SchedulerOutput) -> None:
        if self.is_disabled:
            return
        for request_id in versions.preempted_request_ids(scheduler_output):
            request = self._requests.get(request_id)
            if request is not None:
                self._notice_preemption(request, versions.blocks_to_zero(scheduler_output))
        event = self._reader.read(scheduler_output, self._now())
        for ordinal, _, _ in event.settled:
            self._check_block_table(scheduler_output, ordinal, event)
        self._observe(event)

    @guarded(default=None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take up what the workers report."""
        if connector_output.invalid_block_ids and not self.is_disabled:
            self._notice_load_errors(connector_output.invalid_block_ids)
        worker_meta = connector_output.kv_connector_worker_meta
        if isinstance(worker_meta, WorkerReports):
            self._take_reports(worker_meta)
        self._commit()

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> tuple[bool, None]:
        """The request ends; its blocks may be freed now, because what must be saved is copied before they are used."""
        if not self._finish(request, len(block_ids)):
            self._finish(request, 0)  # with nothing to save, so that at least nobody remembers it for ever
        self._requests.pop(request.request_id, None)
        return FREE_NOW

    @guarded(default=False, hook_name="request_finished")
    def _finish(self, request: Request, num_blocks: int) -> bool:
        if self.is_disabled or self._tracker.get(request.request_id) is None:
            return True
        self._notice_preemption(request)
        self._sync_keys(request)
        num_written_tokens = self._num_written_tokens(request, request.num_computed_tokens)
        self._observe(
            e.RequestFinished(
                request.request_id,
                request.status.name,
                min(num_written_tokens, num_blocks * self._configuration.block_size),
                request.num_tokens,
                self._now(),
            )
        )
        return True

    @guarded(default=False)
    def reset_cache(self) -> bool:
        """Forget every saved chunk; copies in flight are let go when they are reported."""
        # Preemptions have no hook. Those that came with the reset belong to before it, and so do their saves.
        for request in tuple(self._requests.values()):
            self._notice_preemption(request)
        self._observe(e.CacheReset(self._now()))
        self._commit()
        return True

    @guarded(default=False)
    def has_pending_push_work(self) -> bool:
        """Whether steps are needed although no request is left: a copy waits for one, or for its report."""
        return bool(self._outbox) or (not self.is_disabled and len(self._projections.transfers) > 0)

    @guarded(default=None)
    def shutdown(self) -> None:
        """Write the last events and close the log. May be called twice."""
        if not self.is_disabled:
            self._observe(e.LogNote("connector shut down", self._now()))
        self._commit()
        self.log.store.close()

    # --- reading vLLM --------------------------------------------------------------------------

    def _now(self) -> int:
        return self._clock() - self._opened_ns

    def _notice_preemption(self, request: Request, overwritten: frozenset[int] = frozenset()) -> None:
        """Record a preemption that has no hook of its own; `request.num_preemptions` tells it reliably.

        Normally it is noticed in the same step's `build_connector_meta`. After
        `reset_prefix_cache(reset_running_requests=True)` the request is looked up first.
        """
        record = self._tracker.get(request.request_id)
        if record is None or request.num_preemptions <= record.num_preemptions:
            return
        self._sync_keys(request)
        num_settled_tokens = self._num_written_tokens(request, self._tracker.num_computed_tokens(record))
        if overwritten and not overwritten.isdisjoint(self._projections.blocks.held(request.request_id)):
            num_settled_tokens = 0
        self._observe(e.RequestPreempted(request.request_id, max(0, num_settled_tokens), self._now()))

    def _notice_load_errors(self, block_ids: set[int]) -> None:
        """The scheduler has taken back the tokens of these blocks already; there is no hook for that either."""
        self._observe(e.LoadErrorsObserved(tuple(sorted(block_ids)), self._now()))
        for request in tuple(self._requests.values()):
            record = self._tracker.get(request.request_id)
            if record is None or self._speculates or not record.counted_tokens:
                continue
            if request.num_computed_tokens < self._tracker.num_computed_tokens(record):
                rolled_back = e.TokensRolledBack(request.request_id, request.num_computed_tokens, self._now())
                self._observe(rolled_back)

    def _continue_session(self, request: Request) -> None:
        num_computed_tokens = request.num_computed_tokens
        self._observe(
            e.SessionContinued(
                request.request_id, num_computed_tokens, request.num_tokens, request.num_prompt_tokens, self._now()
            )
        )
        # The last sampled token was dropped and other tokens follow: keys hold up to there.
        first_chunk = num_computed_tokens // self._configuration.chunk_size
        known = self._projections.chunk_keys.of(request.request_id)
        if first_chunk <= len(known):
            parent = known[first_chunk - 1] if first_chunk else None
            keys = self._keys.keys(request, first_chunk, parent)
            self._observe(e.ChunkKeysObserved(request.request_id, first_chunk, keys))

    def _sync_keys(self, request: Request) -> int:
        """Make the keys of all whole chunks known; returns how many there are.

        A key source that fails costs this request the cache, and is not asked again for it.
        """
        record = self._tracker.get(request.request_id)
        known = self._projections.chunk_keys.of(request.request_id)
        num_known = len(known)
        if (num_known + 1) * self._configuration.chunk_size > request.num_tokens:
            return num_known
        if record is None or record.quarantined:
            return num_known
        try:
            keys = self._keys.keys(request, num_known, known[-1] if known else None)
        except Exception as error:  # noqa: BLE001 -- read from live objects of vLLM
            self.hook_failed("chunk_keys", request.request_id, error)
            return num_known
        if keys:
            self._observe(e.ChunkKeysObserved(request.request_id, num_known, keys))
        return num_known + len(keys)

    def _num_written_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens whose KV will have been written when the next step's `handle_preemptions` runs.

        That is behind every step in flight, so what those compute counts; vLLM fences the freed blocks until then.
        A token that is not known yet has no key, and with speculation a step in flight may take drafts back.
        """
        if self._speculates:
            return max(0, min(num_computed_tokens, request.num_tokens - 1) - request.num_in_flight_tokens)
        return min(num_computed_tokens, request.num_tokens)

    def _check_block_table(self, scheduler_output: SchedulerOutput, ordinal: int, event: e.StepScheduled) -> None:
        """Before blocks are saved from, compare the folded table with the scheduler's own, and prefer the latter."""
        record = self._tracker.by_ordinal(ordinal)
        if record is None:
            return
        table = versions.scheduler_block_table(scheduler_output, record.request_id)
        if table is None:
            return
        folded = list(self._projections.blocks.held(record.request_id))
        folded.extend(block for other, blocks in event.extended if other == ordinal for block in blocks)
        if folded != list(table):
            num_extended = len(folded) - len(self._projections.blocks.held(record.request_id))
            detail = f"folded {len(folded)} blocks, the scheduler has {len(table)} and others"
            self._messages.warning(
                "block table differs", request_id=record.request_id, detail=detail, rule=Rule.TABLE_EQ
            )
            observed = tuple(table[: len(table) - num_extended])
            self._observe(e.BlockTableObserved(record.request_id, observed, self._now()))

    def _take_reports(self, worker_reports: WorkerReports) -> None:
        by_job: dict[int, dict[int, JobReport]] = {}
        for report in worker_reports.reports:
            by_job.setdefault(report.job_id, {})[report.rank] = report  # a rank counts once, however often it reports
        for job_id, by_rank in by_job.items():
            reports = by_rank.values()
            num_done = sum(report.done for report in reports)
            self._observe(
                e.TransferReported(
                    job_id=job_id,
                    num_ranks_done=num_done,
                    num_ranks_failed=len(by_rank) - num_done,
                    num_bytes=sum(report.num_bytes for report in reports),
                    duration_ns=max(report.duration_ns for report in reports),
                    error=next((report.error for report in reports if report.error), ""),
                    time_ns=self._now(),
                )
            )

    # --- writing the ledger --------------------------------------------------------------------

    def _observe(self, event: e.Event) -> list[e.Event]:
        if self.is_disabled:
            return []
        decisions = self.ledger.observe(event)
        if decisions or not isinstance(event, e.StepScheduled):
            self.figures_changed = True
        for decision in decisions:
            if isinstance(decision, e.LoadIssued | e.SaveIssued):
                self._outbox.append(decision)
            elif isinstance(decision, e.InvariantViolated):
                self._messages.error(
                    "rule broken, the request recomputes",
                    rule=decision.rule,
                    request_id=decision.request_id,
                    detail=decision.detail,
                    sequence=decision.cause,
                )
        return decisions

    def _commit(self) -> None:
        try:
            self.ledger.commit()
        except Exception as error:  # noqa: BLE001 -- a log that cannot be written must not stop the engine
            self._messages.error("events could not be written", error=str(error))

    def hook_failed(self, hook: str, request_id: str, error: Exception) -> None:
        """Called by the guard: tell the people, tell the log, and let the request recompute."""
        described = f"{type(error).__name__}: {error}"
        self._messages.error("hook failed, the request recomputes", hook=hook, request_id=request_id, error=described)
        event = e.HookFailed(hook, request_id, described, self._now())
        try:
            if isinstance(error, LedgerCorrupt):
                self._disable(event)
            else:
                self._observe(event)
        except Exception:  # noqa: BLE001 -- telling of a failure must not become one
            self._disable(event)

    def _disable(self, event: e.HookFailed) -> None:
        """A projection is corrupt: answer nothing and save nothing until the engine restarts, but tell the log."""
        if not self.is_disabled:
            self.is_disabled = True
            self._messages.error("the ledger is corrupt; caching is off until the engine restarts")
        self._outbox = [job for job in self._outbox if isinstance(job, e.LoadIssued)]
        self.ledger.record_unfolded(event)


_NO_JOBS = StepJobs()


def _only_group(blocks: KVCacheBlocks) -> Sequence[int]:
    block_ids: Sequence[int] = blocks.get_block_ids()[0]
    return block_ids


def _page_jobs(jobs: object) -> tuple[PageJob, ...]:
    return tuple(PageJob(job.job_id, job.block_ids, job.slots) for job in jobs)  # type: ignore[attr-defined]
