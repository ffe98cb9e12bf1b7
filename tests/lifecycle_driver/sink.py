"""A sink that keeps frames in a list, and reads them back as the events of a stored log."""

from __future__ import annotations

from kvledger.lifecycle import Core
from kvledger.lifecycle.codec import EventDecoder, vocabulary_header
from kvledger.lifecycle.events import Event


class MemorySink:
    """Frames as `(first sequence, number of events, payload)`."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, int, bytes]] = []
        self._next_sequence = 1

    @property
    def next_sequence(self) -> int:
        """The sequence number of the next event."""
        return self._next_sequence

    def append(self, payload: bytes, num_events: int, *, expected_sequence: int | None = None) -> int:
        """Store one frame; refuses one that does not follow the last."""
        if expected_sequence is not None and expected_sequence != self._next_sequence:
            message = f"the next event has sequence {self._next_sequence}, the writer expected {expected_sequence}"
            raise ValueError(message)
        first = self._next_sequence
        self.frames.append((first, num_events, payload))
        self._next_sequence += num_events
        return first

    def events(self) -> list[tuple[int, Event]]:
        """Every committed event with its sequence number, decoded from the stored bytes."""
        decoder = EventDecoder(Core.standard(), vocabulary_header(Core.standard()))
        return [
            (first + index, event)
            for first, _, payload in self.frames
            for index, event in enumerate(decoder.decode(payload))
        ]
