"""The scheduler side of a real connector without an engine: one method per hook, with plain values.

This module must not depend on how a recording is run again (`hooks.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from kvledger.adapters.core import composed_core
from kvledger.adapters.lab.repro import vllm_objects
from kvledger.adapters.lab.repro.outcome import RECENT_BYTES, Written
from kvledger.adapters.lab.repro.recording import NotRerunnable
from kvledger.adapters.lab.repro.vllm_objects import Step, tables
from kvledger.adapters.lab.simulation.engine import vllm_config
from kvledger.adapters.lab.simulation.tiny_model import MAX_MODEL_LEN
from kvledger.adapters.recorded.extension import Recorder
from kvledger.adapters.recorded.payloads import RecordingStarted, ReportedBy, WorkersReported
from kvledger.adapters.recorder.connector import KVLedgerRecorder, KVLedgerRecorderHMA
from kvledger.adapters.recorder.page_digests import enveloped
from kvledger.adapters.recorder.wrapped import wrapped_class
from kvledger.adapters.tools.logs.visible import visible
from kvledger.adapters.vllm import KVLedgerConnector, versions
from kvledger.adapters.vllm.chunk_keys import ChunkKeySource
from kvledger.adapters.vllm.edge import Edge
from kvledger.adapters.vllm.event_log import OpenedLog
from kvledger.adapters.vllm.metadata import JobReport, StepJobs
from kvledger.adapters.vllm.scheduler_side import SchedulerSide
from kvledger.adapters.vllm.transfer import accepted
from kvledger.adapters.vllm.without_weights import in_words
from kvledger.lifecycle import Core, LedgerConfiguration, SequencedEvent, log_header, raise_if_unstoppable
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import EventDecoder
from kvledger.storage.events import MemoryEventStore

_SALT = "salt"
"""Salt of every salted request: a log has no salts. Requests with different salts have different chunk keys in the log,
so their tokens differ here."""


class SchedulerHalf:
    """The scheduler side of a connector, with its requests and its log."""

    def __init__(self, configuration: LedgerConfiguration, core: Core) -> None:
        self.configuration = configuration
        self.core = core
        """The core for reading the log."""
        self.now_ns = 0
        """The connector's time, in nanoseconds."""
        self.requests: dict[str, Request] = {}
        """Request id → request. Before you call a hook, set in the request what the connector will read."""
        self._cache = CacheConfig(block_size=configuration.block_size)
        hash_function = get_hash_fn_by_name(self._cache.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._block_hasher = get_request_block_hasher(configuration.block_size, hash_function)
        self._is_closed = False
        self.connector: Any
        self._written: Written

    def _commit(self) -> None:
        """Write pending events as a frame."""
        raise NotImplementedError

    def take_events(self) -> list[SequencedEvent]:
        """Write the pending events, and return the events that the connector wrote since the previous call."""
        if not self._is_closed:
            self._commit()
        return self._written.take()

    # --- hooks ----------------------------------------------------------------------------------

    def on_new_request(
        self, request_id: str, token_ids: Sequence[int], *, skips_prefix_cache: bool = False, is_salted: bool = False
    ) -> None:
        """Create a request with the prompt `token_ids`, and call the connector's hook with the request."""
        self.accept(request_id, token_ids, skips_prefix_cache=skips_prefix_cache, is_salted=is_salted)
        self.connector.on_new_request(self.requests[request_id])

    def get_num_new_matched_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Look up how many tokens can be loaded."""
        answer: tuple[int | None, bool] = self.connector.get_num_new_matched_tokens(
            self.requests[request_id], num_computed_tokens
        )
        return answer

    def update_state_after_alloc(self, request_id: str, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Give blocks to a request. `block_ids` is its whole block table, in which the groups' blocks alternate."""
        blocks = vllm_objects.kv_cache_blocks(block_ids, len(self.configuration.windows))
        self.connector.update_state_after_alloc(self.requests[request_id], blocks, num_external_tokens)

    def build_connector_meta(self, step: Step) -> StepJobs:
        """Let the connector build the metadata of one step, and return the jobs in it."""
        output = vllm_objects.scheduler_output(step, self.requests, len(self.configuration.windows))
        jobs: StepJobs = self.connector.build_connector_meta(output)
        return jobs

    def request_finished(self, request_id: str, status: str, block_ids: Sequence[int]) -> None:
        """End a request."""
        request = self.requests[request_id]
        request.status = RequestStatus[status]
        groups = tables(block_ids, len(self.configuration.windows))
        if hasattr(self.connector, "request_finished_all_groups"):
            self.connector.request_finished_all_groups(request, groups)
        else:
            self.connector.request_finished(request, groups[0])

    def shutdown(self) -> None:
        """Shut down the connector."""
        self.connector.shutdown()
        self._is_closed = True

    # --- the state of requests --------------------------------------------------------------------

    def accept(
        self, request_id: str, token_ids: Sequence[int], *, skips_prefix_cache: bool = False, is_salted: bool = False
    ) -> None:
        """Create a request without calling the connector."""
        self.requests[request_id] = Request(
            request_id=request_id,
            prompt_token_ids=list(token_ids),
            sampling_params=SamplingParams(max_tokens=1, temperature=0, skip_reading_prefix_cache=skips_prefix_cache),
            pooling_params=None,
            cache_salt=_SALT if is_salted else None,
            arrival_time=0.0,
            block_hasher=self._block_hasher,
        )

    def set_tokens(self, request_id: str, first: int, token_ids: Sequence[int]) -> None:
        """Replace a request's tokens from position `first` on, and hash the changed blocks again, as vLLM does."""
        request = self.requests[request_id]
        outputs: list[int] = request._output_token_ids  # noqa: SLF001 -- as vLLM's scheduler cuts a session
        tokens: list[int] = request._all_token_ids  # noqa: SLF001
        del outputs[max(0, len(outputs) - (len(tokens) - first)) :]
        del tokens[first:]
        del request.block_hashes[first // self.configuration.block_size :]
        request.append_output_token_ids(list(token_ids))


class _Connector(KVLedgerConnector):
    """kvledger's connector around a given scheduler side, for any configuration that a log may have."""

    def __init__(self, scheduler_side: SchedulerSide) -> None:
        self._scheduler_side, self._worker_side = scheduler_side, None
        self._edge = Edge(scheduler_side.journal)


class ConnectorUnderTest(SchedulerHalf):
    """A `KVLedgerConnector` without an engine.

    Args:
        configuration: the engine's configuration, as in the header of a log.
        speculates: whether the engine decodes speculatively.
        zeroes_new_blocks: whether the workers zero new blocks before the forward pass.
        handlers: your own state handlers, as "module:Class".
    """

    def __init__(
        self,
        configuration: LedgerConfiguration,
        *,
        speculates: bool = False,
        zeroes_new_blocks: bool = False,
        handlers: Sequence[str] = (),
    ) -> None:
        super().__init__(configuration, composed_core(handlers))
        self.is_log_written = True
        """Whether the connector takes its log for written. The log is in memory and always complete."""
        config = VllmConfig(cache_config=self._cache, device_config=DeviceConfig("cpu"))
        keys = ChunkKeySource(
            chunk_size=configuration.chunk_size,
            hash_block_size=configuration.block_size,
            hash_tokens=versions.token_hasher(config),
        )
        store = MemoryEventStore(log_header(self.core, configuration), max_bytes=RECENT_BYTES)
        self._written = Written(store, EventDecoder(self.core, store.header))
        scheduler_side = SchedulerSide(
            self.core,
            configuration,
            OpenedLog(store, None),
            keys,
            speculates=speculates,
            zeroes_new_blocks=zeroes_new_blocks,
            clock=lambda: self.now_ns,
        )
        scheduler_side.journal.is_behind = lambda: not self.is_log_written
        self.connector = _Connector(scheduler_side)

    def _commit(self) -> None:
        self.connector.scheduler_side.journal.commit()

    def note_reset(self) -> None:
        """Let the connector know that vLLM's prefix cache was reset. The next hook call notices the reset."""
        self.connector.scheduler_side.request_reader.note_reset()

    def update_connector_output(
        self,
        reports: Iterable[e.TransferReported] = (),
        load_errors: Iterable[int] = (),
        reported: Iterable[int] = (),
        steps: Iterable[e.StepReported] = (),
    ) -> None:
        """Pass the output of the workers to the connector.

        Args:
            reports: reports about copies.
            load_errors: ids of the blocks that loads did not fill.
            reported: ordinals of the requests that the workers name in `finished_sending` or `finished_recving`.
            steps: the steps whose output the workers send.
        """
        owed = self.connector.scheduler_side.journal.owed.state
        finished = {owed.ends[ordinal].request_id for ordinal in reported if ordinal in owed.to_report}
        received = finished & self.requests.keys()  # the load of these failed; the others have ended
        for request_id in received:
            self.requests[request_id].status = RequestStatus.WAITING_FOR_REMOTE_KVS
        of_ranks: list[JobReport] = [of_rank for report in reports for of_rank in vllm_objects.job_reports(report)]
        self.connector.update_connector_output(
            vllm_objects.connector_output(
                tuple(of_ranks), set(load_errors), finished - received, received, vllm_objects.step_reports(steps)
            )
        )
        for request_id in received:
            self.requests[request_id].status = RequestStatus.WAITING


_RECORDERS = {of.__name__: of for of in (KVLedgerRecorder, KVLedgerRecorderHMA)}


class WrappedUnderTest(SchedulerHalf):
    """A recorder around a connector, as a log describes them, without an engine.

    Args:
        configuration: the engine's configuration, as in the header of the log.
        wrapped: facts about the recorder and its engine, from the log.
        transfer: the connector's configuration. It decides which code is imported. Therefore a configuration from a log
            may have only the parts that `chosen.py` allows.
        handlers: your own state handlers, as "module:Class", if the connector is kvledger's.
        speculates: whether the engine decodes speculatively.

    Raises:
        NotRerunnable: the connector cannot be created here.
    """

    def __init__(
        self,
        configuration: LedgerConfiguration,
        wrapped: RecordingStarted,
        transfer: Mapping[str, Any],
        handlers: Sequence[str] = (),
        *,
        speculates: bool,
    ) -> None:
        super().__init__(configuration, Core.standard().extended(Recorder()))
        self._num_ranks = wrapped.num_ranks
        recorder = _RECORDERS.get(wrapped.recorder)
        if recorder is None:
            raise NotRerunnable(
                f"{visible(wrapped.recorder)} is not a recorder of this kvledger; use the version that wrote the log"
            )
        try:
            transfer = _kept_in_memory(transfer, handlers)
            config = vllm_config(
                num_blocks=wrapped.num_blocks,
                block_size=configuration.block_size,
                max_num_seqs=wrapped.max_num_seqs,
                max_num_batched_tokens=wrapped.max_num_batched_tokens,
                max_model_len=min(wrapped.max_model_len, MAX_MODEL_LEN),
                enable_prefix_caching=wrapped.enable_prefix_caching,
                async_scheduling=False,
                kv_transfer={
                    "kv_connector": wrapped.recorder,
                    "kv_connector_module_path": "kvledger.adapters.recorder",
                    "kv_role": transfer["kv_role"],
                    "kv_connector_extra_config": {
                        "log_dir": None,
                        "memory_log_bytes": RECENT_BYTES,
                        "connector": transfer,
                    },
                },
            )
            # vLLM would refuse these without devices and a second model.
            config.scheduler_config.async_scheduling = wrapped.async_scheduling
            config.parallel_config.world_size = wrapped.num_ranks
            if speculates:
                speculation: Any = object()
                config.speculative_config = speculation
            with_clock = type(wrapped.recorder, (recorder,), {"clock": staticmethod(lambda: self.now_ns)})
            cache = _cache_config(configuration, wrapped)
            self.connector = with_clock(config, KVConnectorRole.SCHEDULER, cache)
        except BaseException as error:
            raise_if_unstoppable(error)
            name, reason = visible(str(transfer["kv_connector"])), visible(in_words(error))
            raise NotRerunnable(
                f"{name} cannot be created here: {reason}; install what the connector needs, put its module on "
                "PYTHONPATH, or give in extra_config the options that are not taken from a log"
            ) from error
        self._refuse_blocks(self.connector.wrapped)
        store = self.connector.recording.log.log.store
        self._written = Written(store, EventDecoder(self.core, store.header))

    def _refuse_blocks(self, wrapped: Any) -> None:  # noqa: ANN401 -- any connector
        """Refuse a connector that keeps and frees vLLM's own blocks, because a rerun has no such blocks.

        vLLM gives its blocks to a connector in `bind_gpu_block_pool` (`kv_connector/v1/base.py`, 0.32).
        """
        children = getattr(wrapped, "_connectors", ())
        for child in children:
            self._refuse_blocks(child)
        if not children and "bind_gpu_block_pool" in vars(type(wrapped)):
            raise NotRerunnable(
                f"{type(wrapped).__name__} works on vLLM's own blocks, which no recording has; run the connector on "
                "the simulated engine, with the seed of the world (kvledger.adapters.lab.simulation)"
            )

    def _commit(self) -> None:
        self.connector.recording.log.commit()

    def workers_report(
        self, reported: WorkersReported, completed: Iterable[str], ends: tuple[ReportedBy, ...] = ()
    ) -> None:
        """Pass the reports of the workers to the connector.

        Args:
            reported: the requests and blocks that the workers reported.
            completed: names, in this rerun, of the copies that the workers completed.
            ends: which of these requests each worker reported, separately for each child of a `MultiConnector`.
        """
        by_all = dict.fromkeys(completed, self._num_ranks)
        output = vllm_objects.workers_output(reported, by_all, self.connector.wrapped)
        output.kv_connector_worker_meta = enveloped(output.kv_connector_worker_meta, (), ends)
        self.connector.update_connector_output(output)


def _kept_in_memory(transfer: Mapping[str, Any], handlers: Sequence[str]) -> dict[str, Any]:
    """Return the configuration, changed for a rerun: it has these handlers, and keeps kvledger's logs in memory.

    A `log_dir` in the configuration is kept. Each class that the configuration names is looked up, and refused if it is
    not a connector. Without this check, `MultiConnector` would call any class.

    Raises:
        ConfigurationError: a class is not a connector, or vLLM refuses its configuration.
        Exception: any error that the import of a class raises.
    """
    found: type[Any] = wrapped_class(accepted(transfer))
    options = dict(transfer.get("kv_connector_extra_config") or {})
    if issubclass(found, KVLedgerConnector | KVLedgerRecorder):
        options.setdefault("log_dir", None)
    if issubclass(found, KVLedgerConnector) and handlers:
        options.setdefault("handlers", list(handlers))
    if issubclass(found, KVLedgerRecorder) and isinstance(options.get("connector"), Mapping):
        options["connector"] = _kept_in_memory(options["connector"], handlers)
    if issubclass(found, MultiConnector) and isinstance(options.get("connectors"), list):
        options["connectors"] = [_kept_in_memory(child, handlers) for child in options["connectors"]]
    return {**transfer, "kv_connector_extra_config": options}


def _cache_config(configuration: LedgerConfiguration, wrapped: RecordingStarted) -> KVCacheConfig:
    num_blocks = max(1, wrapped.num_blocks)
    head_size = max(2, wrapped.block_bytes // configuration.block_size) // 2
    sizes: dict[str, Any] = {
        "block_size": configuration.block_size,
        "num_kv_heads": 1,
        "head_size": head_size,
        "dtype": torch.uint8,
    }
    specs = [
        SlidingWindowSpec(sliding_window=window, **sizes) if window else FullAttentionSpec(**sizes)
        for window in configuration.windows
    ]
    names = [f"layer {number}" for number in range(len(specs))]
    tensors = [
        KVCacheTensor(
            size=wrapped.block_bytes * num_blocks,
            layers=[name],
            layer_stride=wrapped.block_bytes,
            block_stride=wrapped.block_bytes,
        )
        for name in names
    ]
    groups = [KVCacheGroupSpec([name], spec) for name, spec in zip(names, specs, strict=True)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
