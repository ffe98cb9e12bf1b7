"""Every store keeps the promises of `EventStore`: sequence numbers, chain, reading, conflicts, closing.

What survives a crash, what damage does and who else may write differs from store to store, and is tested elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvledger.storage.events import (
    AppendConflict,
    BacklogEventStore,
    Durability,
    EventStore,
    FrameKind,
    LogClosed,
    MemoryEventStore,
    SegmentEventStore,
)
from kvledger.storage.events.frames import next_chain_hash


def _new_segments(directory: Path, **settings: object) -> SegmentEventStore:
    return SegmentEventStore.create(directory, {"made_by": "test"}, **settings)  # type: ignore[arg-type]


STORES = {
    "memory": lambda _directory: MemoryEventStore({"made_by": "test"}),
    "segments": _new_segments,
    "segments on disk": lambda directory: _new_segments(directory, durability=Durability.DISK),
    "one frame a segment": lambda directory: _new_segments(directory, segment_bytes=1),
    "backlog": lambda directory: BacklogEventStore(_new_segments(directory)),
}


@pytest.fixture(params=STORES.values(), ids=STORES.keys())
def store(request: pytest.FixtureRequest, tmp_path: Path) -> EventStore:
    """An empty log, which the test closes."""
    made: EventStore = request.param(tmp_path)
    return made


@pytest.mark.filterwarnings("error")
def test_an_empty_log_begins_at_one(store: EventStore) -> None:
    """The first sequence number is 1, there is nothing to read, and there is a hash to anchor."""
    assert store.next_sequence == 1
    assert list(store.read()) == []
    assert len(store.head_hash) == 16
    store.close()


def test_sequence_numbers_have_no_gap(store: EventStore) -> None:
    """Each append returns its first sequence number, which follows the last of the one before."""
    assert [store.append(b"a", 1), store.append(b"bcd", 3), store.append(b"", 2)] == [1, 2, 5]
    assert store.next_sequence == 7
    store.close()


def test_what_was_appended_is_read_back(store: EventStore) -> None:
    """Payloads come back byte for byte, with their counts and kinds, in order."""
    payloads = [b"", b"\x00", bytes(range(256)), b"KVLEDGER\xf5K" * 9]
    for number, payload in enumerate(payloads, start=1):
        store.append(payload, number)
    read = [(frame.payload, frame.num_events, frame.kind) for frame in store.read()]
    assert read == [(payload, number, FrameKind.EVENTS) for number, payload in enumerate(payloads, start=1)]
    store.close()


def test_reading_begins_with_the_frame_that_holds_the_sequence(store: EventStore) -> None:
    """`from_sequence` in the middle of a frame yields the whole frame; behind the end it yields nothing."""
    for payload in (b"a", b"b", b"c"):
        store.append(payload, 3)
    expected = {1: b"abc", 3: b"abc", 4: b"bc", 6: b"bc", 7: b"c", 9: b"c", 10: b"", 99: b""}
    assert {start: b"".join(frame.payload for frame in store.read(start)) for start in expected} == expected
    store.close()


@pytest.mark.parametrize("store", [make for name, make in STORES.items() if "one frame" not in name], indirect=True)
def test_the_chain_goes_through_every_frame(store: EventStore) -> None:
    """Each chain hash follows from the one before and the frame; the last one is the head."""
    previous = store.head_hash
    store.append(b"first", 1)
    store.append_gap(2, "lost")
    store.append(b"third", 3)
    for frame in store.read():
        assert frame.chain_hash == next_chain_hash(previous, frame)
        previous = frame.chain_hash
    assert previous == store.head_hash
    store.close()


def test_a_gap_accounts_for_lost_events(store: EventStore) -> None:
    """A gap takes sequence numbers and says why; the next append goes on behind it."""
    assert store.append_gap(5, "disk full: größer") == 1
    assert store.append(b"after", 1) == 6
    gap = next(iter(store.read()))
    assert (gap.kind, gap.num_events, gap.payload.decode()) == (FrameKind.GAP, 5, "disk full: größer")
    store.close()


def test_an_append_anywhere_but_at_the_end_is_a_conflict(store: EventStore) -> None:
    """A place that is taken, one within a frame, one that the log has not reached: nothing is written."""
    assert store.append(b"a", 2, expected_sequence=1) == 1
    head = store.head_hash
    for place in (0, 1, 2, 4):
        with pytest.raises(AppendConflict):
            store.append(b"a", 2, expected_sequence=place)
    assert (store.next_sequence, store.head_hash) == (3, head)
    assert store.append(b"b", 1, expected_sequence=3) == 3
    store.close()


@pytest.mark.parametrize("num_events", [0, -1, 1 << 32])
def test_a_frame_without_events_is_refused(store: EventStore, num_events: int) -> None:
    """Zero or fewer events would share a sequence number; the log stays as it was."""
    with pytest.raises(ValueError, match="a frame holds 1 to"):
        store.append(b"a", num_events)
    with pytest.raises(ValueError, match="a frame holds 1 to"):
        store.append_gap(num_events, "a")
    assert store.next_sequence == 1
    store.close()


def test_a_closed_store_takes_no_appends_and_can_be_read(store: EventStore) -> None:
    """Closing twice is fine; appending and flushing afterwards is `LogClosed`; reading still works."""
    store.append(b"kept", 1)
    store.flush()
    store.close()
    store.close()
    with pytest.raises(LogClosed):
        store.append(b"late", 1)
    with pytest.raises(LogClosed):
        store.append(b"late", 1, expected_sequence=store.next_sequence)
    with pytest.raises(LogClosed):
        store.append_gap(1, "late")
    with pytest.raises(LogClosed):
        store.flush()
    assert [frame.payload for frame in store.read()] == [b"kept"]
