"""Other contenders inside of kvledger's recorder, and what their logs say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvledger.adapters.recorder.extension import Recorder
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.codec import EventDecoder
from sim.contenders import Contender

CORE = Core.standard().extended(Recorder())


@attrs.frozen
class NamedConnector(Contender):
    """Any connector, by its module, with options that no world decides."""

    name: str = attrs.field(kw_only=True)
    module: str | None = None
    options: Mapping[str, Any] = {}

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Its own configuration."""
        return {
            "kv_connector": self.name,
            "kv_connector_module_path": self.module,
            "kv_role": "kv_both",
            **kv_transfer,
            "kv_connector_extra_config": dict(self.options),
        }


@attrs.frozen
class Several(Contender):
    """Contenders in a `MultiConnector`."""

    name: str = "MultiConnector"
    children: tuple[Contender, ...] = attrs.field(kw_only=True)

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:
        """Each as it would be alone."""
        connectors = [child.kv_transfer(extra_config, {}) for child in self.children]
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            **kv_transfer,
            "kv_connector_extra_config": {"connectors": connectors},
        }

    def prepared(self, worker: KVConnectorBase_V1) -> KVConnectorBase_V1:
        """Each child as it would be alone."""
        side: Any = worker
        for child, connector in zip(self.children, side._connectors, strict=True):
            child.prepared(connector)
        return worker


@attrs.frozen
class Recorded(Contender):
    """The same connector with the same configuration, recorded."""

    inner: Contender = attrs.field(kw_only=True)
    name: str = "KVLedgerRecorderHMA"

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:
        """Around what the other contender would be configured with."""
        inner = self.inner.kv_transfer(extra_config, {})
        return {
            "kv_connector": self.name,
            "kv_connector_module_path": "kvledger.adapters.recorder",
            "kv_role": "kv_both",
            **kv_transfer,
            "kv_connector_extra_config": {"log_dir": extra_config.get("log_dir"), "connector": inner},
        }

    def prepared(self, worker: KVConnectorBase_V1) -> KVConnectorBase_V1:
        """What the other needs is done to the other."""
        side: Any = worker
        self.inner.prepared(side.wrapped)
        return worker


def recordings(connector: Any) -> Iterator[Any]:
    """Of all recorders that a connector is or has in it, the outer ones first."""
    own = vars(connector)
    if "recording" in own:
        yield own["recording"]
        yield from recordings(own["wrapped"])
    for child in own.get("_connectors", ()):
        yield from recordings(child)


def events_of(recording: Any) -> list[tuple[int, e.Event]]:
    """Everything that is in the store of a recorder, with sequence numbers; nothing is committed for that."""
    store = recording.log.log.store
    header = getattr(store, "header", None) or store._store.header
    decoder = EventDecoder(CORE, header)
    return [pair for frame in store.read() for pair in enumerate(decoder.decode(frame.payload), frame.first_sequence)]


def said_in(recording: Any, kind: type[Any]) -> list[Any]:
    """What the recorder has written in words of its own, of one kind."""
    its = (event for _, event in events_of(recording) if isinstance(event, e.ExtensionObserved | e.ExtensionNoted))
    return [said for said in map(Recorder.payload_of, its) if type(said) is kind]


def audited(recording: Any, events: list[tuple[int, e.Event]] | None = None) -> Audit:
    """What the rules say of the log, or of other events in its place."""
    audit = Audit(CORE, recording.log.configuration)
    audit.run(events_of(recording) if events is None else events)
    return audit
