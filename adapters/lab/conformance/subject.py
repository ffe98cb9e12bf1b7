"""The connector under test: inside a recorder, with a worker that runs on a CPU."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.request import RequestStatus

from kvledger.adapters.lab.simulation.connectors import ConnectorSetup, Offloading, SimpleCPU

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

_ON_CPU: Mapping[str, ConnectorSetup] = MappingProxyType(
    {"OffloadingConnector": Offloading(num_questions=2), "SimpleCPUOffloadConnector": SimpleCPU(num_questions=2)}
)
"""Class name → setup. Copies take several steps, so that other things happen during a copy."""
RUN_DIR = "{run_dir}"
"""Placeholder in the extra configuration for a directory that is empty when a run begins, so that no run finds the
files of another."""
_KVLEDGER = "kvledger.adapters.vllm"
_DEFAULTS: Mapping[tuple[str | None, str], Mapping[str, Any]] = MappingProxyType(
    {
        (None, "OffloadingConnector"): {"cpu_bytes_to_use": 100 * 4096},
        (None, "SimpleCPUOffloadConnector"): {"cpu_bytes_to_use": 100 * 512},
        (None, "ExampleConnector"): {"shared_storage_path": RUN_DIR},
        (_KVLEDGER, "KVLedgerConnector"): {"log_dir": None, "host_bytes": 1 << 20, "chunk_size": 16},
    }
)
"""(module, class) → default keys of its extra configuration.

Without them the connector does not start (`OffloadingConnector` needs `cpu_bytes_to_use`, vLLM 0.32:
`vllm/v1/kv_offload/cpu/spec.py`), or it stores outside of the run's directory. The sizes hold about 100 blocks of the
simulated model, few enough to fill up."""
_RECORDER = "kvledger.adapters.recorder"


class AbsentWorker(KVConnectorBase_V1):
    """Replaces a worker that cannot run here. It moves no bytes, and reports everything that vLLM waits for as done."""

    scheduler: Scheduler | None = None
    """vLLM's scheduler, which has the requests that wait; None until the engine exists."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._loading: set[str] = set()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Report two kinds of copies as done: loads that requests wait for, and copies for which vLLM keeps blocks."""
        requests = {} if self.scheduler is None else self.scheduler.requests
        waiting = {key for key, each in requests.items() if each.status is RequestStatus.WAITING_FOR_REMOTE_KVS}
        over = {key for key, each in requests.items() if each.is_finished()}
        received = (waiting | over) & self._loading
        self._loading = (self._loading | waiting) - received
        return KVConnectorTransferResults(finished_sending=over - received - waiting, finished_recving=received)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ARG002
        """Not called on a worker."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Not called on a worker."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ARG002
        """Not called on a worker."""
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Do nothing."""


@attrs.frozen
class Subject(ConnectorSetup):
    """The connector under test. It can be any connector that vLLM can load."""

    name: str = attrs.field(kw_only=True)
    module: str | None = None
    extra_config: dict[str, Any] = attrs.field(factory=dict)
    has_worker: bool = True
    """Whether the connector's own worker runs. If not, an `AbsentWorker` replaces it."""
    lose: Callable[[Any, Any], object] | None = None
    """Function that gets the scheduler side and the worker side, and deletes their KV, so that offered loads fail."""

    @classmethod
    def named(cls, name: str, extra_config: dict[str, Any], lose: str | None = None) -> Subject:
        """Return the subject for a connector, given as "module:Class" or as a name in vLLM's registry.

        `lose` is given as "module:function". Known connectors get default keys in `extra_config`.

        Raises:
            Exception: the import of the connector or of `lose` failed, or vLLM does not know the connector or refuses
                its class.
        """
        module, _, connector = name.rpartition(":")
        function = None if lose is None else pkgutil.resolve_name(lose)
        defaults = _DEFAULTS.get((module or None, connector), {})
        config = {**defaults, **extra_config}
        subject = cls(name=connector, module=module or None, extra_config=config, lose=function)
        KVConnectorFactory.get_connector_class(subject._transfer())
        return subject

    def _own(self, run_dir: str = "") -> dict[str, Any]:
        return {
            "kv_connector": self.name,
            "kv_connector_module_path": self.module,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": _in_place(self.extra_config, run_dir),
        }

    def _transfer(self) -> KVTransferConfig:
        return KVTransferConfig(**self._own())

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration of a recorder around the connector."""
        has_hma = KVConnectorFactory.supports_hma_config(self._transfer())
        return {
            **self._own(),
            "kv_connector": "KVLedgerRecorderHMA" if has_hma else "KVLedgerRecorder",
            "kv_connector_module_path": _RECORDER,
            **kv_transfer,
            "kv_connector_extra_config": {
                "log_dir": extra_config["log_dir"],
                "connector": self._own(f"{extra_config['log_dir']}/of-the-connector"),
            },
        }

    def make_worker(self, connector_class: Any, config: Any, kv_cache_config: Any) -> KVConnectorBase_V1:
        """Create the connector's own worker, or an `AbsentWorker`."""
        if not self.has_worker:
            return AbsentWorker(config, KVConnectorRole.WORKER, kv_cache_config)
        return super().make_worker(connector_class, config, kv_cache_config)

    def prepared(self, worker: KVConnectorBase_V1) -> KVConnectorBase_V1:
        """Make the workers of vLLM's own connectors copy between CPU tensors instead of on a device."""
        for connector in connectors_in(worker):
            setup = _ON_CPU.get(type(connector).__name__)
            if setup is not None:
                setup.prepared(connector)
        return worker


def _in_place(value: Any, run_dir: str) -> Any:
    if isinstance(value, dict):
        return {key: _in_place(item, run_dir) for key, item in value.items()}
    if isinstance(value, list):
        return [_in_place(item, run_dir) for item in value]
    return value.replace(RUN_DIR, run_dir) if isinstance(value, str) else value


def connectors_in(connector: Any) -> list[Any]:
    """Return a connector and all connectors inside it, outer ones first."""
    own = vars(connector)
    inner = [own["wrapped"]] if "wrapped" in own else own.get("_connectors", ())
    return [connector, *(found for each in inner for found in connectors_in(each))]


def log_directories(log_dir: Path) -> list[Path]:
    """Return the directories of the scheduler's log and of any workers' logs."""
    return sorted({path.parent for path in log_dir.rglob("*.kvlog")})
