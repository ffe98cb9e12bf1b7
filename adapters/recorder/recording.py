"""Records the hook calls on the scheduler's side, each before it is made, and the wrapped connector's answers.

The recording keeps references to vLLM's live requests and reads these requests in hooks. No method here raises an
exception or makes a decision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import msgspec

from kvledger.adapters.recorded import payloads
from kvledger.adapters.recorder import decoders
from kvledger.adapters.recorder.ends import children_of, name_of
from kvledger.adapters.recorder.log import RecorderLog
from kvledger.adapters.recorder.place import Place
from kvledger.adapters.recorder.transfers import Transfers
from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.chunk_keys import ChunkKeySource
from kvledger.adapters.vllm.journal import Fallback, guarded
from kvledger.adapters.vllm.log_ids import LogIds
from kvledger.adapters.vllm.observe import RequestReader, StepReader, arrival
from kvledger.lifecycle import Channel, RequestState
from kvledger.lifecycle import events as e
from kvledger.lifecycle.ranges import MAX_INT64, MAX_TOKENS

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvledger.adapters.recorder.page_digests import CopiedPages, FoundDigests

_Ends = TypeVar("_Ends", bound=payloads.WorkersReported)
_Parameters = ParamSpec("_Parameters")
_COMPUTING = frozenset({RequestState.CHUNKED_PREFILL, RequestState.RUNNING})
HOOKS: Final = {
    "describe": Fallback(),
    "raised": Fallback(),
    "built": Fallback(()),
    "returned_for_step": Fallback(),
    "returned": Fallback(),
    "on_new_request": Fallback(),
    "lookup": Fallback(),
    "lookup_returned": Fallback(),
    "allocated": Fallback(),
    "load_chosen": Fallback(),
    "finished": Fallback(),
    "end_returned": Fallback(),
    "step": Fallback(),
    "workers_report": Fallback(),
    "reported_to_vllm": Fallback(),
    "reset": Fallback(),
    "shutting_down": Fallback(),
    "shutdown": Fallback(),
}
"""Method that the recorder's connector calls → the value to return if the method raises."""


def _records(
    hook: Callable[Concatenate[Recording, _Parameters], None],
) -> Callable[Concatenate[Recording, _Parameters], None]:
    """Decorate a method: commit the events after each call. After recording has stopped, the method does nothing."""

    @wraps(hook)
    def record(self: Recording, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
        if not self.log.is_ended:
            if self.place.find_out():
                note = f"{payloads.CHILD}, so the log includes reports of other connectors"
                self.log.observe(e.LogNote(note, self.log.now()))
            hook(self, *args, **kwargs)
            self.log.commit()

    return record


def _within(answered: Any, most: int) -> int:
    """Return `answered`, limited to the range from `-most` to `most`. A log cannot store larger numbers."""
    return max(-most, min(most, int(answered)))


@guarded(HOOKS)
class Recording:
    """Records hook calls. Most hooks have one method for the call and one for the answer."""

    def __init__(
        self,
        log: RecorderLog,
        keys: ChunkKeySource,
        *,
        speculates: bool,
        num_workers: int,
        digest_share: float = 0,
    ) -> None:
        self.log = log
        self.place = Place()
        self._projections = log.projections
        self._tracker = log.tracker
        self._requests: dict[str, Request] = {}
        """Request id in the log → request."""
        self._admits = False
        self._request_reader = RequestReader(log, keys, speculates=speculates)
        self._step_reader = StepReader(self._projections, self._requests, None, log.observe, speculates=speculates)
        self._ids = LogIds()
        self._transfers = Transfers(log, num_workers, digest_share=digest_share, ids=self._ids)
        self._loaded_to: dict[str, int] = {}
        """Request id → number of tokens up to which the request's last load fills its blocks."""
        self._loads_of_steps: deque[tuple[int, ...]] = deque()
        """For each step in flight: job ids of the loads within the step."""
        log.observe(e.LogNote("recorder started", log.now()))
        log.commit()

    @_records
    def describe(self, started: Callable[[], payloads.RecordingStarted]) -> None:
        """Record the wrapped connector and its engine, so that `kvledger repro` can run the log again."""
        self.log.note(started())

    def decline(self, reason: str) -> None:
        """Log the reason why the model's block tables cannot be recorded, and stop recording."""
        self.log.messages.warning("the recorder cannot record this model; the connector runs unrecorded", reason=reason)
        self.log.observe(e.LogNote(f"{e.DECLINED}{reason}", self.log.now()))
        self.log.commit()
        self.log.is_ended = True

    def hook_failed(self, hook: str, _request_id: str, error: BaseException) -> None:
        """Stop recording, because the recorder itself failed. The decorator `guarded` calls this method."""
        self.log.end(hook, error)
        self._requests.clear()

    # --- what the wrapped connector did, whatever the hook ------------------------------------

    @_records
    def raised(self, hook: str, request: Request | None, error: BaseException) -> None:
        """Record an exception of the wrapped connector."""
        self.log.hook_failed(hook, "" if request is None else self._ids.logged(request.request_id), error)

    def built(self, metadata: object, duration_ns: int) -> tuple[CopiedPages, ...]:
        """Record the copies that a decoder reads from a step's metadata. Return the pages that workers must digest."""
        if self.log.is_ended:
            return ()
        asked = self._transfers.built(metadata, self._loaded_to)
        self.log.note(payloads.Returned("build_connector_meta", duration_ns))
        self.log.commit()
        return asked

    def returned_for_step(self, scheduler_output: SchedulerOutput, metadata: object) -> None:
        """Note the metadata that the recorder returns to vLLM, or to the connector that contains the recorder."""
        if not self.log.is_ended:
            self.place.built(scheduler_output, metadata)

    @_records
    def returned(self, hook: str, duration_ns: int) -> None:
        """Record the duration of a hook whose answer is not recorded."""
        self.log.note(payloads.Returned(hook, duration_ns))

    # --- one request ---------------------------------------------------------------------------

    @_records
    def on_new_request(self, request: Request) -> None:
        """Record an accepted request."""
        self._notice_reset()
        request = self._ids.arrived(request, self._is_known)
        self._requests[request.request_id] = request
        ordinal = self.log.ledger.next_ordinal
        self.log.observe(arrival(request, ordinal, self.log.now()))

    @_records
    def lookup(self, request: Request, num_computed_tokens: int) -> None:
        """Record a lookup."""
        self._notice_reset()
        request = self._arrived(request)
        self._request_reader.read(request)
        self.log.observe(e.LookupRequested(request.request_id, num_computed_tokens, request.num_tokens, self.log.now()))

    @_records
    def lookup_returned(self, request: Request, num_computed_tokens: int, answer: Any, duration_ns: int) -> None:
        """Record the answer to a lookup."""
        num_external_tokens, is_async = answer
        if num_external_tokens is not None:
            num_external_tokens = _within(num_external_tokens, MAX_INT64)
        returned = payloads.LookupReturned(
            num_computed_tokens, request.num_tokens, num_external_tokens, bool(is_async), duration_ns
        )
        self.log.note(returned, self._ids.logged(request.request_id))

    @_records
    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Record the blocks that a request got."""
        num_external_tokens = _within(num_external_tokens, MAX_TOKENS)
        if not self._admits:  # after a reset, preempted requests may lose their blocks before they are looked up
            self._admits = True
            self._request_reader.preemptions(self._requests)
        request = self._arrived(request)
        self._request_reader.preemption(request)
        record = self._tracker.get(request.request_id)
        if record is not None and record.state in _COMPUTING:
            self._request_reader.next_turn(request)
        block_ids = tuple(versions.flat_table(blocks.get_block_ids()))
        answer = None if record is None else record.answer
        self._loaded_to[request.request_id] = 0 if answer is None else answer.num_computed_tokens + num_external_tokens
        self.log.observe(e.BlocksAllocated(request.request_id, block_ids, num_external_tokens, self.log.now()))
        self._transfers.given(request.request_id, block_ids)

    @_records
    def load_chosen(self, request: Request, connector: object) -> None:
        """Record which child of a `MultiConnector` loads for the request."""
        children = children_of(connector)
        chosen = getattr(connector, "_requests_to_connector", {}).get(request.request_id) if children else None
        request_id = self._ids.logged(request.request_id)
        if chosen is not None and self._tracker.get(request_id) is not None:
            self.log.note(payloads.LoadChosen(chosen, name_of(children[chosen])), request_id)

    @_records
    def finished(self, request: Request) -> None:
        """Record that a request has finished."""
        request = self._ids.of(request)
        record = self._tracker.get(request.request_id)
        if record is None:
            return
        self._request_reader.read(request)
        num_computed_tokens = min(request.num_computed_tokens, self._tracker.num_computed_tokens(record))
        written = self._request_reader.num_written_tokens(request, num_computed_tokens)
        self.log.observe(
            e.RequestFinished(
                request.request_id,
                request.status.name,
                written,
                request.num_tokens,
                self.log.now(),
                num_in_flight_tokens=request.num_in_flight_tokens,
                num_computed_tokens=request.num_computed_tokens,
            )
        )

    @_records
    def end_returned(self, request: Request, answer: Any, duration_ns: int, kept_by: tuple[int, ...] = ()) -> None:
        """Record whether vLLM keeps the request's blocks, and for which children of a `MultiConnector`."""
        request = self._ids.of(request)
        self._ids.ended(request)
        self._requests.pop(request.request_id, None)
        self._loaded_to.pop(request.request_id, None)
        if self._tracker.get(request.request_id) is not None:
            self.log.note(payloads.EndReturned(bool(answer[0]), duration_ns, kept_by), request.request_id)

    def _arrived(self, request: Request) -> Request:
        """Return the request under its id in the log. If its arrival has not been recorded, record the arrival now."""
        if self._tracker.get(self._ids.logged(request.request_id)) is None:
            self.on_new_request(request)
        return self._ids.of(request)

    def bind(self, manager: KVCacheManager) -> None:
        """Keep the scheduler's block manager. It shows when vLLM's own prefix cache alone is reset."""
        self._request_reader.bind(manager)

    def _notice_reset(self) -> None:
        if self._request_reader.take_reset():
            self._request_reader.reset(self._requests)

    # --- the engine ----------------------------------------------------------------------------

    @_records
    def step(self, scheduler_output: SchedulerOutput) -> None:
        """Record a step, and the loads that are issued for the step."""
        self._admits = False
        self._notice_reset()
        if self._ids.renamed:
            scheduler_output = self._ids.of_step(scheduler_output)
        self._request_reader.preemptions_of_step(scheduler_output, self._requests)
        step = self._step_reader.read(scheduler_output, self.log.now())
        self.log.observe(step)
        self._transfers.step(step)
        ready = self.log.ledger.ready(Channel.WORKERS)
        self.log.ledger.advance(ready)
        within = tuple(job.job_id for job in ready.jobs if isinstance(job, e.LoadIssued) and not job.is_async)
        if scheduler_output.total_num_scheduled_tokens or within:
            self._loads_of_steps.append(within)

    @_records
    def workers_report(
        self, output: KVConnectorOutput, digests: Iterable[FoundDigests], ends: Iterable[payloads.ReportedBy] = ()
    ) -> None:
        """Record the workers' reports and digests."""
        invalid_block_ids = set(output.invalid_block_ids or ())
        for found in digests:
            self._transfers.digested(found, invalid_block_ids)
        metadata = output.kv_connector_worker_meta
        reported = self._ends(payloads.WorkersReported, output)
        self.log.note(msgspec.structs.replace(reported, unread=decoders.unread(metadata)))
        for reported_by in ends:
            if self.place.is_child or reported_by.child != payloads.OWN:  # otherwise `reported` has the same
                self.log.note(reported_by)
        self._transfers.reported(metadata)

    @_records
    def reported_to_vllm(self, output: KVConnectorOutput, duration_ns: int) -> None:
        """Record the reports that vLLM gets. The wrapped connector may have changed the workers' reports."""
        self.log.note(payloads.Returned("update_connector_output", duration_ns))
        reported = self._ends(payloads.ReportedToVLLM, output)
        if reported != payloads.ReportedToVLLM():
            self.log.note(reported)
        if reported.invalid_block_ids:
            self._request_reader.load_errors(reported.invalid_block_ids, tuple(self._requests.values()))
        failed_requests, failed_blocks = set(reported.failed_recving), set(reported.invalid_block_ids)
        within = self._loads_of_steps.popleft() if self._loads_of_steps else ()
        for job in tuple(self._projections.jobs):
            is_reported = job.request_id in reported.finished_recving or job.request_id in failed_requests
            if job.job_id in within or (job.is_async and is_reported):
                has_failed = job.request_id in failed_requests or not failed_blocks.isdisjoint(job.block_ids)
                error = "the connector reported that the load failed" if has_failed else ""
                self.log.observe(e.TransferReported.by((0,), job.job_id, self.log.now(), error=error))
        for request_id in reported.finished_sending:
            record = self._tracker.get(request_id)
            if record is not None and record.state is RequestState.FINISHED:
                self.log.note(payloads.Sent(), request_id)
        for channel in Channel:  # failures too: vLLM knows them now and may look the request up before the next step
            self.log.ledger.advance(self.log.ledger.ready(channel))
        self._ids.forget(self._is_known)

    def _is_known(self, request_id: str) -> bool:
        return request_id in self._requests or self._tracker.get(request_id) is not None

    @_records
    def reset(self) -> None:
        """Record a reset of the cache."""
        self._request_reader.take_reset()  # vLLM has just reset its own cache
        self.log.observe(e.CacheReset(self.log.now()))
        self._request_reader.preemptions(self._requests)

    @_records
    def shutting_down(self) -> None:
        """Record the call of the wrapped connector's `shutdown`, which may take a long time."""
        self.log.note(payloads.Called("shutdown"))

    def shutdown(self) -> None:
        """Write the last events and close the log."""
        self.log.close()

    def _ends(self, kind: type[_Ends], output: KVConnectorOutput) -> _Ends:
        def ids(found: Iterable[str] | None) -> tuple[str, ...]:
            return tuple(sorted(map(self._ids.logged, found or ())))

        return kind(
            ids(output.finished_sending),
            ids(output.finished_recving),
            ids(getattr(output, "failed_recving", None)),
            tuple(sorted(output.invalid_block_ids or ())),
        )
