"""A killed process loses nothing that it had logged."""

from __future__ import annotations

import fcntl
import random
import subprocess
import sys
from pathlib import Path

from kvledger.storage.events import SegmentEventStore, read_log

_NUM_KILLS = 15
_F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", 1031)

_WRITER = """
import os, sys
from kvledger.storage.events import SegmentEventStore
store = SegmentEventStore.open(sys.argv[1], sys.argv[2], segment_bytes=40_000, sync_interval_ms=1)
while True:
    number = store.next_sequence
    store.append(b"%d:" % number * (number * 7919 % 97), 1)
    os.write(1, b"%d\\n" % number)
"""


def _payload(number: int) -> bytes:
    return b"%d:" % number * (number * 7919 % 97)


def test_every_acknowledged_frame_survives_kill_nine(tmp_path: Path, chance: random.Random) -> None:
    """A writer is killed at random moments and started again on the same log: one unbroken chain, nothing missing."""
    SegmentEventStore.create(tmp_path, {}).close()
    for _ in range(_NUM_KILLS):
        durability = chance.choice(["os", "os", "disk"])
        command = [sys.executable, "-c", _WRITER, str(tmp_path), durability]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            fcntl.fcntl(writer.stdout, _F_SETPIPE_SZ, 4096)  # so that the writer is never far ahead
            lines = [writer.stdout.readline() for _ in range(chance.randrange(1, 200))]
            writer.kill()
            lines += writer.stdout.readlines()
        num_acknowledged = max(int(line) for line in lines if line.endswith(b"\n"))
        reader = read_log(tmp_path)
        frames = list(reader)
        assert len(frames) >= num_acknowledged
        assert [frame.first_sequence for frame in frames] == list(range(1, len(frames) + 1))
        assert all(frame.payload == _payload(frame.first_sequence) for frame in frames)
        assert {damage.kind for damage in reader.damage} <= {"torn_tail"}
    store = SegmentEventStore.open(tmp_path)
    assert store.recovery.num_frames == store.next_sequence - 1 >= num_acknowledged
    store.close()
