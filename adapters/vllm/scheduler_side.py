"""The scheduler's half of the connector: turns hook calls into observations, and decisions into answers and jobs.

This half copies values from live vLLM objects into events. It keeps requests only so that later hooks can read them. A
hook must not raise into vLLM: `HOOKS` lists what happens if a hook fails.

All hooks are in this one file, in the order in which a request meets them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.asked_figures import AskedFigures
from kvledger.adapters.vllm.cache_events import CacheEvents, ChunkBlocks
from kvledger.adapters.vllm.chunk_keys import ChunkKeySource
from kvledger.adapters.vllm.digests import DigestedPages
from kvledger.adapters.vllm.early_ends import EarlyEnds
from kvledger.adapters.vllm.event_log import OpenedLog
from kvledger.adapters.vllm.journal import NOT_WRITTEN, Fallback, Journal, breach_of_answer, guarded
from kvledger.adapters.vllm.log_ids import LogIds
from kvledger.adapters.vllm.metadata import (
    NO_JOBS,
    StepJobs,
    WorkerReports,
    WorkerStart,
    disagreements,
    no_copies,
    reported_steps,
    reported_transfers,
    step_jobs,
)
from kvledger.adapters.vllm.observe import RequestReader, StepReader, arrival
from kvledger.adapters.vllm.prefix_cache import PrefixCache
from kvledger.adapters.vllm.stats import StatsSource
from kvledger.lifecycle import (
    NOTHING_OWED,
    Channel,
    Core,
    Ledger,
    LedgerConfiguration,
    RequestState,
    Rule,
    TrustRegion,
    raise_if_unstoppable,
)
from kvledger.lifecycle import events as e

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvledger.adapters.vllm.stats import ConnectorStats

NO_HIT: tuple[int | None, bool] = (0, False)
ASK_AGAIN = (None, False)
_NO_EVENTS: Sequence[KVCacheEvent] = ()
_COMPUTING = frozenset({RequestState.CHUNKED_PREFILL, RequestState.RUNNING})
_OUTPUT_STEPS = (
    "take_load_errors",
    "take_reports",
    "evict",
    "refuse_early_ends",
    "end_waiting",
    "forget_ids",
    "commit",
)
HOOKS: Final = {
    "on_new_request": Fallback(steps=("commit",)),
    "get_num_new_matched_tokens": Fallback(NO_HIT, ("commit",)),
    "update_state_after_alloc": Fallback(None, ("refuse_load", "commit"), fails_as="claim"),
    "build_connector_meta": Fallback(NO_JOBS, ("commit", "hand_out"), fails_as="record_step"),
    "update_connector_output": Fallback(None, _OUTPUT_STEPS),
    "request_finished": Fallback((False, None), ("finish_unsaved", "let_go")),
    "reset_cache": Fallback(answer=False, steps=("commit",)),
    "take_events": Fallback(_NO_EVENTS),
    "take_stats": Fallback(),
    "has_pending_push_work": Fallback(answer=False),
    "has_pending_block_frees": Fallback(answer=False),
    "shutdown": Fallback(),
}
"""Hook → what the hook returns to vLLM if its code raises, and which methods run after that.

These methods refuse an accepted load, record the workers' reports, and hand over pending jobs and ends.
"""


@guarded(HOOKS)
class SchedulerSide:
    """Owns the connector's state, and is the only writer of its log."""

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
        self._asked = AskedFigures(self._projections, self.journal.messages)
        self._requests: dict[str, Request] = {}
        """Id in the log → request. This class uses the ids in the log, except in values that it gets from vLLM or
        returns to vLLM."""
        self.prefix_cache = PrefixCache(configuration.block_size)
        self._early_ends = EarlyEnds(self.journal, self._requests, self.ids, self.prefix_cache)
        self._num_failures_seen = 0
        self.digested = DigestedPages(self._projections)
        self._cache_events: CacheEvents | None = None
        self._admits = False
        self._has_spared = False
        self._last_step_ns = 0
        self._arrived: WorkerReports | None = None
        """Reports of the workers that are not recorded yet."""
        self._invalid_block_ids: frozenset[int] = frozenset()
        """Blocks that vLLM has named as not filled, until kvledger has recorded them."""
        self._ending = e.NO_LIFE
        """Ordinal of the life whose `RequestFinished` is being recorded."""
        self.request_reader = RequestReader(
            self.journal, keys, speculates=speculates, zeroes_new_blocks=zeroes_new_blocks
        )
        self._step_reader = StepReader(
            self._projections, self._requests, self.request_reader.keys, self.journal.observe, speculates=speculates
        )
        self.journal.observe(e.LogNote("connector started", self.journal.now()))
        for remark in log.remarks:
            self.journal.observe(e.LogNote(remark, self.journal.now()))
        for reason in declined:
            self.journal.decline(reason)
        self.journal.commit()
        self._stats = StatsSource(self)

    @property
    def ledger(self) -> Ledger:
        """The ledger: the connector's state and its log."""
        return self.journal.ledger

    @property
    def log(self) -> OpenedLog:
        """The opened log."""
        return self.journal.log

    def hook_failed(self, hook: str, request_id: str, error: BaseException) -> None:
        """Record that a hook raised."""
        self.journal.hook_failed(hook, request_id, error)

    def compare(self, starts: Sequence[WorkerStart]) -> str:
        """Return how the workers differ from what the scheduler side expects; empty if they do not differ.

        If a worker declines the model, the result is empty and kvledger serves no more requests.
        """
        if self.journal.is_disabled:
            return ""
        for start in starts:
            if start.declined:
                for reason in start.declined:
                    self.journal.decline(reason)
                return ""
        return disagreements(starts, self.journal.configuration)

    def bind(self, manager: KVCacheManager) -> None:
        """Keep the block manager. Called when the scheduler has created it."""
        self.request_reader.bind(manager)
        self.prefix_cache.bind(manager)

    # --- hooks, in the order in which a request meets them; each commits before it returns --------------

    def on_new_request(self, request: Request) -> None:
        """Record an accepted request."""
        if not self.journal.is_disabled:
            if self.request_reader.take_reset():
                self._record_reset()
            request = self.ids.arrived(request, self._is_known)
            self._requests[request.request_id] = request
            arrived = arrival(request, self.ledger.next_ordinal, self.journal.now())
            self.journal.observe(arrived)
            self._asked.arrived(arrived, request.kv_transfer_params)
        self.journal.commit()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, and whether asynchronously. None as the number makes vLLM ask again.

        If the request's previous lookup had the same answer, this lookup and its answer may be written later, with the
        next frame.
        """
        journal = self.journal
        if journal.is_disabled:
            journal.commit()
            return NO_HIT
        if self.request_reader.take_reset():
            self._record_reset()
        request = self._live(request)
        record, first_sequence = self._tracker.get(request.request_id), journal.ledger.next_sequence
        last_answer = None if record is None else record.answer
        self.request_reader.read(request)
        asked = e.LookupRequested(request.request_id, num_computed_tokens, request.num_tokens, journal.now())
        decided = _answer_among(journal.observe(asked))
        answer = ASK_AGAIN if isinstance(decided, e.LookupDeferred) else NO_HIT
        if isinstance(decided, e.LookupAnswered):
            breach = breach_of_answer(decided, asked, self._projections)
            if not breach:
                answer = decided.num_external_tokens, decided.is_async
                has_only_asked = journal.ledger.next_sequence == first_sequence + 2
                is_same = last_answer is not None and decided == replace(last_answer, cause=decided.cause)
                if has_only_asked and is_same and journal.is_whole:
                    return answer
            elif record is None or record.trust is TrustRegion.TRUSTED:  # its quarantine is in the log
                journal.withhold(request.request_id, Rule.VLLM_CONTRACT.value, breach)
        if journal.commit() or answer == NO_HIT:
            return answer
        journal.withhold(request.request_id, "", NOT_WRITTEN)
        return NO_HIT

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Issue the load of the tokens that vLLM accepted. If this fails, report the tokens' blocks as unfilled."""
        is_issued = False
        if not self.journal.is_disabled:
            live = self._live(request)
            if not self._admits:  # a step that preempts admits no request, so once per step is enough
                self._admits = True
                self.request_reader.preemptions(self._requests)
            self.request_reader.preemption(live)
            record = self._tracker.get(live.request_id)
            if record is not None and record.state in _COMPUTING:
                # vLLM does not look up or allocate for a running request, except for a streaming session's next turn.
                self.request_reader.next_turn(live)
            block_ids, now = tuple(versions.flat_table(blocks.get_block_ids())), self.journal.now()
            allocated = e.BlocksAllocated(live.request_id, block_ids, num_external_tokens, now)
            decisions = self.journal.observe(allocated)
            is_issued = any(isinstance(decision, e.LoadIssued) for decision in decisions)
        if num_external_tokens and not is_issued:
            self.refuse_load(request, blocks, num_external_tokens)
        self.journal.commit()

    def refuse_load(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Report the blocks that vLLM expects to be loaded, but that no load will fill.

        vLLM recomputes the tokens of these blocks (kv_load_failure_policy "recompute") or fails this one request
        ("fail"). If the model has several groups, every load is asynchronous. vLLM then accepts reports of requests
        whose load failed, but no reports of blocks.
        """
        if not num_external_tokens:
            return
        request = self._live(request)
        block_ids = tuple(versions.flat_table(blocks.get_block_ids()))
        try:
            record = self._tracker.get(request.request_id)
            answer = None if record is None else record.claimed or record.answer
            if answer is not None:  # other requests may share earlier blocks
                first_token = answer.num_computed_tokens
                promised = self._projections.geometry.blocks_spanning(first_token, num_external_tokens)
                block_ids = block_ids[promised.start : promised.stop]
        except BaseException as error:  # noqa: BLE001 -- then the whole table is refused
            raise_if_unstoppable(error)
            self.hook_failed("promised_blocks", request.request_id, error)
        self.journal.observe(e.LoadRefused(request.request_id, block_ids, self.journal.now()))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepJobs:
        """Record the step, commit its events as one frame, return the workers' jobs."""
        self._admits = False
        if self.journal.is_disabled:
            self.journal.pass_step()
        else:
            if self.request_reader.take_reset():
                self._record_reset()
            self._record_step(self.ids.of_step(scheduler_output) if self.ids.renamed else scheduler_output)
        self.journal.commit()
        return self.hand_out(scheduler_output)

    def _record_step(self, scheduler_output: SchedulerOutput) -> None:
        self.request_reader.preemptions_of_step(scheduler_output, self._requests)
        now_ns = self.journal.now()
        if not scheduler_output.total_num_scheduled_tokens and self._can_omit(now_ns):
            return
        self._last_step_ns = now_ns
        self.journal.before_step()
        step = self._step_reader.read(scheduler_output, now_ns)
        added = dict(step.extended)
        for settled in step.settled:
            self.request_reader.block_table(scheduler_output, settled.ordinal, added.get(settled.ordinal, ()))
        self.journal.observe(step)

    def _can_omit(self, now_ns: int) -> bool:
        """Whether this step, which schedules no request, can be left out of the log.

        An engine that waits for a copy runs such steps in a loop. A copy is overdue after `max_silent_steps` steps
        and `max_silent_ms`, so enough steps are written to reach both limits. If the model has windows, all
        steps are written, because each step shows which blocks the step before has freed.
        """
        configuration = self.journal.configuration
        max_silent_ns = configuration.max_silent_ms * 1_000_000
        return (
            (now_ns - self._last_step_ns) * configuration.max_silent_steps < max_silent_ns
            and not self._tracker.computed.decoding
            and self.ledger.ready(Channel.WORKERS) == NOTHING_OWED
            and not self._projections.geometry.windows.has_any
        )

    def hand_out(self, scheduler_output: SchedulerOutput) -> StepJobs:
        """Return the jobs and ends that are pending for the workers and recorded in the log."""
        ready, jobs = self.journal.ready(), NO_JOBS
        if ready != NOTHING_OWED:
            try:
                jobs = step_jobs(ready, self.digested.of_job if self.digested.share else None)
            except BaseException as error:  # noqa: BLE001 -- the scheduler counts on these jobs: each is reported as failed
                raise_if_unstoppable(error)
                self.hook_failed("build_connector_meta", "", error)
                ready = self.journal.ready()
                jobs = no_copies(ready)
            jobs = replace(jobs, delivered=self.journal.advance(ready))
            if jobs.failed_loads or jobs.finished_saves:
                failed_loads, finished_saves = map(self.ids.all_given, (jobs.failed_loads, jobs.finished_saves))
                jobs = replace(jobs, failed_loads=failed_loads, finished_saves=finished_saves)
        return jobs if scheduler_output.total_num_scheduled_tokens else replace(jobs, is_idle=True)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Record the workers' reports, and add to the output the requests whose load is completed.

        vLLM first processes the output, then calls this method, and makes no lookup in between.
        """
        worker_meta = connector_output.kv_connector_worker_meta
        self._arrived = worker_meta if isinstance(worker_meta, WorkerReports) else None
        self._invalid_block_ids = frozenset(connector_output.invalid_block_ids or ())
        if self._invalid_block_ids:
            self.prefix_cache.take_back(self._requests.values(), self._invalid_block_ids)
            self.take_load_errors(connector_output)
        if self._arrived is not None and not self.journal.is_disabled:
            for digested in self.digested.events(self._arrived.reports, self.journal.now()):
                self.journal.observe(digested)  # before the reports, which settle their jobs
        self.take_reports(connector_output)
        self.evict(connector_output)
        self.refuse_early_ends(connector_output)
        self.end_waiting(connector_output)
        self.forget_ids(connector_output)
        self.journal.commit()

    def take_load_errors(self, _connector_output: KVConnectorOutput) -> None:
        """Record which blocks no load has filled. A second call for the same output does nothing."""
        invalid_block_ids, self._invalid_block_ids = self._invalid_block_ids, frozenset()
        if invalid_block_ids and not self.journal.is_disabled:
            self.request_reader.load_errors(invalid_block_ids, tuple(self._requests.values()))

    def take_reports(self, _connector_output: KVConnectorOutput) -> None:
        """Record each report of the workers separately, because a request may wait for any of them.

        A second call for the same output does nothing.
        """
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            return
        for reported in reported_transfers(arrived.reports, self._projections, self.journal.now):
            if self.journal.is_disabled and not self.journal.owed.is_waiting:
                break
            self.journal.take(reported)
        if not self.journal.is_disabled:  # after the reports, so that a report missing by now counts as missing
            for step in reported_steps(arrived.steps):
                self.journal.observe(step)
        disagreement = self.compare(arrived.starts)
        if disagreement:  # too late to refuse the start
            self.journal.decline(disagreement)

    def evict(self, connector_output: KVConnectorOutput) -> None:
        """Remove from vLLM's prefix cache the blocks that no load has filled."""
        unfilled, invalid_block_ids = self._tracker.unfilled, frozenset(connector_output.invalid_block_ids or ())
        if invalid_block_ids or unfilled.num_failures != self._num_failures_seen:
            self._num_failures_seen = unfilled.num_failures
            self.prefix_cache.evict(invalid_block_ids | unfilled.blocks.keys())

    def refuse_early_ends(self, connector_output: KVConnectorOutput) -> None:
        """Remove from the output the ends that another connector reports too early."""
        if connector_output.finished_recving or connector_output.finished_sending:
            self._early_ends.refuse(connector_output)

    def end_waiting(self, connector_output: KVConnectorOutput) -> None:
        """Add to the output the requests whose load is completed. The workers themselves report other ends."""
        ready, owed = self.ledger.ready(Channel.VLLM), self.journal.owed
        finished = (*(connector_output.finished_recving or ()), *(connector_output.finished_sending or ()))
        reported = owed.reported_to_vllm(map(self.ids.logged, finished))
        self.journal.advance(replace(ready, reported=reported))
        if ready.received:
            received = self.ids.all_given(ready.received.values())
            connector_output.finished_recving = {*(connector_output.finished_recving or ()), *received}

    def forget_ids(self, _connector_output: KVConnectorOutput) -> None:
        """Forget the ids of each ended request, unless vLLM waits for a copy of the request."""
        self.ids.forget(self._is_known)

    def _is_known(self, request_id: str) -> bool:
        is_alive = request_id in self._requests or self._tracker.get(request_id) is not None
        return is_alive or self.journal.owed.is_named(request_id)

    def request_finished(self, request: Request, num_blocks: int) -> tuple[bool, dict[str, Any] | None]:
        """Record that a request has finished.

        Returns whether vLLM must keep the request's blocks, and the figures for the response if the request asked for
        figures. vLLM must keep the blocks only as long as an asynchronous save reads them.
        """
        live = self._live(request)
        self._ending = self.journal.owed.present(live.request_id)
        self._finish(live, num_blocks)
        return self.let_go(request, num_blocks)

    def finish_unsaved(self, request: Request, _num_blocks: int) -> None:
        """Record that the request has finished, and save nothing. Called if `request_finished` raised."""
        self._finish(self._live(request), 0)

    def let_go(self, request: Request, num_blocks: int) -> tuple[bool, dict[str, Any] | None]:
        """Forget the live request; return the values that `request_finished` returns."""
        live, life = self._live(request), self._ending
        self._ending = e.NO_LIFE
        if self._requests.pop(live.request_id, None) is not None and num_blocks:
            self._early_ends.ended_with_blocks(live.request_id)
        self.ids.ended(live)
        figures = self._asked.take(live.request_id)
        is_held = self.journal.owed.is_held(life)  # also if the commit withholds the save: its end is reported
        self.journal.commit()
        return is_held, None if self.journal.is_disabled else figures

    def _finish(self, request: Request, num_blocks: int) -> None:
        if self.journal.is_disabled:
            if self.journal.owed.is_waiting:
                status, num_tokens = request.status.name, request.num_tokens
                self.journal.observe(e.RequestFinished(request.request_id, status, 0, num_tokens, self.journal.now()))
            return
        if self.request_reader.take_reset():
            self._record_reset()
        record = self._tracker.get(request.request_id)
        if record is None:
            return
        self.request_reader.read(request)
        self._step_reader.window_left_at_end(record, self.journal.now())
        # vLLM counts tokens as computed once another connector begins to load them; scheduled ones certainly are.
        num_computed_tokens = min(request.num_computed_tokens, self._tracker.num_computed_tokens(record))
        num_written_tokens = self.request_reader.num_written_tokens(request, num_computed_tokens)
        self.journal.observe(
            e.RequestFinished(
                request.request_id,
                request.status.name,
                min(num_written_tokens, num_blocks * self._block_size),
                request.num_tokens,
                self.journal.now(),
                self.request_reader.zeroes_new_blocks,
                request.num_in_flight_tokens,
                request.num_computed_tokens,
            )
        )

    def reset_cache(self) -> bool:
        """Forget every saved chunk. Copies in flight are discarded when they are reported."""
        if not self.journal.is_disabled:
            self.request_reader.take_reset()  # vLLM has just reset its own cache
            self.journal.observe(e.CacheReset(self.journal.now()))
            # Save nothing of requests that the reset preempted: their KV is stale, and a copy that waits for a step
            # makes vLLM step a sleeping engine, whose KV memory is gone (v1/engine/core.py).
            self.request_reader.preemptions(self._requests)
        self.journal.commit()
        return True

    def commit(self, *_arguments: object) -> None:
        """Write the events that a hook recorded before it failed."""
        self.journal.commit()

    def _record_reset(self) -> None:
        """Record that vLLM reset its own prefix cache, but not kvledger's. Log a message the first time."""
        if not self._has_spared:
            self._has_spared = True
            self.journal.messages.info(
                "vLLM's prefix cache was reset, kvledger's was not: if the weights have changed, the KV that kvledger "
                "has saved is wrong; call reset_prefix_cache(reset_connector=True) after a change of weights"
            )
        self.request_reader.reset(self._requests)

    def _live(self, request: Request) -> Request:
        """Return the request with its id in the log."""
        is_plain = self._requests.get(request.request_id) is request
        return request if is_plain else self.ids.of(request)

    def publish(self, blocks: ChunkBlocks) -> None:
        """From now on, publish to routers which blocks can be loaded."""
        self._cache_events = CacheEvents(blocks, self._projections, self._requests)
        self.journal.follow = self._cache_events.follow

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Return the KV events since the last call. vLLM calls this after it has processed a step's output."""
        if self._cache_events is None:
            return _NO_EVENTS
        if self.journal.is_disabled:
            self._cache_events.stop()
        return self._cache_events.take(is_written=self.journal.is_whole)

    def take_stats(self) -> ConnectorStats | None:
        """Return how the figures have changed since the last call."""
        return self._stats.take()

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must run steps even without requests, because a copy waits for a step or for its report."""
        return self.journal.has_jobs

    def has_pending_block_frees(self) -> bool:
        """Whether vLLM should wait one step for blocks that are about to be freed, instead of preempting a request."""
        return self.journal.owed.is_freeing

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
    """Return the answer to a lookup; None if the request was quarantined.

    The answer need not be the last decision, because extensions may decide after it.
    """
    for decision in reversed(decisions):
        if isinstance(decision, e.RequestQuarantined):
            return None
        if isinstance(decision, e.LookupAnswered | e.LookupDeferred):
            return decision
    return None
