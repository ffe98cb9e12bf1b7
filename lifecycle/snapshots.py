"""Converts the state of all projections to bytes and back, so that a fold can begin in the middle of a log.

Each projection declares in its `State` class what it remembers. Everything else is rebuilt from the configuration and
these states. Only values of the declared types are read from the bytes. Another module handles the files of snapshots,
their hashes and their positions in a log.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.projections import Projection, Projections
from kvledger.lifecycle.projections.forest import Queue
from kvledger.lifecycle.untrusted import converted, msgpack_decoder

if TYPE_CHECKING:
    from kvledger.lifecycle.core import Core

__all__ = ["SnapshotError", "capture", "restore", "state_fingerprint"]


class SnapshotError(ValueError):
    """The bytes are not a state that this code can use."""


_encode = msgspec.msgpack.Encoder().encode


def capture(projections: Projections) -> bytes:
    """Return the state of all projections as bytes."""
    return _encode({name: msgspec.Raw(state) for name, state in projections.snapshot().items()})


def restore(core: Core, state: bytes, configuration: LedgerConfiguration) -> Projections:
    """Return projections with a state that `capture` returned.

    Core and configuration must be the same as at the capture. The caller must check this with `state_fingerprint`.

    Raises:
        SnapshotError: the bytes are not a state that this core can use.
    """
    projections = core.new_projections(configuration)
    try:
        parts: dict[str, msgspec.Raw] = msgpack_decoder(dict[str, msgspec.Raw])(state)
        named: dict[str, Any] = dict(projections.named())
        for name, there in projections.states().items():
            named[name].state = msgpack_decoder(type(there), _decoded)(bytes(parts[name]))
        for projection in named.values():
            if isinstance(projection, Projection):  # an extension's may be of any class
                projection.check()
        for name, projection in named.items():
            _index(projections, name, projection.index)
    except Exception as error:  # an index may fail on a state that no fold leads to
        raise SnapshotError(f"the state cannot be used: {type(error).__name__}: {error}") from error
    return projections


def _index(projections: Projections, name: str, index: Callable[[], None]) -> None:
    extension = projections.extension_of(name)
    if extension:
        projections.extensions.ask(extension, f"projection {name}", index)
    else:
        index()


def _decoded(kind: type, value: Any) -> object:  # noqa: ANN401 -- what was read
    if kind is array:
        return array("I", converted(value, list[int]))
    return Queue(converted(value, list[bytes]))


def state_fingerprint(core: Core, configuration: LedgerConfiguration) -> str:
    """Return a hash of the core, the configuration and the layout of states.

    A captured state can be restored only if this hash is the same as when the state was captured.
    """
    states = core.new_projections(configuration).states()
    layout = {name: _layout(type(state)) for name, state in states.items()}
    parts = (core.fingerprint(), attrs.asdict(configuration), layout)
    return blake2b(_encode(parts), digest_size=16).hexdigest()


@cache
def _layout(state: type[msgspec.Struct]) -> str:
    """Return the types in a state as text. The text is cached, because every new segment of a log needs it again."""
    return repr(msgspec.inspect.type_info(state))
