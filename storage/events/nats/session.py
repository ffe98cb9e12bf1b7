"""Several logs over one connection: each gets its turn, a batch at a time. Ends with the connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvledger.storage.events.nats.publisher import Publisher
from kvledger.storage.events.nats.room import Room
from kvledger.storage.events.nats.shipment import LogProgress, Shipment
from kvledger.storage.events.nats.stream import CheckedStream, NewStream, ensure_stream

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kvledger.storage.events.nats.connection import Connection

__all__ = ["Session"]


@attrs.define(eq=False)
class Session:
    """Ships logs over a connection; use `open`."""

    connection: Connection
    stream: CheckedStream
    label: str
    _publisher: Publisher
    _room: Room
    _shipments: dict[Path, Shipment] = attrs.field(factory=dict, init=False)

    @classmethod
    async def open(cls, connection: Connection, label: str, new_stream: NewStream | None) -> Session:
        """Make sure that the stream is there and fit. Raises `StreamRefused` and `StreamUnavailable`."""
        stream = await ensure_stream(connection, new_stream)
        publisher = Publisher(connection)
        await publisher.open()
        return cls(connection, stream, label, publisher, Room(connection, stream.configuration))

    async def take_up(self, logs: Iterable[LogProgress]) -> bool:
        """Begin with those of the logs that are new here; return whether there were any."""
        fresh = [log for log in logs if log.directory not in self._shipments]
        for log in fresh:
            shipment = Shipment(self.connection, self._publisher, self._room, log, self.label)
            self._shipments[log.directory] = shipment
            await shipment.start(self.stream.max_age_s)
        for shipment in self._shipments.values():
            if shipment.is_due_again:
                await shipment.start(self.stream.max_age_s)
        return bool(fresh)

    async def ship_round(self, *, stand_by: bool) -> bool:
        """Ship a batch of each log; return whether there was anything. Raises like `Shipment.advance`.

        `stand_by`: a log that another shipper is at work on may be left to it for a moment.
        """
        has_shipped = False
        for shipment in self._shipments.values():
            if not (stand_by and shipment.is_standing_by):
                has_shipped |= await shipment.advance()
        self.connection.check()
        return has_shipped

    def check_ends(self, *, is_final: bool) -> None:
        """Look whether something is in the way of a log that gives no more; see `Shipment.check_end`."""
        for shipment in self._shipments.values():
            shipment.check_end(is_final=is_final)
