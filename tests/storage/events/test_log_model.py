"""Any mix of appending, closing, reopening and losing bytes at the end behaves like a list."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvledger.storage.events import FrameKind, SegmentEventStore, read_log

_FRAME_HEADER_BYTES = 39
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

    @rule(data=st.data())
    def append_again(self, data: st.DataObject) -> None:
        """Repeat what is there."""
        events = [frame for frame in self.expected if frame[2] is FrameKind.EVENTS]
        if events:
            place, num_events, _, payload = data.draw(st.sampled_from(events))
            assert self.store.append(payload, num_events, expected_sequence=place) == place

    @rule()
    def reopen(self) -> None:
        """Close and open."""
        head = self.store.head_hash
        self.store.close()
        self.store = SegmentEventStore.open(self.directory, segment_bytes=_SEGMENT_BYTES)
        assert (self.store.head_hash, self.store.recovery.num_bytes_cut) == (head, 0)

    @rule(num_bytes=st.integers(1, 300))
    def lose_bytes_at_the_end(self, num_bytes: int) -> None:
        """Cut the last segment, as a power cut may, but not the first segment's header; open again: a gap says so."""
        self.store.close()
        last = max(self.directory.glob("*.kvlog"))
        in_last = [frame for frame in self.expected if frame[0] >= int(last.stem)]
        frames_start = last.stat().st_size - sum(_FRAME_HEADER_BYTES + len(frame[3]) for frame in in_last)
        lowest = frames_start if int(last.stem) == 1 else 0
        size = max(lowest, last.stat().st_size - num_bytes)
        with last.open("r+b") as file:
            file.truncate(size)
        end = frames_start
        for frame in in_last:
            end += _FRAME_HEADER_BYTES + len(frame[3])
            if end > size:
                self.expected = [kept for kept in self.expected if kept[0] < frame[0]]
                break
        before = self.store.next_sequence
        self.store = SegmentEventStore.open(self.directory, segment_bytes=_SEGMENT_BYTES)
        if self._next_sequence() < before:  # the record of the end knows how far the log had come
            *_, gap = self.store.read()
            assert gap.payload.startswith(b"the end was missing when the log was opened again")
            self.expected.append((self._next_sequence(), before - self._next_sequence(), FrameKind.GAP, gap.payload))

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
