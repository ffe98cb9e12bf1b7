"""Files made of a stream: what the stream holds, fetched once, trusted only when the stream confirms it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import stat
from pathlib import Path
from typing import Any

import nats
import pytest
from log_torture import read_to_end, reopened
from nats.js import JetStreamContext
from nats_server import NatsServer, fill, segments_of, write_log
from planted_files import KINDS, plant

from kvledger.storage.events import LogError, read_log
from kvledger.storage.events.nats import (
    Access,
    StreamAddress,
    StreamRefused,
    default_mirror_directory,
    logs_in_stream,
    mirror,
    new_stream,
)
from kvledger.storage.events.segment_file import read_header

Ship = Any


def fetch(server: NatsServer, directory: Path, log_id: str = "") -> tuple[list[Path], int]:
    """Mirror, and return the directories and how many messages were there already."""
    seen: list[int] = []
    address = StreamAddress.parse(f"{server.url}/KVLEDGER/{log_id}")
    logs = mirror(address, directory, access=Access(), on_progress=lambda done, _all: seen.append(done))
    return logs, seen[0]


def test_only_what_is_missing_is_fetched(server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random) -> None:
    """A mirror grows with the log."""
    log = write_log(tmp_path / "log", chance, 300)
    ship(log, server.url)
    (copy,), num_known = fetch(server, tmp_path / "mirror")
    assert num_known == 0
    store = reopened(log, segment_bytes=20_000)
    fill(store, chance, 100)
    store.close()
    num_shipped = 300 + len(segments_of(copy))
    ship(log, server.url)
    (copy,), num_known = fetch(server, tmp_path / "mirror")
    assert num_known == num_shipped
    assert segments_of(copy) == segments_of(log)


def test_what_an_interrupted_run_left_is_gone_on_with(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Bytes behind the last note of how far it came are fetched again, and a segment that it does not know as well."""
    log = write_log(tmp_path / "log", chance, 100)
    ship(log, server.url)
    (copy,), _ = fetch(server, tmp_path / "mirror")
    store = reopened(log, segment_bytes=20_000)
    fill(store, chance, 200)
    store.close()
    ship(log, server.url)
    max(copy.glob("*.kvlog")).open("ab").write(b"half a batch")
    (copy / "00000000000000099999.kvlog").write_bytes(b"the beginning of another segment")
    (copy,), num_known = fetch(server, tmp_path / "mirror")
    assert num_known >= 100
    assert segments_of(copy) == segments_of(log)


DAMAGES = [
    "its last bytes are others",
    "it is shorter",
    "a segment is gone",
    "its note is gone",
    "its note is nonsense",
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_mirror_that_the_stream_does_not_confirm_is_discarded(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random, damage: str
) -> None:
    """And fetched again, so that a verdict is about the stream and not about the cache."""
    log = write_log(tmp_path / "log", chance, 300)
    ship(log, server.url)
    (copy,), _ = fetch(server, tmp_path / "mirror")
    last = max(copy.glob("*.kvlog"))
    if damage == DAMAGES[0]:
        data = last.read_bytes()
        last.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == DAMAGES[1]:
        last.write_bytes(last.read_bytes()[:-1])
    elif damage == DAMAGES[2]:
        min(copy.glob("*.kvlog")).unlink()
    elif damage == DAMAGES[3]:
        (copy / "mirror.json").unlink()
    else:
        (copy / "mirror.json").write_text('{"stream_sequence": 1')
    (copy,), num_known = fetch(server, tmp_path / "mirror")
    assert num_known == 0
    assert segments_of(copy) == segments_of(log)


def test_a_note_cannot_lead_out_of_the_mirror(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Names come from files and messages, which others may have written."""
    log = write_log(tmp_path / "log", chance, 30)
    ship(log, server.url)
    (copy,), _ = fetch(server, tmp_path / "mirror")
    outside = tmp_path / "mirror" / "outside.kvlog"
    outside.write_bytes(b"x" * 100_000)
    note = json.loads((copy / "mirror.json").read_text())
    note["segments"]["../outside.kvlog"] = 10
    (copy / "mirror.json").write_text(json.dumps(note))
    fetch(server, tmp_path / "mirror")
    assert outside.stat().st_size == 100_000


def test_a_directory_that_is_no_mirror_is_not_overwritten(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Somebody may give the directory of the logs themselves."""
    log = write_log(tmp_path / "logs" / "log", chance, 30)
    log_id = ship(log, server.url).logs[0].log_id
    before = segments_of(log)
    log = log.rename(tmp_path / "logs" / log_id)
    with pytest.raises(LogError, match="is not a mirror"):
        fetch(server, tmp_path / "logs")
    assert segments_of(log) == before


def test_a_mirror_is_its_owners_alone(server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random) -> None:
    """Logs are nobody else's business."""
    ship(write_log(tmp_path / "log", chance, 3), server.url)
    (copy,), _ = fetch(server, tmp_path / "mirror")
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700


def test_a_log_is_found_by_the_beginning_of_its_id(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Without one, every log of the stream is fetched."""
    logs = [write_log(tmp_path / "logs" / str(number), chance, 20) for number in range(5)]
    report = ship(tmp_path / "logs", server.url)
    wanted = report.logs[3].log_id
    (copy,), _ = fetch(server, tmp_path / "mirror", wanted[:12])
    assert segments_of(copy) == segments_of(logs[3])
    copies, _ = fetch(server, tmp_path / "mirror")
    assert {path.name for path in copies} == {log.log_id for log in report.logs}


@pytest.mark.parametrize("log_id", ["ffffffffffffffffffffffffffffffff", "0"])
def test_an_id_that_means_no_log_is_refused(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random, log_id: str
) -> None:
    """With the way to find out which there are."""
    log = write_log(tmp_path / "log", chance, 3)
    shipped = ship(log, server.url).logs[0].log_id
    if shipped.startswith(log_id):
        log_id = "1"
    with pytest.raises(StreamRefused, match="--list"):
        fetch(server, tmp_path / "mirror", log_id)


def test_the_list_says_who_wrote_what_up_to_where(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Two requests a log, no log is fetched."""
    log = write_log(tmp_path / "log", chance, 100)
    ship(log, server.url, label="engine-7")
    (found,) = logs_in_stream(StreamAddress.parse(server.url), access=Access())
    reader = read_log(log)
    num_frames = sum(1 for _ in reader)
    assert (found.label, found.num_messages) == ("engine-7", num_frames + len(segments_of(log)))
    assert found.header is not None
    assert found.header.header == {"made": "for a test"}
    assert found.last is not None
    assert (found.last.next_sequence, found.last.chain_hash) == (reader.next_sequence, reader.head_hash)


def test_a_hole_in_the_stream_shows_in_the_files(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Nobody patches it over: reading the mirror names the missing sequences."""
    log = write_log(tmp_path / "log", chance, 50)
    ship(log, server.url)
    server.delete_messages(range(10, 13))
    (copy,), _ = fetch(server, tmp_path / "mirror")
    assert [damage.kind for damage in read_to_end(copy).damage] == ["sequence_gap"]


def test_a_stream_that_dropped_its_oldest_messages_gives_the_segments_that_are_whole(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """What is left of a segment without its header cannot be read; from the next header on all is there."""
    log = write_log(tmp_path / "log", chance, 500)
    ship(log, server.url)
    server.delete_messages(range(1, 20))
    (copy,), _ = fetch(server, tmp_path / "mirror")
    whole = segments_of(log)
    whole.pop(min(whole))
    assert segments_of(copy) == whole
    (again,), num_known = fetch(server, tmp_path / "mirror")
    assert num_known > 0
    assert segments_of(again) == whole


def test_a_stream_without_any_beginning_of_a_log_says_so(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Instead of an empty log."""
    ship(write_log(tmp_path / "log", chance, 20, segment_bytes=1 << 20), server.url)
    server.delete_messages(range(1, 5))
    with pytest.raises(LogError, match="no beginning of a segment"):
        fetch(server, tmp_path / "mirror")


def test_of_several_logs_one_that_cannot_be_read_does_not_keep_the_others(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """It is named, and `newest` fetches but one."""
    first = write_log(tmp_path / "logs" / "1", chance, 20, segment_bytes=1 << 20)
    ship(first, server.url)
    write_log(tmp_path / "logs" / "2", chance, 20)
    first_id, second_id = (log.log_id for log in ship(tmp_path / "logs", server.url).logs)
    server.delete_messages(range(1, 3))
    skipped: list[str] = []
    address = StreamAddress.parse(server.url)
    copies = mirror(address, tmp_path / "mirror", access=Access(), on_skipped=skipped.append)
    assert [copy.name for copy in copies] == [second_id]
    assert len(skipped) == 1
    assert first_id in skipped[0]
    assert [copy.name for copy in mirror(address, tmp_path / "other", access=Access(), newest=True)] == [second_id]
    assert [path.name for path in (tmp_path / "other").iterdir()] == [second_id]


def test_a_stream_that_drops_the_oldest_is_read_while_it_does(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """`--discard old`: the newest segments, whole, and a warning when shipping."""
    log = write_log(tmp_path / "log", chance, 1_000, segment_bytes=5_000)
    ship(log, server.url, new_stream=new_stream(max_bytes=200_000, keeps_newest=True))
    assert any("drops its oldest" in remark for remark in ship.remarks)
    (copy,), _ = fetch(server, tmp_path / "mirror")
    found, whole = segments_of(copy), segments_of(log)
    assert 3 < len(found) < len(whole)
    assert found == dict(list(whole.items())[-len(found) :])


RECORD = {
    "log": "log",
    "num_bytes": 1000,
    "reason": "size",
    "retired_at_unix_ns": 1_750_000_000_000_000_000,
}


def test_what_was_retired_before_it_was_shipped_is_recorded_in_the_mirror(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """The record goes along with the first header block behind the gap: so a mirror is as sound as the files."""
    log = write_log(tmp_path / "log", chance, 500, segment_bytes=10_000)
    segments = sorted(log.glob("*.kvlog"))
    with (log / "retired.jsonl").open("w") as record:
        for segment, following in itertools.pairwise(segments[:4]):
            header, next_header = read_header(segment), read_header(following)
            line = {
                **RECORD,
                "log_id": header.log_id,
                "segment": segment.name,
                "first_sequence": header.first_sequence,
                "last_sequence": next_header.first_sequence - 1,
                "previous_head_hash": header.previous_head_hash.hex(),
                "head_hash": next_header.previous_head_hash.hex(),
            }
            record.write(json.dumps(line) + "\n")
    for segment in segments[:3]:
        segment.unlink()
    ship(log, server.url)
    (copy,), _ = fetch(server, tmp_path / "mirror")
    (line,) = map(json.loads, filter(str.strip, (copy / "retired.jsonl").read_text().splitlines()))
    last = read_header(segments[3])
    assert (line["first_sequence"], line["last_sequence"]) == (1, last.first_sequence - 1)
    assert (line["previous_head_hash"], line["head_hash"]) == ("0" * 32, last.previous_head_hash.hex())
    assert (line["num_bytes"], line["reason"]) == (3000, "size")


def test_what_a_stream_dropped_by_its_limits_is_recorded_and_what_was_deleted_is_not(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """A bounded stream loses its oldest messages as a matter of course; an unbounded one does not."""
    log = write_log(tmp_path / "log", chance, 300)
    ship(log, server.url, new_stream=new_stream(max_age_s=86400))
    server.delete_messages(range(1, 20))
    (copy,), _ = fetch(server, tmp_path / "mirror")
    (line,) = map(json.loads, filter(str.strip, (copy / "retired.jsonl").read_text().splitlines()))
    first = read_header(min(copy.glob("*.kvlog")))
    assert (line["first_sequence"], line["last_sequence"]) == (1, first.first_sequence - 1)
    assert (line["head_hash"], line["reason"]) == (first.previous_head_hash.hex(), "age")
    server.asked(keep_for_ever)
    (copy,), _ = fetch(server, tmp_path / "other")
    assert not (copy / "retired.jsonl").exists()


async def keep_for_ever(jetstream: JetStreamContext) -> None:
    """Change the stream: it drops nothing."""
    configuration = (await jetstream.stream_info("KVLEDGER")).config
    await jetstream.update_stream(configuration, max_age=0)


def test_mirrors_live_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each stream of each server in its own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    address = StreamAddress.parse("nats://stream-host:4333/S")
    assert default_mirror_directory(address) == tmp_path / "kvledger" / "nats" / "stream-host-4333" / "S"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mirror.lock", "mirror.json", "mirror.json.unfinished", "a segment"])
def test_a_mirror_writes_into_no_file_of_somebody_else(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random, name: str, kind: str
) -> None:
    """It is brought up to date, or the error names the file; nothing is followed or waited for."""
    log = write_log(tmp_path / "log", chance, 100)
    ship(log, server.url)
    (copy,), _ = fetch(server, tmp_path / "mirror")
    path = max(copy.glob("*.kvlog")) if name == "a segment" else copy / name
    planted = plant(path, kind, tmp_path / "victim")
    store = reopened(log, segment_bytes=20_000)
    fill(store, chance, 30)
    store.close()
    ship(log, server.url)
    try:
        fetch(server, tmp_path / "mirror")
    except (LogError, OSError) as error:
        assert str(copy) in str(error)  # noqa: PT017 -- either is right
    else:
        assert segments_of(copy) == segments_of(log)
    planted.check_untouched()


def test_a_linked_folder_in_a_mirror_is_not_followed(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Its files would be overwritten."""
    log = write_log(tmp_path / "log", chance, 30)
    ship(log, server.url)
    (copy,), _ = fetch(server, tmp_path / "mirror")
    copy.rename(tmp_path / "moved")
    copy.symlink_to(tmp_path / "moved")
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    with pytest.raises(OSError, match="is a symbolic link, which kvledger does not follow"):
        fetch(server, tmp_path / "mirror")
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


def test_a_mirror_is_for_its_owner_only_with_any_umask(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """With umask 0 the folders above it were open to everybody."""
    ship(write_log(tmp_path / "log", chance, 30), server.url)
    before = os.umask(0)
    try:
        (copy,), _ = fetch(server, tmp_path / "cache" / "mirror")
    finally:
        os.umask(before)
    for path in (tmp_path / "cache", copy.parent, copy):
        assert path.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in copy.glob("*.kvlog")} == {0o600}


def test_a_subject_that_is_no_log_id_names_no_folder(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """A subject may hold slashes: whoever writes to the stream could choose where a mirror is made."""
    ship(write_log(tmp_path / "log", chance, 30), server.url)
    target = tmp_path / "chosen"

    async def publish() -> None:
        client = await nats.connect(server.url)
        await client.jetstream().publish(f"kvledger.log.host.{target}", b"anything")
        await client.close()

    asyncio.run(publish())
    skipped: list[str] = []
    address = StreamAddress.parse(f"{server.url}/KVLEDGER")
    (copy,) = mirror(address, tmp_path / "mirror", access=Access(), on_skipped=skipped.append)
    assert copy.parent == tmp_path / "mirror"
    assert not target.exists()
    assert "does not end with a log id" in skipped[0]


def test_a_linked_log_is_not_shipped_and_is_named(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """A stream gets what is in the directory that was given, and nothing from elsewhere."""
    write_log(tmp_path / "logs" / "a", chance, 30)
    elsewhere = write_log(tmp_path / "mine" / "log", chance, 30)
    (tmp_path / "logs" / "x").symlink_to(elsewhere)
    report = ship(tmp_path / "logs", server.url)
    assert [log.directory.name for log in report.logs] == ["a"]
    assert any("logs/x: is a symbolic link" in text for text in ship.remarks)
