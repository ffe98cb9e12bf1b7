"""The classes that vLLM creates instead of the recorded connector.

The classes forward every call and return every answer unchanged. The scheduler's side logs each call before the call is
forwarded, and each answer before vLLM gets it. Each worker writes a log of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvledger.adapters import vllm_plugin
from kvledger.adapters.recorded import payloads
from kvledger.adapters.recorded.extension import Recorder
from kvledger.adapters.recorder.description import described
from kvledger.adapters.recorder.ends import Keepers, WorkerEnds
from kvledger.adapters.recorder.forwarding import forwards_everything
from kvledger.adapters.recorder.log import RecorderLog
from kvledger.adapters.recorder.page_digests import AskedPages, RecordedPages, taken_out
from kvledger.adapters.recorder.page_digests import enveloped as enveloped_reports
from kvledger.adapters.recorder.page_digests import opened as opened_pages
from kvledger.adapters.recorder.recording import Recording
from kvledger.adapters.recorder.settings import RecorderSettings, accepted_recorder
from kvledger.adapters.recorder.stats import RecordedPromMetrics, RecordedStats, enveloped, opened
from kvledger.adapters.recorder.worker_recording import WorkerRecording
from kvledger.adapters.recorder.wrapped import (
    transfer_of,
    wrapped_class,
    wrapped_config,
)
from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.chunk_keys import ChunkKeySource
from kvledger.adapters.vllm.event_log import WorkerOfLog, open_event_log
from kvledger.adapters.vllm.groups import Groups, describe_groups
from kvledger.adapters.vllm.key_secrecy import note_guessable_keys
from kvledger.adapters.vllm.messages import refusals_are_said
from kvledger.lifecycle import Core, LedgerConfiguration, raise_if_unstoppable

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_NEVER = 1 << 40
"""Value for kvledger's limits on deferred lookups, failed loads, silent steps and milliseconds, so large that no
recorded connector reaches it."""


def _configuration(kv_cache_config: KVCacheConfig, groups: Groups, *, speculates: bool) -> LedgerConfiguration:
    """Return the configuration for the logs of the scheduler and of the workers."""
    block_size = versions.block_size(kv_cache_config)
    return LedgerConfiguration(
        block_size=block_size,
        chunk_size=block_size,  # chunk keys show which requests share tokens
        num_slots=max(1, len(groups.windows)),  # the core saves nothing
        windows=(0,) if groups.declined else groups.windows,
        async_load_tokens=0,
        async_saves=True,
        max_deferred_lookups=_NEVER,
        max_failed_loads=_NEVER,
        settles_in_flight=not speculates,
        max_silent_steps=_NEVER,
        max_silent_ms=_NEVER,
    )


@forwards_everything
class KVLedgerRecorder(KVConnectorBase_V1):
    """Records any connector. The model must have one group of layers, or vLLM's hybrid memory must be switched off.

    Raises:
        ConfigurationError: at start, if the configuration names no connector, or a connector that cannot be wrapped.
    """

    clock: ClassVar[Callable[[], int]] = time.monotonic_ns
    """Clock of all event times, in nanoseconds. A simulation sets another clock before it creates an engine."""

    @refusals_are_said()
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings, wrapped = accepted_recorder(self._kv_transfer_config, for_hybrid_memory=isinstance(self, SupportsHMA))
        settings.refuse_few_segments(versions.least_num_logs(vllm_config, workers_log=True))
        self.wrapped: KVConnectorBase_V1 = wrapped(wrapped_config(vllm_config), role, kv_cache_config)
        self.recording: Recording | None = None
        """None on workers."""
        self.worker_recording: WorkerRecording | None = None
        """None in the scheduler's process. Also None without `log_dir`: nobody could read a worker's log in memory."""
        self.digests: RecordedPages | None = None
        """None in the scheduler's process, or if the configuration asks for no digests."""
        self.ends: WorkerEnds | None = None
        """None in the scheduler's process."""
        self.keepers: Keepers | None = None
        """None on workers."""
        groups = describe_groups(vllm_config, kv_cache_config)
        configuration = _configuration(kv_cache_config, groups, speculates=versions.uses_speculation(vllm_config))
        if role is KVConnectorRole.SCHEDULER:
            self.recording = self._begin(vllm_config, kv_cache_config, settings, groups, configuration)
            self.keepers = Keepers(self.wrapped)
            return
        self.ends = WorkerEnds(self.wrapped, vllm_config.parallel_config.rank)
        if settings.digest_share and not groups.declined:
            self.digests = RecordedPages(vllm_config.parallel_config.rank, kv_cache_config.num_blocks)
        if settings.log_dir is not None:
            self.worker_recording = self._begin_worker(vllm_config, settings, configuration)

    def _open_log(self, settings: RecorderSettings, configuration: LedgerConfiguration, **whose: Any) -> RecorderLog:
        core = Core.standard().extended(Recorder())
        opened_log = open_event_log(core, settings, configuration, connector=type(self.wrapped).__name__, **whose)
        return RecorderLog(core, configuration, opened_log, type(self).clock)

    def _begin_worker(
        self, vllm_config: VllmConfig, settings: RecorderSettings, configuration: LedgerConfiguration
    ) -> WorkerRecording:
        engine_id, connector = transfer_of(vllm_config).engine_id or "", type(self.wrapped).__name__
        rank = vllm_config.parallel_config.rank
        log = self._open_log(settings, configuration, worker=WorkerOfLog(engine_id, rank))
        return WorkerRecording(log, payloads.WorkerStarted(engine_id, rank, connector))

    def _begin(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        settings: RecorderSettings,
        groups: Groups,
        configuration: LedgerConfiguration,
    ) -> Recording:
        versions.warn_of_unknown()
        log = self._open_log(
            settings,
            configuration,
            engine_id=transfer_of(vllm_config).engine_id,
            model=vllm_config.model_config.model,
            num_device_blocks=versions.num_device_blocks(kv_cache_config),
        )
        note_guessable_keys(vllm_config, log.log.directory)
        keys = ChunkKeySource(
            chunk_size=configuration.chunk_size,
            hash_block_size=versions.hash_block_size(kv_cache_config),
            hash_tokens=versions.token_hasher(vllm_config),
        )
        recording = Recording(
            log,
            keys,
            speculates=not configuration.settles_in_flight,
            num_workers=vllm_config.parallel_config.world_size,
            digest_share=settings.digest_share,
        )
        recording.describe(
            lambda: described(
                type(self).__name__, vllm_config, kv_cache_config, transfer_of(wrapped_config(vllm_config))
            )
        )
        if groups.declined:
            recording.decline("; ".join(groups.declined))
        log.messages.info("recording", connector=type(self.wrapped).__name__)
        return recording

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "wrapped":
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def _timed(self, hook: str, request: Request | None, *arguments: object) -> tuple[Any, int]:
        """Call a hook of the wrapped connector; return the hook's answer and duration in nanoseconds."""
        clock = type(self).clock
        began = clock()
        try:
            return getattr(self.wrapped, hook)(*arguments), clock() - began
        except BaseException as error:
            raise_if_unstoppable(error)
            if self.recording is not None:
                self.recording.raised(hook, request, error)
            raise

    # --- both sides ------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Bind a step's metadata to the wrapped connector and to the recorder. vLLM reads it from the recorder."""
        super().bind_connector_metadata(connector_metadata)
        if self.digests is not None:
            self.digests.step_begins(connector_metadata)
        metadata = opened_pages(connector_metadata)
        if self.worker_recording is not None:
            self.worker_recording.step_begins(metadata)
        self._on_worker("bind_connector_metadata", metadata)

    def clear_connector_metadata(self) -> None:
        """Clear the step's metadata in the recorder and in the wrapped connector. This ends the step."""
        super().clear_connector_metadata()
        self.wrapped.clear_connector_metadata()
        if self.worker_recording is not None:
            self.worker_recording.step_ends()

    def get_kv_connector_stats(self) -> RecordedStats | None:
        """Return the wrapped connector's figures in an envelope with the name of the connector's class."""
        return enveloped(self.wrapped, self.wrapped.get_kv_connector_stats())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Return an envelope with figures that the wrapped connector's class builds from `data`. None: no figures."""
        return opened(data)

    @classmethod
    @refusals_are_said()
    def build_prom_metrics(cls, vllm_config: VllmConfig, *arguments: Any, **named: Any) -> Any:
        """Return the wrapped connector's metrics, adapted to figures in an envelope; None if there are no metrics."""
        config = wrapped_config(vllm_config)
        metrics = wrapped_class(transfer_of(config)).build_prom_metrics(config, *arguments, **named)
        return None if metrics is None else RecordedPromMetrics(metrics)

    def shutdown(self) -> None:
        """Shut down the wrapped connector, record any exception that its shutdown raises, and close the log."""
        side = self.recording or self.worker_recording
        if self.recording is not None:
            self.recording.shutting_down()
        try:
            if self.worker_recording is None:
                self._timed("shutdown", None)
            else:
                self.worker_recording.call("shutdown", self.wrapped.shutdown)
        finally:
            if side is not None:
                side.shutdown()

    # --- worker ------------------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> Any:
        """Forward the wrapped connector's own metadata, without the recorder's envelope."""
        return self._on_worker("handle_preemptions", opened_pages(kv_connector_metadata))

    def _on_worker(self, hook: str, *arguments: object) -> Any:
        forward = getattr(self.wrapped, hook)
        return (
            forward(*arguments)
            if self.worker_recording is None
            else self.worker_recording.call(hook, forward, arguments)
        )

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> Any:
        """Note where the KV tensors are, because digests are computed from them. Forward the call."""
        if self.digests is not None:
            self.digests.register(kv_caches)
        return self._on_worker("register_kv_caches", kv_caches)

    def wait_for_save(self) -> Any:
        """Compute the digests of the pages that the step copies, then forward the call."""
        if self.digests is not None:
            self.digests.step_has_computed()
        return self._on_worker("wait_for_save")

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Forward the call. Compute the digests of pages whose load has succeeded, and note the reported ends."""
        results = self._on_worker("get_transfer_results", finished_req_ids)
        if self.digests is not None:
            self.digests.received(results.finished_recving or (), results.failed_recving or ())
        if self.ends is not None:
            self.ends.reported(results)
        return results

    def build_connector_worker_meta(self) -> Any:
        """Return the wrapped connector's metadata in an envelope, with the digests and reported ends."""
        metadata = self._on_worker("build_connector_worker_meta")
        if self.digests is not None:
            self.digests.reported(metadata)
        found = () if self.digests is None else self.digests.taken()
        return enveloped_reports(metadata, found, () if self.ends is None else self.ends.take())

    # --- scheduler ---------------------------------------------------------------------------------

    @property
    def _recorded(self) -> Recording:
        if self.recording is None:
            message = "this connector was created for a worker; only the scheduler's process can record this call"
            raise RuntimeError(message)
        return self.recording

    def _called(self, hook: str, request: Request | None, *arguments: object) -> Any:
        """Call a hook of the wrapped connector, record the duration, and return the hook's answer."""
        answer, duration_ns = self._timed(hook, request, *arguments)
        self._recorded.returned(hook, duration_ns)
        return answer

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Keep the scheduler's block manager, and forward the call."""
        self._recorded.bind(kv_cache_manager)
        self.wrapped.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        """Record an arrival."""
        self._recorded.on_new_request(request)
        self._called("on_new_request", request, request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Record a lookup and its answer."""
        self._recorded.lookup(request, num_computed_tokens)
        answer: tuple[int | None, bool]
        answer, duration_ns = self._timed("get_num_new_matched_tokens", request, request, num_computed_tokens)
        self._recorded.lookup_returned(request, num_computed_tokens, answer, duration_ns)
        return answer

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Record the blocks that the request got, and which child of a `MultiConnector` loads into these blocks."""
        self._recorded.allocated(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._recorded.load_chosen(request, self.wrapped)
        self._called("update_state_after_alloc", request, request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Record a step and its copies. Return the metadata, in an envelope if workers must digest pages."""
        self._recorded.step(scheduler_output)
        metadata: KVConnectorMetadata
        metadata, duration_ns = self._timed("build_connector_meta", None, scheduler_output)
        asked = self._recorded.built(metadata, duration_ns)
        returned = AskedPages(metadata, asked) if asked else metadata
        self._recorded.returned_for_step(scheduler_output, returned)
        return returned

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Record the workers' reports, forward the call, then record the reports that vLLM will get."""
        digests, ends = taken_out(connector_output)
        self._recorded.workers_report(connector_output, digests, ends)
        _, duration_ns = self._timed("update_connector_output", None, connector_output)
        self._recorded.reported_to_vllm(connector_output, duration_ns)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Record that a request has finished.

        If the wrapped connector supports several groups of layers, its `request_finished_all_groups` is called. vLLM
        would do the same.
        """
        if isinstance(self.wrapped, SupportsHMA):
            return self._end(request, "request_finished_all_groups", (block_ids,))
        return self._end(request, "request_finished", block_ids)

    def _end(self, request: Request, hook: str, block_ids: object) -> tuple[bool, dict[str, Any] | None]:
        self._recorded.finished(request)
        answer: tuple[bool, dict[str, Any] | None]
        answer, duration_ns = self._timed(hook, request, request, block_ids)
        kept_by = () if self.keepers is None else self.keepers.take()
        self._recorded.end_returned(request, answer, duration_ns, kept_by)
        return answer

    def reset_cache(self) -> bool | None:
        """Record a reset of the cache."""
        self._recorded.reset()
        answer: bool | None = self._called("reset_cache", None)
        return answer


class KVLedgerRecorderHMA(KVLedgerRecorder, SupportsHMA):
    """Records a connector that supports vLLM's hybrid memory. The model may then have several groups of layers."""

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Record that a request has finished."""
        return self._end(request, "request_finished_all_groups", block_ids)


vllm_plugin.register()
