"""Whether a bounded stream has room, asked before publishing into it.

A stream with ``discard: new`` should refuse what does not fit. nats-server 2.9 compares without its own overhead, takes
a message that just fits so, and then drops the oldest message to make room: a log's header, most likely. So a shipper
stops before the bound. It asks often near the bound and seldom far from it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from kvledger.storage.events.nats.errors import StreamUnavailable
from kvledger.storage.events.nats.messages import Piece, message_headers, num_header_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvledger.storage.events.nats.connection import Connection

__all__ = ["Room"]

_OVERHEAD_BYTES: Final = 128
"""Of a stored message: the server's record, and the headers that say what is expected."""
_MAX_RESERVE_BYTES: Final = 16 << 20
_FAR_BYTES: Final = 256 << 20
_FRESH_S: Final = 1.0


class Room:
    """Room in one stream; `configuration` is what STREAM.INFO says of it."""

    def __init__(self, connection: Connection, configuration: Mapping[str, Any]) -> None:
        """Ask over this connection."""
        self._connection = connection
        bound = configuration.get("max_bytes", -1)
        refuses_new = configuration.get("discard", "old") == "new"
        self._max_bytes: int | None = bound if bound > 0 and refuses_new else None
        # For what other shippers send between the question and the answer's use.
        self._reserve = min(bound // 20, _MAX_RESERVE_BYTES)
        self._free = 0
        self._asked_at = 0.0

    async def take(self, subject: str, pieces: Sequence[Piece]) -> None:
        """Return if the pieces fit. Raises `StreamUnavailable` if they do not."""
        if self._max_bytes is None:
            return
        needed = sum(
            len(p.data) + num_header_bytes(message_headers(p)) + _OVERHEAD_BYTES + len(subject) for p in pieces
        )
        is_fresh = time.monotonic() - self._asked_at < _FRESH_S
        if not is_fresh or self._free - needed < _FAR_BYTES:
            info = await self._connection.request(f"STREAM.INFO.{self._connection.address.stream}")
            self._free = self._max_bytes - self._reserve - int(info["state"]["bytes"])
            self._asked_at = time.monotonic()
        if needed > self._free:
            raise StreamUnavailable(
                f"{self._connection.address}: the stream is full (max_bytes {self._max_bytes}); nothing is dropped. "
                "Raise max_bytes, or purge logs that are no longer needed"
            )
        self._free -= needed
