"""With durability ``disk``, a machine that loses power at any moment loses nothing that `flush` had returned for."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from log_torture import Plan, payload_of, write
from log_torture.power import Image, PowerLoss

from kvledger.storage.events import Durability, HowEnded, LogReader, SegmentEventStore, read_ending
from kvledger.storage.events.group_sync import GroupSync

_PLAN = Plan(Durability.DISK, num_appends=16)


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Image]:
    """Write a log with rollovers; return what a machine may find after each change of a file."""
    monkeypatch.setattr(GroupSync, "_run", lambda _self: None)  # syncs come from the writer alone: the same each time
    found: list[Image] = []
    power = PowerLoss(tmp_path / "log", found.append)
    with monkeypatch.context() as patch:
        power.install(patch)
        write(tmp_path / "log", _PLAN, power.acknowledge)
    whole = [image for image in power.images() if image.lost == "nothing"][-1]
    real = {path.name: path.read_bytes() for path in (tmp_path / "log").iterdir()}
    assert whole.files == real, "the model of the disk and the real one differ"
    return found


def _sequences_read(directory: Path) -> tuple[LogReader, list[int]]:
    reader = LogReader(directory, settle_seconds=0)
    sequences = []
    for frame in reader:
        assert frame.payload == payload_of(frame.first_sequence)
        sequences += range(frame.first_sequence, frame.next_sequence)
    return reader, sequences


def test_a_machine_that_loses_power_keeps_everything_that_was_flushed(tmp_path: Path, images: list[Image]) -> None:
    """Each image is read: what was flushed is there, nothing else than was written is read, and what is missing or
    torn stands behind it. More than a torn tail is where a hole of zeros is.
    """
    outcomes: Counter[str] = Counter()
    directory = tmp_path / "found"
    for image in images:
        shutil.rmtree(directory, ignore_errors=True)
        image.write_to(directory)
        where = f"moment {image.moment}, lost {image.lost}, {image.num_names_kept} names kept"
        acknowledged = list(range(1, image.last_acknowledged + 1))
        if not any(directory.glob("*.kvlog")):
            assert not acknowledged, where
            outcomes["no log yet"] += 1
            continue
        reader, sequences = _sequences_read(directory)
        assert sequences[: len(acknowledged)] == acknowledged, where
        first_damaged = [damage.sequence for damage in reader.damage if damage.sequence is not None]
        assert all(sequence > image.last_acknowledged for sequence in first_damaged), where
        ending = read_ending(directory)
        assert reader.damage or not ending.contradiction, where
        assert ending.missing is None or ending.missing.first_sequence > image.last_acknowledged, where
        outcomes[ending.how] += 1
        if {damage.kind for damage in reader.damage} - {"torn_tail"}:
            assert image.lost == "an earlier write, not the last" or not acknowledged, where
            outcomes["a hole"] += 1
    assert outcomes[HowEnded.CLOSED] > 0
    assert outcomes[HowEnded.CUT_OFF] > 50
    assert outcomes["a hole"] > 0


def test_the_names_of_new_directories_are_on_disk_when_a_log_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log whose directory's own name was lost would be lost with everything that was flushed to it."""
    synced: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    SegmentEventStore.create(tmp_path / "logs" / "today", {}, Durability.DISK).close()
    assert {str(tmp_path), str(tmp_path / "logs"), str(tmp_path / "logs" / "today")} <= set(synced)
