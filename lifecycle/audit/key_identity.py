"""KEY_IDENTITY: a chunk key stands for one prefix, and so for one place in it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import ClassVar

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.indices import Indices
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import Check, ReplayedEvent

MAX_KEYS = 1 << 16
"""Keys that are remembered; the oldest are forgotten first."""


@attrs.define
class _Places:
    """Key -> (number of its chunk, key of the chunk before it, sequence), in the order of their first appearance."""

    of: OrderedDict[bytes, tuple[int, bytes, int]] = attrs.field(factory=OrderedDict)


class KeyIdentity:
    """The same key never names chunks at two places, or behind two different chunks.

    Verifies: this for the last 65536 keys of the log, over all requests.
    Does not verify: that a key covers everything else its KV depends on, such as salt, adapter, media and weights:
    tokens never enter the log, only keys made from them.
    """

    rule: ClassVar[str] = "KEY_IDENTITY"

    def __init__(self) -> None:
        self._places = _Places()

    def checks(self, _indices: Indices) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        return [
            (e.ChunkKeysObserved, self._observed),
        ]

    def _observed(
        self, event: e.ChunkKeysObserved, step: ReplayedEvent, projections: Projections
    ) -> list[Violation] | None:
        """Compare each key's place with where it was before."""
        known = projections.chunk_keys.of(event.request_id)
        if event.first_chunk > len(known):
            return None  # behind a gap nobody knows what a key follows
        parent = known[event.first_chunk - 1] if event.first_chunk else b""
        places = self._places.of
        for chunk, key in enumerate(event.keys, event.first_chunk):
            place = places.get(key)
            if place is None:
                places[key] = (chunk, parent, step.sequence)
                if len(places) > MAX_KEYS:
                    places.popitem(last=False)
            elif place[0] != chunk or place[1] != parent:
                prefix = "behind another prefix" if parent != place[1] else "behind the same chunk"
                detail = f"key {key.hex()} names chunk {chunk}, {prefix}; it had named chunk {place[0]}"
                return [violation(self.rule, step, projections, detail, place[2])]
            parent = key
        return None
