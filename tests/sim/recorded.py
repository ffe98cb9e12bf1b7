"""What the logs of recorded connectors say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvledger.adapters.recorded.extension import Recorder
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.codec import EventDecoder

CORE = Core.standard().extended(Recorder())


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


def payloads_in(events: Iterable[tuple[int, e.Event]], kind: type[Any]) -> Iterator[tuple[int, Any, Any]]:
    """(Place, event, what it says) of the recorder's own events of a kind."""
    for place, (_, event) in enumerate(events):
        if isinstance(event, e.ExtensionObserved | e.ExtensionNoted):
            payload = Recorder.payload_of(event)
            if type(payload) is kind:
                yield place, event, payload


def said_in(recording: Any, kind: type[Any]) -> list[Any]:
    """What the recorder has written in words of its own, of one kind."""
    return [payload for _, _, payload in payloads_in(events_of(recording), kind)]


def audited(recording: Any, events: list[tuple[int, e.Event]] | None = None) -> Audit:
    """What the rules say of the log, or of other events in its place."""
    audit = Audit(CORE, recording.log.configuration)
    audit.run(events_of(recording) if events is None else events)
    return audit
