"""Builds vLLM's own objects, which the hooks receive, from plain values.

Checked against vLLM 0.32.0, like `adapters/vllm/versions.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvledger.adapters.recorded.payloads import WorkersReported
from kvledger.adapters.vllm.metadata import JobReport, StepReport, WorkerReports
from kvledger.lifecycle import events as e


@attrs.frozen
class ScheduledRequest:
    """One request's part of a step."""

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_block_ids: tuple[int, ...] = ()
    is_new: bool = False
    """Whether the step lists this request among the new requests. Model runner V2 lists resumed requests there, too."""
    is_resumed: bool = False
    """Whether the step lists this request among the cached requests, with a table that replaces its old block table.

    Model runner V1 lists resumed requests in this way.
    """


@attrs.frozen
class Step:
    """One step, as plain values: the content of the `SchedulerOutput` that `build_connector_meta` gets."""

    scheduled: Sequence[ScheduledRequest] = ()
    preempted_request_ids: frozenset[str] = frozenset()
    block_tables: dict[str, Sequence[int]] = attrs.field(factory=dict)
    """Request id → the scheduler's block table of this request, for each scheduled request."""
    zeroed_block_ids: tuple[int, ...] = ()
    ended_request_ids: frozenset[str] = frozenset()
    """Ids of the requests that have finished or were aborted since the previous step."""
    admitted_request_ids: tuple[str, ...] = ()
    """Ids of the requests that have got blocks since the previous step, in the order in which they got the blocks.

    vLLM lists the tokens of these requests after the tokens of running requests.
    """


def tables(block_ids: Sequence[int], num_groups: int) -> tuple[list[int], ...]:
    """Split a flat block table, in which the blocks of the groups alternate, into one table per group."""
    return tuple(list(block_ids[group::num_groups]) for group in range(num_groups))


def kv_cache_blocks(block_ids: Sequence[int], num_groups: int) -> KVCacheBlocks:
    """Return the blocks in the form in which the scheduler passes allocated blocks to a connector."""
    return KVCacheBlocks(
        tuple(
            [KVCacheBlock(block_id, is_null=not block_id) for block_id in table]
            for table in tables(block_ids, num_groups)
        )
    )


def job_reports(report: e.TransferReported) -> list[JobReport]:
    """Return one `JobReport` for each rank that the event names."""
    ranks = sorted((*report.ranks_done, *report.ranks_failed))
    return [
        JobReport(
            report.job_ids,
            rank,
            done=rank in report.ranks_done,
            num_bytes=sum(report.num_bytes) if rank == ranks[0] else 0,
            duration_ns=report.duration_ns,
            error=report.error if rank in report.ranks_failed or not report.ranks_failed else "",
            is_repeated=report.is_repeated,
            moments=report.moments,
        )
        for rank in ranks
    ]


def step_reports(steps: Iterable[e.StepReported]) -> tuple[StepReport, ...]:
    """Return one report for each step and each rank that sent the output of this step."""
    return tuple(StepReport(step.delivered, rank, step.under_way) for step in steps for rank in step.ranks)


def connector_output(
    reports: tuple[JobReport, ...],
    load_errors: set[int],
    finished_sending: set[str],
    finished_recving: set[str],
    steps: tuple[StepReport, ...] = (),
) -> KVConnectorOutput:
    """Return the output of a step that the workers send to kvledger's own connector."""
    return KVConnectorOutput(
        finished_sending=finished_sending or None,
        finished_recving=finished_recving or None,
        invalid_block_ids=load_errors,
        kv_connector_worker_meta=WorkerReports(reports, steps=steps) if reports or steps else None,
    )


def workers_output(reported: WorkersReported, completed: Mapping[str, int], connector: object) -> KVConnectorOutput:
    """Return the output of a step that the workers send to a wrapped connector.

    Args:
        reported: the requests and blocks that the workers reported.
        completed: name of a copy, as the recorder's decoders name copies → number of workers that completed the copy.
        connector: the connector that gets the output. Each of its children gets only its own copies.
    """
    return KVConnectorOutput(
        finished_sending=set(reported.finished_sending) or None,
        finished_recving=set(reported.finished_recving) or None,
        failed_recving=set(reported.failed_recving),
        invalid_block_ids=set(reported.invalid_block_ids),
        kv_connector_worker_meta=_worker_metadata(completed, getattr(connector, "_connectors", ())),
    )


def _worker_metadata(completed: Mapping[str, int], children: Sequence[object]) -> KVConnectorWorkerMetadata | None:
    """Return the workers' metadata about completed copies. `completed` has the names that the recorder uses.

    Return None if `completed` is empty. Some connectors get no such metadata: they learn only from `finished_sending`
    and `finished_recving` that a copy has ended.
    """
    if not completed:
        return None
    if children:
        of_children: list[dict[str, int]] = [{} for _ in children]
        for job, count in completed.items():
            place, _, name = job.partition("/")
            of_children[int(place)][name] = count
        return MultiKVConnectorWorkerMetadata(
            tuple(
                _worker_metadata(of_child, getattr(child, "_connectors", ()))
                for of_child, child in zip(of_children, children, strict=True)
            )
        )
    return OffloadingWorkerMetadata({int(job): count for job, count in completed.items()})


def scheduler_output(step: Step, requests: Mapping[str, Request], num_groups: int) -> SchedulerOutput:
    """Return the step as vLLM's `SchedulerOutput`."""
    new = [part for part in step.scheduled if part.is_new]
    cached = [part for part in step.scheduled if not part.is_new]
    places = {request_id: place for place, request_id in enumerate(step.admitted_request_ids)}
    in_order = sorted(step.scheduled, key=lambda part: places.get(part.request_id, -1))
    num_scheduled_tokens = {part.request_id: part.num_scheduled_tokens for part in in_order}
    output = SchedulerOutput(
        scheduled_new_reqs=[_new_request(part, requests, step, num_groups) for part in new],
        scheduled_cached_reqs=_cached_requests(cached, requests, step, num_groups),
        num_scheduled_tokens=num_scheduled_tokens,
        total_num_scheduled_tokens=sum(num_scheduled_tokens.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=set(step.ended_request_ids),
        free_encoder_mm_hashes=[],
        preempted_req_ids=set(step.preempted_request_ids),
        new_block_ids_to_zero=list(step.zeroed_block_ids) or None,
    )
    output.kv_connector_block_state = KVConnectorBlockState(
        req_ids=set(step.block_tables),
        resolve_block_ids=lambda request_id: tables(step.block_tables[request_id], num_groups),
        boundary_state_offloads={},
    )
    return output


def _new_request(
    part: ScheduledRequest, requests: Mapping[str, Request], step: Step, num_groups: int
) -> NewRequestData:
    request = requests[part.request_id]
    return NewRequestData(
        req_id=part.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=[],
        sampling_params=request.sampling_params,
        pooling_params=None,
        block_ids=tables(step.block_tables[part.request_id], num_groups),
        num_computed_tokens=part.num_computed_tokens,
        lora_request=None,
    )


def _cached_requests(
    parts: Iterable[ScheduledRequest], requests: Mapping[str, Request], step: Step, num_groups: int
) -> CachedRequestData:
    parts = list(parts)
    blocks = [step.block_tables[part.request_id] if part.is_resumed else part.new_block_ids for part in parts]
    return CachedRequestData(
        req_ids=[part.request_id for part in parts],
        resumed_req_ids={part.request_id for part in parts if part.is_resumed},
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[tables(block_ids, num_groups) if block_ids else None for block_ids in blocks],
        num_computed_tokens=[part.num_computed_tokens for part in parts],
        num_output_tokens=[
            requests[part.request_id].num_output_tokens if part.request_id in requests else 0 for part in parts
        ],
    )
