# ruff: noqa: S101 - this is a test suite, shipped so that a store written elsewhere can inherit it
"""The conformance kit of `EventStore`: inherit `EventStoreContract` in a test module, say how to open your store.

    class TestMyStore(EventStoreContract):
        def open_store(self, path): return MyStore(path)

Verified: sequence numbers, chain, reading, conflicts, closing. Not verified, because it differs from store to store:
what survives a crash, what damage does, and who else may write.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from kvledger.storage.events.frames import FrameKind, next_chain_hash
from kvledger.storage.events.store import AppendConflict, LogClosed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvledger.storage.events.store import EventStore

__all__ = ["EventStoreContract"]


def _refused(error: type[Exception], call: Callable[[], object]) -> Exception:
    try:
        result = call()
    except error as refusal:
        return refusal
    msg = f"expected {error.__name__}, got the answer {result!r}"
    raise AssertionError(msg)


class EventStoreContract(abc.ABC):
    """What every event store must do. pytest hands a fresh directory to each test as `tmp_path`."""

    @abc.abstractmethod
    def open_store(self, path: Path) -> EventStore:
        """Begin a log at `path`, which is an empty directory."""

    def test_an_empty_log_begins_at_one(self, tmp_path: Path) -> None:
        """The first sequence number is 1, there is nothing to read, and there is a hash to anchor."""
        store = self.open_store(tmp_path)
        assert store.next_sequence == 1
        assert list(store.read()) == []
        assert len(store.head_hash) == 16  # noqa: PLR2004 - the width of a chain hash
        store.close()

    def test_sequence_numbers_have_no_gap(self, tmp_path: Path) -> None:
        """Each append returns its first sequence number, which follows the last of the one before."""
        store = self.open_store(tmp_path)
        assert [store.append(b"a", 1), store.append(b"bcd", 3), store.append(b"", 2)] == [1, 2, 5]
        assert store.next_sequence == 7  # noqa: PLR2004 - 1 + 1 + 3 + 2
        store.close()

    def test_what_was_appended_is_read_back(self, tmp_path: Path) -> None:
        """Payloads come back byte for byte, with their counts and kinds, in order."""
        store = self.open_store(tmp_path)
        payloads = [b"", b"\x00", bytes(range(256)), b"KVLEDGER\xf5K" * 9]
        for number, payload in enumerate(payloads, start=1):
            store.append(payload, number)
        read = [(frame.payload, frame.num_events, frame.kind) for frame in store.read()]
        assert read == [(payload, number, FrameKind.EVENTS) for number, payload in enumerate(payloads, start=1)]
        store.close()

    def test_reading_begins_with_the_frame_that_holds_the_sequence(self, tmp_path: Path) -> None:
        """`from_sequence` in the middle of a frame yields the whole frame; behind the end it yields nothing."""
        store = self.open_store(tmp_path)
        for payload in (b"a", b"b", b"c"):
            store.append(payload, 3)
        expected = {1: b"abc", 3: b"abc", 4: b"bc", 6: b"bc", 7: b"c", 9: b"c", 10: b"", 99: b""}
        assert {start: b"".join(frame.payload for frame in store.read(start)) for start in expected} == expected
        store.close()

    def test_the_chain_goes_through_every_frame(self, tmp_path: Path) -> None:
        """Each chain hash follows from the one before and the frame; the last one is the head."""
        store = self.open_store(tmp_path)
        previous = store.head_hash
        store.append(b"first", 1)
        store.append_gap(2, "lost")
        store.append(b"third", 3)
        for frame in store.read():
            assert frame.chain_hash == next_chain_hash(previous, frame)
            previous = frame.chain_hash
        assert previous == store.head_hash
        store.close()

    def test_a_gap_accounts_for_lost_events(self, tmp_path: Path) -> None:
        """A gap takes sequence numbers and says why; the next append goes on behind it."""
        store = self.open_store(tmp_path)
        assert store.append_gap(5, "disk full: größer") == 1
        assert store.append(b"after", 1) == 6  # noqa: PLR2004 - behind a gap of five
        gap = next(iter(store.read()))
        assert (gap.kind, gap.num_events, gap.payload.decode()) == (FrameKind.GAP, 5, "disk full: größer")
        store.close()

    def test_an_append_at_the_expected_sequence_goes_through(self, tmp_path: Path) -> None:
        """`expected_sequence` equal to the end of the log changes nothing about an append."""
        store = self.open_store(tmp_path)
        assert store.append(b"a", 2, expected_sequence=1) == 1
        assert store.append(b"b", 1, expected_sequence=3) == 3  # noqa: PLR2004 - behind two events
        store.close()

    def test_an_append_anywhere_else_is_a_conflict(self, tmp_path: Path) -> None:
        """A place that is taken, one within a frame, one that the log has not reached: nothing is written."""
        store = self.open_store(tmp_path)
        store.append(b"a", 2)
        head = store.head_hash
        for place in (0, 1, 2, 4):
            _refused(AppendConflict, lambda s=place: store.append(b"a", 2, expected_sequence=s))  # type: ignore[misc]
        assert (store.next_sequence, store.head_hash) == (3, head)
        store.close()

    def test_a_frame_without_events_is_refused(self, tmp_path: Path) -> None:
        """Zero or fewer events would share a sequence number; the log stays as it was."""
        store = self.open_store(tmp_path)
        for num_events in (0, -1, 1 << 32):
            _refused(ValueError, lambda n=num_events: store.append(b"a", n))  # type: ignore[misc]
            _refused(ValueError, lambda n=num_events: store.append_gap(n, "a"))  # type: ignore[misc]
        assert store.next_sequence == 1
        store.close()

    def test_a_closed_store_takes_no_appends_and_can_be_read(self, tmp_path: Path) -> None:
        """Closing twice is fine; appending and flushing afterwards is `LogClosed`; reading still works."""
        store = self.open_store(tmp_path)
        store.append(b"kept", 1)
        store.flush()
        store.close()
        store.close()
        _refused(LogClosed, lambda: store.append(b"late", 1))
        _refused(LogClosed, lambda: store.append(b"late", 1, expected_sequence=store.next_sequence))
        _refused(LogClosed, lambda: store.append_gap(1, "late"))
        _refused(LogClosed, store.flush)
        assert [frame.payload for frame in store.read()] == [b"kept"]
