"""Reading a log that is damaged, forged, incomplete or still being written."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from log_torture import reopened
from processes import started

from kvledger.storage.events import Frame, FrameKind, LogError, LogReader, SegmentEventStore, read_log
from kvledger.storage.events.frames import encode_frame
from kvledger.storage.events.segment_file import decode_header

_HEADER_BYTES = 39


def _write_log(directory: Path, payloads: list[bytes], segment_bytes: int = 1 << 20) -> list[Frame]:
    store = SegmentEventStore.create(directory, {"block_size": 16}, segment_bytes=segment_bytes)
    for payload in payloads:
        store.append(payload, 2)
    store.close()
    return list(store.read())


def _frames_and_damage(path: Path, from_sequence: int = 1) -> tuple[list[Frame], list[tuple[str, int | None]]]:
    reader = LogReader(path, from_sequence, settle_seconds=0)
    frames = list(reader)
    return frames, [(damage.kind, damage.sequence) for damage in reader.damage]


def _only_segment(directory: Path) -> Path:
    (segment,) = directory.glob("*.kvlog")
    return segment


def test_frames_behind_damage_are_found_again(tmp_path: Path, chance: random.Random) -> None:
    """Random stretches of noise, shorter and longer than a frame: all frames outside them are read, in order."""
    frames = _write_log(tmp_path, [chance.randbytes(chance.randrange(200)) for _ in range(100)])
    segment = _only_segment(tmp_path)
    whole = segment.read_bytes()
    start = len(whole) - sum(_HEADER_BYTES + len(frame.payload) for frame in frames)
    for _ in range(20):
        num_noise_bytes = chance.randrange(1, 600)
        first = chance.randrange(start, len(whole) - num_noise_bytes)
        noise = bytes(byte ^ chance.randrange(1, 256) for byte in whole[first : first + num_noise_bytes])
        segment.write_bytes(whole[:first] + noise + whole[first + num_noise_bytes :])
        expected, offset = [], start
        for frame in frames:
            end = offset + _HEADER_BYTES + len(frame.payload)
            if end <= first or offset >= first + num_noise_bytes:
                expected.append(frame)
            offset = end
        read, damage = _frames_and_damage(tmp_path)
        assert read == expected
        kind = "torn_tail" if not expected or expected[-1] != frames[-1] else "corrupt_frame"
        assert [found for found, _ in damage] == [kind]


def test_damage_says_which_sequences_are_lost(tmp_path: Path) -> None:
    """Place, size and range are there for a human to read."""
    frames = _write_log(tmp_path, [b"one", b"two", b"three"])
    segment = _only_segment(tmp_path)
    data = segment.read_bytes()
    segment.write_bytes(data.replace(b"two", b"TWO"))
    reader = read_log(tmp_path)
    assert list(reader) == [frames[0], frames[2]]
    (damage,) = reader.damage
    assert (damage.kind, damage.segment, damage.sequence) == ("corrupt_frame", segment.name, 3)
    assert (damage.offset, damage.num_bytes) == (data.index(b"two") - _HEADER_BYTES, _HEADER_BYTES + 3)
    assert "sequences 3 to 4 are lost" in damage.detail


def test_a_segment_rewritten_to_its_end_does_not_fit_the_next_one(tmp_path: Path) -> None:
    """A forger who chains a whole segment anew is found out by the hash that the next header names."""
    _write_log(tmp_path, [b"one", b"two"], segment_bytes=1)
    segment = tmp_path / "00000000000000000001.kvlog"
    data = segment.read_bytes()
    header_bytes = data[: -_HEADER_BYTES - 3]
    header = decode_header(header_bytes, segment.name)
    segment.write_bytes(header_bytes + encode_frame(FrameKind.EVENTS, 1, 2, b"ONE", header.chain_hash)[0])
    reader = read_log(tmp_path)
    assert [frame.payload for frame in reader] == [b"ONE", b"two"]
    assert [(found.kind, found.segment, found.offset) for found in reader.damage] == [
        ("chain_broken", "00000000000000000003.kvlog", 0)
    ]


def test_one_segment_file_can_be_read_alone(tmp_path: Path) -> None:
    """A file copied out of a log, under any name, is read from its own first sequence, without complaint."""
    frames = _write_log(tmp_path / "log", [b"one", b"two", b"three"], segment_bytes=1)
    copy = tmp_path / "copied from an incident"
    copy.write_bytes((tmp_path / "log" / "00000000000000000003.kvlog").read_bytes())
    reader = read_log(copy)
    assert list(reader) == [frames[1]]
    assert (reader.damage, reader.header["block_size"]) == ([], 16)


def test_reading_from_a_sequence_starts_in_its_segment(tmp_path: Path) -> None:
    """Earlier segments are not opened, so damage there does not matter; an iteration can be repeated."""
    frames = _write_log(tmp_path, [b"one", b"two", b"three"], segment_bytes=1)
    first = tmp_path / "00000000000000000001.kvlog"
    first.write_bytes(b"\0" * first.stat().st_size)
    for from_sequence in (3, 4, 5):
        assert _frames_and_damage(tmp_path, from_sequence) == (frames[2 if from_sequence == 5 else 1 :], [])
    reader = read_log(tmp_path)
    assert list(reader) == list(reader) == frames[1:]
    assert [damage.kind for damage in reader.damage] == ["corrupt_header"]


def test_what_is_no_log_is_said_so(tmp_path: Path) -> None:
    """An empty directory, nothing at all, and a file of something else."""
    with pytest.raises(LogError, match="give the log's own directory"):
        read_log(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    reader = read_log(tmp_path / "notes.txt")
    assert (list(reader), reader.header, [damage.kind for damage in reader.damage]) == ([], {}, ["corrupt_header"])


def test_a_log_is_read_while_another_process_writes_it(tmp_path: Path) -> None:
    """Each reading is an undamaged beginning of the log, never shorter than the one before, across new segments."""
    code = (
        "import sys; from kvledger.storage.events import *\n"
        "store = SegmentEventStore.create(sys.argv[1], {}, segment_bytes=20000)\n"
        "print('begun', flush=True)\n"
        "for number in range(3000): store.append(b'%d,' % number * (number % 300), 1)\n"
    )
    num_read = 0
    with started([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        while child.poll() is None:
            reader = read_log(tmp_path, from_sequence=max(1, num_read))
            for frame in reader:
                number = frame.first_sequence - 1
                assert frame.payload == b"%d," % number * (number % 300)
            assert reader.damage == []
            assert reader.next_sequence > num_read
            num_read = reader.next_sequence - 1
        assert child.returncode == 0
    assert [frame.first_sequence for frame in read_log(tmp_path)] == list(range(1, 3001))


def test_reading_changes_nothing(two_segment_log: tuple[Path, list[Frame]]) -> None:
    """No lock is taken and no byte is written, also for a torn log that a writer holds."""
    directory, frames = two_segment_log
    store = reopened(directory)
    segment = max(directory.glob("*.kvlog"))
    with segment.open("ab") as file:
        file.write(b"\xf5K torn")
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.iterdir()}
    assert _frames_and_damage(directory) == (frames, [("torn_tail", 7)])
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.iterdir()} == before
    store.close()


def test_a_large_segment_is_read_in_little_memory(tmp_path: Path) -> None:
    """A file of 48 MiB, sound and with a flipped byte, takes a few windows of a mebibyte, whatever its size."""
    store = SegmentEventStore.create(tmp_path, {}, segment_bytes=1 << 30)
    for number in range(768):
        store.append(bytes([number % 251]) * (1 << 16), 1)
    store.close()
    segment = _only_segment(tmp_path)
    for flipped in (False, True):
        if flipped:
            with segment.open("r+b") as file:
                file.seek(20 << 20)
                file.write(b"\xff\xf5K\xff")
        tracemalloc.start()
        num_frames = sum(1 for _ in read_log(tmp_path))
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert num_frames == (767 if flipped else 768)
        assert peak_bytes < 8 << 20


def test_a_frame_larger_than_the_window_is_read_and_a_damaged_one_costs_no_memory(tmp_path: Path) -> None:
    """A payload of 9 MiB comes back; with a flipped byte its CRC is checked in parts."""
    store = SegmentEventStore.create(tmp_path, {})
    payload = bytes(range(256)) * (9 << 12)
    store.append(b"before", 1)
    store.append(payload, 1)
    store.append(b"behind", 1)
    store.close()
    assert [frame.payload for frame in read_log(tmp_path)] == [b"before", payload, b"behind"]
    segment = _only_segment(tmp_path)
    with segment.open("r+b") as file:
        file.seek(5 << 20)
        file.write(b"flip")
    tracemalloc.start()
    reader = read_log(tmp_path)
    assert [frame.payload for frame in reader] == [b"before", b"behind"]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(damage.kind, damage.sequence, damage.num_bytes) for damage in reader.damage] == [
        ("corrupt_frame", 2, _HEADER_BYTES + len(payload))
    ]
    assert peak_bytes < 8 << 20
