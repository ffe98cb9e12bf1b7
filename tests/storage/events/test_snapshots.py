"""A snapshot beside a log is used only where it is intact, of this log, of this code, and before its segment."""

from __future__ import annotations

from pathlib import Path

import attrs

from kvledger.storage.events import (
    SegmentEventStore,
    Snapshot,
    find_snapshot,
    load_snapshot,
    retire,
    segments_without_snapshot,
    write_snapshot,
)
from kvledger.storage.events.segment_file import read_header

_FINGERPRINT = "code of today"


def _log_with_snapshots(directory: Path) -> tuple[str, list[Snapshot]]:
    """Write some segments, with a snapshot of each but the first."""
    store = SegmentEventStore.create(directory, {}, segment_bytes=540)
    for number in range(20):
        store.append(b"%03d" % number * 20, 2)
    store.close()
    snapshots = []
    for segment in segments_without_snapshot(directory):
        header = read_header(segment)
        state = b"state %d" % header.first_sequence
        before = header.first_sequence - 1
        snapshots.append(Snapshot(header.log_id, before, header.previous_head_hash, _FINGERPRINT, state, b"reader"))
        write_snapshot(segment, snapshots[-1])
    assert len(snapshots) > 3
    assert segments_without_snapshot(directory) == []
    return snapshots[0].log_id, snapshots


def test_a_snapshot_is_found_again_as_it_was(tmp_path: Path) -> None:
    """The earliest, the newest, the earliest at or before an event; none left over, nothing half written."""
    log_id, snapshots = _log_with_snapshots(tmp_path)
    assert find_snapshot(tmp_path, log_id=log_id, fingerprint=_FINGERPRINT) == (snapshots[0], [])
    assert find_snapshot(tmp_path, log_id=log_id, fingerprint=_FINGERPRINT, newest=True) == (snapshots[-1], [])
    found, _ = find_snapshot(
        tmp_path, log_id=log_id, fingerprint=_FINGERPRINT, newest=True, at_most=snapshots[2].sequence
    )
    assert found == snapshots[2]
    assert len(list(tmp_path.glob("*.snapshot"))) == len(snapshots)
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_stale_snapshot_is_passed_over_with_the_reason(tmp_path: Path) -> None:
    """Written by other code: its state may mean something else."""
    log_id, snapshots = _log_with_snapshots(tmp_path)
    found, reasons = find_snapshot(tmp_path, log_id=log_id, fingerprint="code of tomorrow")
    assert found is None
    assert len(reasons) == len(snapshots)
    assert all("stale" in reason for reason in reasons)


def test_a_snapshot_of_another_log_or_another_history_is_foreign(tmp_path: Path) -> None:
    """Another log's file under the same name; this log's id with a hash or an event that the log does not have."""
    log_id, snapshots = _log_with_snapshots(tmp_path / "log")
    _, others = _log_with_snapshots(tmp_path / "other")
    segments = sorted((tmp_path / "log").glob("*.kvlog"))[1:]
    forged = [
        others[0],
        attrs.evolve(snapshots[1], chain_hash=bytes(16)),
        attrs.evolve(snapshots[2], sequence=snapshots[2].sequence - 1),
    ]
    for segment, snapshot in zip(segments, forged, strict=False):
        write_snapshot(segment, snapshot)
    found, reasons = find_snapshot(tmp_path / "log", log_id=log_id, fingerprint=_FINGERPRINT)
    assert found == snapshots[3]
    assert [("foreign" in reason) for reason in reasons] == [True, True, True]


def test_a_snapshot_with_any_byte_flipped_or_cut_is_passed_over(tmp_path: Path) -> None:
    """Each byte, and each length."""
    _log_with_snapshots(tmp_path)
    path = min(tmp_path.glob("*.snapshot"))
    whole = path.read_bytes()
    for offset in range(len(whole)):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        assert isinstance(load_snapshot(path, fingerprint=_FINGERPRINT), str), offset
        path.write_bytes(whole[:offset])
        assert isinstance(load_snapshot(path, fingerprint=_FINGERPRINT), str), offset
    path.write_bytes(whole)
    assert isinstance(load_snapshot(path, fingerprint=_FINGERPRINT), Snapshot)
    path.unlink()
    assert isinstance(load_snapshot(path, fingerprint=_FINGERPRINT), str)


def test_a_snapshot_goes_with_its_segment_and_the_first_that_stays_has_its_own(tmp_path: Path) -> None:
    """After segments were retired the log can still be begun from a snapshot."""
    log_id, snapshots = _log_with_snapshots(tmp_path)
    gone = retire(tmp_path, max_bytes=sum(path.stat().st_size for path in tmp_path.glob("*.kvlog")) // 2)
    assert gone
    assert {path.stem for path in tmp_path.glob("*.snapshot")} == {path.stem for path in tmp_path.glob("*.kvlog")}
    found, reasons = find_snapshot(tmp_path, log_id=log_id, fingerprint=_FINGERPRINT)
    assert (found, reasons) == (snapshots[len(gone) - 1], [])
