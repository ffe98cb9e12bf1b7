"""Which connector is in a simulated engine: none, any by its name, several, kvledger with another cache, a recorder."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvledger.adapters.lab.simulation.connectors import (
    KVLEDGER,
    KVLEDGER_TRANSFER,
    ConnectorSetup,
    Offloading,
    other_transfer,
)


@attrs.frozen
class NoConnector(ConnectorSetup):
    """vLLM alone: what a preemption loses and the prefix cache does not keep is computed again."""

    name: str = "no connector"

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> None:  # noqa: ARG002
        """No connector, no configuration."""
        return


@attrs.frozen
class NamedConnector(ConnectorSetup):
    """Any connector, by its module, with options that no world decides."""

    name: str = attrs.field(kw_only=True)
    module: str | None = None
    options: Mapping[str, Any] = {}

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Its own configuration."""
        return other_transfer(self.name, {"kv_connector_module_path": self.module, **kv_transfer}, self.options)


@attrs.frozen
class Example(ConnectorSetup):
    """ExampleConnector, which keeps prompts in files."""

    name: str = "ExampleConnector"
    _directories: list[tempfile.TemporaryDirectory[str]] = attrs.field(factory=list, eq=False, repr=False)
    """One for each engine; gone with this object."""

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """With a directory of its own."""
        self._directories.append(tempfile.TemporaryDirectory())
        return other_transfer(self.name, kv_transfer, {"shared_storage_path": self._directories[-1].name})


@attrs.frozen
class Several(ConnectorSetup):
    """Connectors in a `MultiConnector`."""

    name: str = "MultiConnector"
    children: tuple[ConnectorSetup, ...] = attrs.field(kw_only=True)

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:
        """Each as it would be alone."""
        connectors = [child.kv_transfer(extra_config, {}) for child in self.children]
        return other_transfer(self.name, kv_transfer, {"connectors": connectors})

    def prepared(self, worker: KVConnectorBase_V1) -> KVConnectorBase_V1:
        """Each child as it would be alone."""
        side: Any = worker
        for child, connector in zip(self.children, side._connectors, strict=True):
            child.prepared(connector)
        return worker


@attrs.frozen
class Recorded(ConnectorSetup):
    """The same connector with the same configuration, recorded."""

    inner: ConnectorSetup = attrs.field(kw_only=True)
    name: str = "KVLedgerRecorderHMA"

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:
        """Around what the other would be configured with."""
        extra = {
            "log_dir": extra_config.get("log_dir"),
            "max_log_wait_ms": None,
            "digests": extra_config.get("digests", "off"),
            "connector": self.inner.kv_transfer(extra_config, {}),
        }
        module = {"kv_connector_module_path": "kvledger.adapters.recorder"}
        return other_transfer(self.name, {**module, **kv_transfer}, extra)

    def prepared(self, worker: KVConnectorBase_V1) -> KVConnectorBase_V1:
        """What the other needs is done to the other."""
        side: Any = worker
        self.inner.prepared(side.wrapped)
        return worker


@attrs.frozen
class WithNeighbour(ConnectorSetup):
    """kvledger in a `MultiConnector`, with another cache before or behind it."""

    name: str = "KVLedgerConnector with a neighbour"
    options: Mapping[str, Any] = {}
    """Of the neighbour, see `neighbour.py`."""
    is_first: bool = False
    """Whether the neighbour is asked first."""
    own_policy: Mapping[str, str] = {}
    """`kv_load_failure_policy` as our child sees it; vLLM's scheduler obeys the parent's."""

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:
        """A parent with two children."""
        ours = {name: value for name, value in KVLEDGER_TRANSFER.items() if name != "kv_load_failure_policy"}
        children = [
            {**ours, **self.own_policy, "kv_connector_extra_config": extra_config},
            other_transfer("Neighbour", {"kv_connector_module_path": "sim.neighbour"}, self.options),
        ]
        policy = {"kv_load_failure_policy": KVLEDGER_TRANSFER["kv_load_failure_policy"]}
        connectors = children[::-1] if self.is_first else children
        return other_transfer("MultiConnector", {**policy, **kv_transfer}, {"connectors": connectors})


COMPARED: tuple[ConnectorSetup, ...] = (KVLEDGER, NoConnector(), Offloading())
"""Those whose worlds are compared."""
