"""The whole state of the projections as bytes, and back: so that a log can be folded from its middle.

Which attributes make up the state, and of which types, stands below as data; everything else about a projection is made
anew from the configuration. Nothing is believed from the bytes but values of those types. Whoever adds an attribute to
a projection adds it here; a test compares both. Files, hashes and places in a log are another room's business.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final

import attrs
import msgspec

from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.policies import ChunkStatistics
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.chunk_index import Departed
from kvledger.lifecycle.projections.lookup_cache import CachedHit, PendingAnswer
from kvledger.lifecycle.projections.recency import Recency
from kvledger.lifecycle.projections.tails import Tail
from kvledger.lifecycle.projections.totals import Figures
from kvledger.lifecycle.projections.tracker import RequestRecord
from kvledger.lifecycle.projections.transfers import Job

__all__ = ["STATE", "Attribute", "SnapshotError", "capture", "restore", "state_fingerprint", "state_owners"]


class SnapshotError(ValueError):
    """The bytes are no state that this code can take up."""


def _same(value: object) -> object:
    return value


@attrs.frozen
class Attribute:
    """One attribute that is state: the type that is stored, and how it becomes that and comes back."""

    stored_as: Any
    to_stored: Callable[[Any], Any] = _same
    from_stored: Callable[[Any], Any] = _same


_Blocks = dict[int, list[int]]
_INT: Final = Attribute(int)
_INTS: Final = Attribute(dict[int, int])
_INT_OF_KEY: Final = Attribute(dict[bytes, int])
_INT_OF_REQUEST: Final = Attribute(dict[str, int])
_KEYS_OF_REQUEST: Final = Attribute(dict[str, tuple[bytes, ...]])
_BLOCKS: Final = Attribute(
    _Blocks,
    lambda held: {ordinal: list(block_ids) for ordinal, block_ids in held.items()},
    lambda held: {ordinal: array("I", block_ids) for ordinal, block_ids in held.items()},
)
_TABLES: Final = Attribute(list[list[int]], lambda tables: [list(table) for table in tables])

STATE: Final[Mapping[str, Mapping[str, Attribute]]] = MappingProxyType(
    {
        # The two maps of the tracker share their records, see `_Records`.
        "tracker": {"num_arrived": _INT, "num_steps": _INT, "time_ns": _INT},
        "blocks": {"_held": _BLOCKS, "_lost": _BLOCKS, "_leaving": _INTS, "_left": _INTS},
        "unfilled": {
            "_blocks": Attribute(set[int]),
            "_loads": Attribute(dict[int, tuple[int, ...]]),
            "_lost": _TABLES,
            "_lost_before": _TABLES,
            "_num_local_tokens": _INT_OF_REQUEST,
            "num_failures": _INT,
        },
        "chunk_keys": {"_keys": Attribute(dict[str, list[bytes]])},
        "transfers": {
            "_jobs": Attribute(dict[int, Job]),
            "_given_up": Attribute(dict[int, Job]),
            "_of_ordinal": Attribute(dict[int, set[int]]),
            "_loading": _INTS,
            "next_job_id": _INT,
            "epoch": _INT,
        },
        "chunks": {
            "_committed": Attribute(dict[bytes, tuple[int, ...]]),
            "_by_age": Attribute(list[bytes], list),
            "_saving": _INT_OF_KEY,
            "_departed": Attribute(dict[bytes, Departed], dict, OrderedDict),
            "_pins": _INT_OF_KEY,
            "_pinned_by": _KEYS_OF_REQUEST,
            "_wanted": _INT_OF_KEY,
            "_wanted_by": _KEYS_OF_REQUEST,
            "num_added": _INT,
            "num_removed": _INT,
        },
        "slots": {
            "_num_touched": _INT,
            "_free": Attribute(list[int]),
            "_failed": Attribute(list[int]),
            "_references": _INTS,
        },
        "tails": {"_tails": Attribute(dict[int, Tail])},
        "lookups": {
            "_hits": Attribute(dict[str, CachedHit]),
            "_pending": Attribute(dict[str, PendingAnswer]),
            "_taken_up": Attribute(dict[str, PendingAnswer]),
            "_num_deferred": _INT_OF_REQUEST,
            "_junctions": _INT_OF_REQUEST,
        },
        "save_cursor": {"_num_chunks": _INT_OF_REQUEST},
        "totals": {
            "figures": Attribute(Figures),
            "_loading": _INTS,
            "_returning": Attribute(dict[int, tuple[int, int]]),
        },
        "policy": {
            "_num_requests_with": Attribute(dict[bytes, int], dict, Counter),
            "_num_counted": _INT_OF_REQUEST,
            "num_chunks": _INT,
            "num_tokens_reusable": _INT,
        },
    }
)
"""Projection -> attribute -> how it is stored. `policy`: only one that counts has state."""


@attrs.frozen
class _Records:
    """The tracker's records: an id that is used again leaves its earlier life known by its ordinal alone."""

    records: list[RequestRecord]
    of_request: dict[str, int]
    of_ordinal: dict[int, int]


_Parts = dict[str, dict[str, msgspec.Raw]]
_encode = msgspec.msgpack.Encoder().encode


def state_owners(projections: Projections) -> dict[str, object]:
    """The objects that `STATE` speaks of, by name; without `policy` where none has state."""
    owners: dict[str, object] = {name: getattr(projections, name, None) for name in STATE}
    owners["slots"] = projections.chunks.slots
    policy: object = projections.policy
    if not isinstance(policy, ChunkStatistics):
        del owners["policy"]
    return owners


def capture(projections: Projections) -> bytes:
    """Return everything that is believed now."""
    parts: dict[str, dict[str, Any]] = {
        name: {key: attribute.to_stored(getattr(owner, key)) for key, attribute in STATE[name].items()}
        for name, owner in state_owners(projections).items()
    }
    tracker = projections.tracker
    numbers: dict[int, int] = {}
    records: list[RequestRecord] = []
    for record in (*tracker._records.values(), *tracker._by_ordinal.values()):  # noqa: SLF001 -- see the docstring
        if id(record) not in numbers:
            numbers[id(record)] = len(records)
            records.append(record)
    of_request = {name: numbers[id(record)] for name, record in tracker._records.items()}  # noqa: SLF001
    of_ordinal = {ordinal: numbers[id(record)] for ordinal, record in tracker._by_ordinal.items()}  # noqa: SLF001
    parts["tracker"]["records"] = _Records(records, of_request, of_ordinal)
    return _encode(parts)


def restore(core: Core, state: bytes, configuration: LedgerConfiguration) -> Projections:
    """Return projections that believe what was captured, under the same configuration.

    Raises:
        SnapshotError: the bytes are something else; what `state_fingerprint` says was not compared.
    """
    projections = Projections(core, configuration)
    owners = state_owners(projections)
    try:
        parts = msgspec.msgpack.decode(state, type=_Parts)
        for name, owner in owners.items():
            for key, attribute in STATE[name].items():
                value = msgspec.msgpack.decode(parts[name][key], type=attribute.stored_as)
                _put(owner, key, attribute.from_stored(value))
        stored = msgspec.msgpack.decode(parts["tracker"]["records"], type=_Records)
        tracker = projections.tracker
        _put(tracker, "_records", {name: stored.records[number] for name, number in stored.of_request.items()})
        _put(tracker, "_by_ordinal", {ordinal: stored.records[number] for ordinal, number in stored.of_ordinal.items()})
    except (msgspec.MsgspecError, KeyError, IndexError, OverflowError) as error:
        raise SnapshotError(f"the state cannot be taken up: {type(error).__name__}: {error}") from error
    return projections


def state_fingerprint(core: Core, configuration: LedgerConfiguration) -> str:
    """What must be equal for a state to mean the same: the core, the configuration, and the layout of the state."""
    layout = [
        (name, key, str(attribute.stored_as))
        for name, attributes in STATE.items()
        for key, attribute in attributes.items()
    ]
    classes = [(struct.__name__, _field_names(struct)) for struct in _STORED_CLASSES]
    parts = (
        core.fingerprint(),
        attrs.asdict(configuration),
        layout,
        classes,
    )
    return blake2b(_encode(parts), digest_size=16).hexdigest()


_STORED_CLASSES: Final = (Job, Departed, Tail, CachedHit, PendingAnswer, Figures, RequestRecord)


def _field_names(struct: type) -> list[str]:
    return [field.name for field in attrs.fields(struct)]


def _put(owner: object, key: str, value: Any) -> None:  # noqa: ANN401 -- of the type that STATE names
    """Set an attribute; a container is filled where it is, since others may hold it."""
    there = getattr(owner, key, None)
    if isinstance(there, dict):
        there.clear()
        there.update(value)
    elif isinstance(there, list):
        there[:] = value
    elif isinstance(there, Recency):
        there.restore(value)
    else:
        setattr(owner, key, value)
