"""Builds vLLM's own objects from plain values, as the hooks receive them.

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
    """Whether the step lists it among the new requests, as model runner V2 does with resumed ones, too."""
    is_resumed: bool = False
    """Whether it is a cached request whose table replaces the old one (model runner V1)."""


@attrs.frozen
class Step:
    """The step that `build_connector_meta` gets."""

    scheduled: Sequence[ScheduledRequest] = ()
    preempted_request_ids: frozenset[str] = frozenset()
    block_tables: dict[str, Sequence[int]] = attrs.field(factory=dict)
    """Request id → the scheduler's own table, for each scheduled request."""
    zeroed_block_ids: tuple[int, ...] = ()
    ended_request_ids: frozenset[str] = frozenset()
    """Requests that ended since the step before."""
    admitted_request_ids: tuple[str, ...] = ()
    """In the order in which they got blocks. vLLM counts their tokens after those of running requests."""


def tables(block_ids: Sequence[int], num_groups: int) -> tuple[list[int], ...]:
    """Split a flat table, in which the groups alternate, into the tables of the groups."""
    return tuple(list(block_ids[group::num_groups]) for group in range(num_groups))


def kv_cache_blocks(block_ids: Sequence[int], num_groups: int) -> KVCacheBlocks:
    """Return the blocks as the scheduler passes them on when it allocates."""
    return KVCacheBlocks(
        tuple(
            [KVCacheBlock(block_id, is_null=not block_id) for block_id in table]
            for table in tables(block_ids, num_groups)
        )
    )


def job_reports(report: e.TransferReported) -> list[JobReport]:
    """Return each rank's part of a report."""
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
    """Return each rank's report about the steps whose output it sends."""
    return tuple(StepReport(step.delivered, rank, step.under_way) for step in steps for rank in step.ranks)


def connector_output(
    reports: tuple[JobReport, ...],
    load_errors: set[int],
    finished_sending: set[str],
    finished_recving: set[str],
    steps: tuple[StepReport, ...] = (),
) -> KVConnectorOutput:
    """Return the workers' output of a step."""
    return KVConnectorOutput(
        finished_sending=finished_sending or None,
        finished_recving=finished_recving or None,
        invalid_block_ids=load_errors,
        kv_connector_worker_meta=WorkerReports(reports, steps=steps) if reports or steps else None,
    )


def workers_output(reported: WorkersReported, completed: Mapping[str, int], connector: object) -> KVConnectorOutput:
    """Return the workers' output of a step, for a wrapped connector.

    Args:
        reported: requests and blocks.
        completed: copy, as the recorder's decoders name it → number of workers that completed it.
        connector: the receiver; its children get their own copies.
    """
    return KVConnectorOutput(
        finished_sending=set(reported.finished_sending) or None,
        finished_recving=set(reported.finished_recving) or None,
        failed_recving=set(reported.failed_recving),
        invalid_block_ids=set(reported.invalid_block_ids),
        kv_connector_worker_meta=_worker_metadata(completed, getattr(connector, "_connectors", ())),
    )


def _worker_metadata(completed: Mapping[str, int], children: Sequence[object]) -> KVConnectorWorkerMetadata | None:
    """Return workers' metadata about copies that the recorder's decoders named.

    A connector that gets the ends of its copies only by `finished_sending` and `finished_recving` needs none.
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
    """Return one step as the scheduler describes it."""
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
