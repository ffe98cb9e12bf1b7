"""The connector class, of which vLLM creates one object in the scheduler's process and one in every worker.

The class only delegates, to `SchedulerSide` or to `WorkerSide`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvledger.adapters import vllm_plugin
from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.cache_events import chunk_blocks
from kvledger.adapters.vllm.chunk_keys import ChunkKeySource
from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.adapters.vllm.edge import Edge
from kvledger.adapters.vllm.event_log import open_event_log
from kvledger.adapters.vllm.key_secrecy import note_guessable_keys
from kvledger.adapters.vllm.messages import messages, refusals_are_said
from kvledger.adapters.vllm.metadata import Ends, StepJobs, WorkerReports, WorkerStart
from kvledger.adapters.vllm.metrics import ConnectorPrometheus
from kvledger.adapters.vllm.plan import plan
from kvledger.adapters.vllm.scheduler_side import SchedulerSide
from kvledger.adapters.vllm.stats import ConnectorStats
from kvledger.adapters.vllm.worker_side import WorkerSide
from kvledger.lifecycle import ConfigurationError, Hook
from kvledger.storage.kv import Sharing

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KVLedgerConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV in host memory, so that preempted requests can load it again, and logs every event and decision.

    Raises:
        ConfigurationError: at start, for a configuration that cannot work.
    """

    _cache_hit_source = CacheHitSource.HOST

    clock: ClassVar[Callable[[], int]] = time.monotonic_ns
    """Returns the time for all events, in nanoseconds. A simulation sets its own clock before it creates an engine."""

    @refusals_are_said()
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = ConnectorSettings.from_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        settings.refuse_few_segments(versions.least_num_logs(vllm_config))
        planned = plan(vllm_config, kv_cache_config, settings)
        settings, groups, configuration = planned.settings, planned.groups, planned.configuration
        parallel = vllm_config.parallel_config
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        if role is KVConnectorRole.WORKER:
            shares_pool = planned.shares_pool
            if parallel.rank == 0 or not shares_pool:  # the other ranks use what the first has allocated
                planned.refuse_beyond_memory()
            self._worker_side = WorkerSide(
                num_slots=configuration.num_slots,
                num_blocks=kv_cache_config.num_blocks,
                rank=parallel.rank,
                is_async=configuration.copies_async,
                declined=groups.declined,
                sharing=Sharing(parallel.rank, parallel.world_size, versions.from_first_rank) if shares_pool else None,
            )
            return
        versions.warn_of_unknown()
        core = settings.core()
        engine_id, model = self._kv_transfer_config.engine_id, vllm_config.model_config.model
        log = open_event_log(
            core,
            settings,
            configuration,
            engine_id=engine_id,
            model=model,
            num_device_blocks=versions.num_device_blocks(kv_cache_config),
        )
        note_guessable_keys(vllm_config, log.directory)
        keys = ChunkKeySource(
            chunk_size=configuration.chunk_size,
            hash_block_size=versions.hash_block_size(kv_cache_config),
            hash_tokens=versions.token_hasher(vllm_config),
            vllm_shares_blocks=bool(vllm_config.cache_config.enable_prefix_caching),
        )
        loads_must_not_fail = configuration.async_load_tokens != 0 and versions.needs_async_loads(vllm_config)
        if loads_must_not_fail:
            messages.warning(
                "with async scheduling and the policy 'recompute', vLLM may deliver a wrong token after a "
                "synchronous load has failed, and only then recomputes; set load_mode to 'async' or 'auto', or "
                "kv_load_failure_policy to 'fail' (under MultiConnector, only MultiConnector's own policy applies)"
            )
        speculates = versions.uses_speculation(vllm_config)
        self._scheduler_side = SchedulerSide(
            core,
            configuration,
            log,
            keys,
            speculates=speculates,
            zeroes_new_blocks=versions.zeroes_new_blocks(kv_cache_config),
            declined=groups.declined,
            clock=type(self).clock,
        )
        self._scheduler_side.journal.loads_must_not_fail = loads_must_not_fail
        self._scheduler_side.digested.share = settings.digest_share
        blocks = None if groups.declined else chunk_blocks(vllm_config, kv_cache_config, configuration)
        if blocks is not None:
            self._scheduler_side.publish(blocks)
        self._edge = Edge(self._scheduler_side.journal)
        messages.info(
            "recording",
            log=str(log.directory or "memory"),
            chunk_size=configuration.chunk_size,
            block_size=configuration.block_size,
            windows=configuration.windows,
            num_slots=configuration.num_slots,
        )

    @cached_property
    def scheduler_side(self) -> SchedulerSide:
        """The scheduler's half of the connector. It exists only in the scheduler's process.

        Raises:
            RuntimeError: this connector was created for a worker.
        """
        if self._scheduler_side is None:
            message = "this connector was built for a worker; the ledger is in the scheduler's process"
            raise RuntimeError(message)
        return self._scheduler_side

    @property
    def requires_kv_delivery(self) -> bool:
        """Always False. kvledger is a best-effort cache (`base.py`, 0.32): a dropped save only causes a later miss."""
        return False

    @classmethod
    @refusals_are_said()
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the setting `kv_cache_layout`. None lets vLLM choose the layout.

        The default is None, because `MultiConnector` refuses children that ask for different layouts.
        """
        transfer = vllm_config.kv_transfer_config
        settings = ConnectorSettings.from_extra_config({} if transfer is None else transfer.kv_connector_extra_config)
        return settings.kv_cache_layout

    # --- worker -------------------------------------------------------------------------------

    def _jobs(self, metadata: KVConnectorMetadata | None = None) -> StepJobs | None:
        metadata = self._connector_metadata if metadata is None else metadata
        return metadata if isinstance(metadata, StepJobs) and metadata else None

    def _enter(self, hook: Hook, metadata: KVConnectorMetadata | None = None) -> tuple[WorkerSide, StepJobs] | None:
        """Record that vLLM calls a hook; return the worker's half and the jobs of the step.

        Returns None if the step has no jobs, or if this is not a worker.
        """
        worker_side, jobs = self._worker_side, self._jobs(metadata)
        if worker_side is None:
            return None
        worker_side.enter(hook, jobs)
        return None if jobs is None else (worker_side, jobs)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find out where in these tensors each block lies, and allocate the host pool."""
        if self._worker_side is not None:
            self._worker_side.register_kv_caches(kv_caches, is_alone=versions.is_alone(self))

    def get_handshake_metadata(self) -> WorkerStart | None:
        """Describe this rank's host pool; vLLM passes the description to the scheduler side before the first request.

        Returns None if another connector, such as `MultiConnector`, contains this one.
        """
        if self._worker_side is None or not versions.is_alone(self):
            return None
        return self._worker_side.take_start()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any = None) -> bool:  # noqa: ARG003 -- vLLM's signature
        """Whether vLLM may put an engine with this connector to sleep. vLLM 0.33 calls this, 0.32 does not."""
        return True

    def unregister_kv_caches(self) -> None:
        """Finish copies in flight before vLLM frees the KV memory to sleep (vLLM 0.33). May be called twice."""
        if self._worker_side is not None:
            self._worker_side.enter(Hook.UNREGISTER_KV_CACHES, None)
            self._worker_side.sleep()

    def restore_kv_caches(self) -> None:
        """Allow copies again, because vLLM has woken up and its KV memory is back (vLLM 0.33)."""
        if self._worker_side is not None:
            self._worker_side.wake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Save the blocks that this step may overwrite."""
        entered = self._enter(Hook.HANDLE_PREEMPTIONS, kv_connector_metadata)
        if entered is not None:
            worker_side, jobs = entered
            worker_side.before_forward(jobs)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Run the loads that this step's forward needs, and begin asynchronous loads."""
        entered = self._enter(Hook.START_LOAD_KV)
        if entered is not None:
            worker_side, jobs = entered
            worker_side.load(jobs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because the loads of `start_load_kv` are ordered before the forward."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Do nothing, because `wait_for_save` saves whole blocks after the forward."""

    def wait_for_save(self) -> None:
        """Begin the saves of this step's jobs."""
        entered = self._enter(Hook.WAIT_FOR_SAVE)
        if entered is not None:
            worker_side, jobs = entered
            worker_side.save(jobs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return, for vLLM's scheduler, requests whose saves have ended and requests whose asynchronous loads failed.

        `update_connector_output` adds the requests whose asynchronous loads succeeded.
        """
        results = self._transfer_results()
        if self._worker_side is not None:
            found = (results.finished_sending, results.finished_recving, results.failed_recving)
            self._worker_side.gave(Ends(*map(frozenset, found)))
        return results

    def _transfer_results(self) -> KVConnectorTransferResults:
        jobs = self._jobs()
        if jobs is None:
            return KVConnectorTransferResults()
        return KVConnectorTransferResults(
            finished_sending=set(jobs.finished_saves),
            finished_recving=set(jobs.failed_loads),
            failed_recving=set(jobs.failed_loads),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that a load had to fill but did not."""
        if self._worker_side is None:
            return set()
        block_ids = self._worker_side.take_failed_block_ids()
        self._worker_side.gave_unfilled(block_ids)
        return block_ids

    def build_connector_worker_meta(self) -> WorkerReports | None:
        """Return this worker's reports for the scheduler side; None if it has none."""
        if self._worker_side is None:
            return None
        self._enter(Hook.OUTPUT)
        jobs = self._connector_metadata
        if isinstance(jobs, StepJobs) and jobs.is_idle:
            self._worker_side.give_way()
        return self._worker_side.take_reports()

    # --- scheduler ----------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Compare the workers' host pools with what the scheduler side expects. `metadata`: rank → its `WorkerStart`.

        Raises:
            ConfigurationError: a host pool differs from the expected one. vLLM's start fails with this error.
        """
        starts = [start for start in metadata.values() if isinstance(start, WorkerStart)]
        self._edge.is_alone = bool(starts)
        disagreement = self.scheduler_side.compare(starts)
        if disagreement:
            self.shutdown()
            raise ConfigurationError(disagreement)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Keep the scheduler's block manager, from whose prefix cache kvledger removes the blocks of failed loads."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        """Record an accepted request."""
        self.scheduler_side.on_new_request(request)
        self._edge.arrived(request.request_id)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond `num_computed_tokens` can be loaded, and whether the load is asynchronous.

        None instead of a number makes vLLM ask again later.
        """
        answer = self.scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)
        self._edge.answered(request.request_id, answer)
        return answer

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Record the allocated blocks, and issue the load of the `num_external_tokens` tokens that vLLM accepted."""
        self.scheduler_side.update_state_after_alloc(request, blocks, num_external_tokens)
        self._edge.allocated(request.request_id, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepJobs:
        """Record the step and return its jobs."""
        self._edge.step_begins(scheduler_output.finished_req_ids)
        jobs = self.scheduler_side.build_connector_meta(scheduler_output)
        self._edge.handed_out(jobs)
        return jobs

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Record the workers' reports."""
        arrived = self._edge.output_arrives(connector_output)
        self.scheduler_side.update_connector_output(connector_output)
        self._edge.output_leaves(arrived, connector_output)

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """Record that a request has finished.

        Returns whether vLLM must keep the request's blocks because a copy reads them. Also returns figures for the
        response, if the request asked for figures.
        """
        return self._request_finished(request, len(block_ids))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same as `request_finished`, for a model with several groups. All block tables have equal lengths."""
        return self._request_finished(request, max(map(len, block_ids), default=0))

    def _request_finished(self, request: Request, num_blocks: int) -> tuple[bool, dict[str, Any] | None]:
        is_held, figures = self.scheduler_side.request_finished(request, num_blocks)
        self._edge.finished(request.request_id, is_held)
        # `MultiConnector` raises if two of its children return the same key (`multi_connector.py`, 0.32), as two
        # connectors of this class would.
        return is_held, figures if self._edge.is_alone else None

    def has_pending_push_work(self) -> bool:
        """Whether the engine must run steps, even without requests, until a copy has ended."""
        if self._scheduler_side is None:
            return False
        answer = self._scheduler_side.has_pending_push_work()
        self._edge.pending_work(answer)
        return answer

    def has_pending_block_frees(self) -> bool:
        """Whether blocks of ended requests are about to be freed, so that vLLM need not preempt (`base.py`, 0.32)."""
        answer = self.scheduler_side.has_pending_block_frees()
        self._edge.pending_frees(answer)
        return answer

    def reset_cache(self) -> bool | None:
        """Forget all saved chunks, because they are out of date."""
        answer = self.scheduler_side.reset_cache()
        self._edge.reset(answer)
        return answer

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the KV events of the host pool; empty if vLLM's `kv_events_config` asks for none."""
        return () if self._scheduler_side is None else self._scheduler_side.take_events()

    def shutdown(self) -> None:
        """Close the log (scheduler) or free the host pool (worker). May be called twice."""
        if self._scheduler_side is not None:
            self._edge.record()
            self._scheduler_side.shutdown()
        if self._worker_side is not None:
            self._worker_side.close()

    # --- figures ------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the changes of the figures since the last call. Only the scheduler side has figures."""
        return None if self._scheduler_side is None else self._scheduler_side.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Rebuild the stats in the process that has received `data`."""
        return ConnectorStats(data or {})

    @classmethod
    @refusals_are_said()
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> KVConnectorPromMetrics:
        """Register the metrics `vllm:kvledger_*`."""
        return ConnectorPrometheus(*arguments, **named)


vllm_plugin.register()
