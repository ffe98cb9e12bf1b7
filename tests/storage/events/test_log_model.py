"""Any mix of appends behaves like a list."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvledger.storage.events import FrameKind, SegmentEventStore, read_log

_SEGMENT_BYTES = 640


class LogModel(RuleBasedStateMachine):
    """The model is a list of (first sequence, number of events, kind, payload)."""

    def __init__(self) -> None:
        """Begin with an empty log."""
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.expected: list[tuple[int, int, FrameKind, bytes]] = []

    @initialize()
    def create(self) -> None:
        """Make the log."""
        self.store = SegmentEventStore.create(self.directory, {}, segment_bytes=_SEGMENT_BYTES)

    def _next_sequence(self) -> int:
        return self.expected[-1][0] + self.expected[-1][1] if self.expected else 1

    @rule(payload=st.binary(max_size=200), num_events=st.integers(1, 1 << 20))
    def append(self, payload: bytes, num_events: int) -> None:
        """Append at the end."""
        place = self._next_sequence()
        assert self.store.append(payload, num_events, expected_sequence=place) == place
        self.expected.append((place, num_events, FrameKind.EVENTS, payload))

    @rule(num_events=st.integers(1, 9), reason=st.text(max_size=20))
    def append_gap(self, num_events: int, reason: str) -> None:
        """Account for a loss."""
        place = self.store.append_gap(num_events, reason)
        self.expected.append((place, num_events, FrameKind.GAP, reason.encode(errors="replace")))

    @invariant()
    def the_log_is_the_list(self) -> None:
        """Both ways of reading agree with the model, without damage."""
        if not hasattr(self, "store"):
            return
        reader = read_log(self.directory)
        frames = list(reader)
        assert [
            (frame.first_sequence, frame.num_events, frame.kind, frame.payload) for frame in frames
        ] == self.expected
        assert reader.damage == []
        assert (reader.next_sequence, reader.head_hash) == (self.store.next_sequence, self.store.head_hash)
        assert self.store.next_sequence == self._next_sequence()

    def teardown(self) -> None:
        """Leave nothing behind."""
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.directory)


TestLogModel = LogModel.TestCase
TestLogModel.settings = settings(
    max_examples=60, stateful_step_count=20, suppress_health_check=[HealthCheck.too_slow], deadline=None
)
