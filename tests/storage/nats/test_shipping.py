"""What is shipped is what the files hold, byte for byte, and says so when it cannot be."""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google_crc32c import value as crc32c
from log_torture import read_to_end, reopened
from log_torture.stored import compress_closed, is_compressed
from nats_server import NatsServer, fill, segments_in_stream, segments_of, write_log

from kvledger.storage.events import SegmentEventStore, read_log
from kvledger.storage.events.frames import FrameKind, encode_frame
from kvledger.storage.events.nats import (
    Access,
    StreamAddress,
    StreamRefused,
    StreamUnavailable,
    logs_in_stream,
    mirror,
    new_stream,
)
from kvledger.storage.events.segment_file import encode_header, read_header, segment_name, segment_paths

Ship = Any


def head_hash(log: Path) -> bytes | None:
    """The chain hash at the end of a sound log."""
    reader = read_to_end(log)
    assert not reader.damage, reader.damage
    return reader.head_hash


def test_a_shipped_log_is_the_files_byte_for_byte(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Several segments, whole batches and single frames."""
    log = write_log(tmp_path / "log", chance, 2_000)
    report = ship(log, server.url)
    assert report.is_complete
    assert report.logs[0].num_frames == 2_000
    assert len(segments_of(log)) > 5
    assert segments_in_stream(server.url) == segments_of(log)


def test_shipping_again_adds_nothing(server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random) -> None:
    """The stream says where it is, so nothing is sent twice."""
    log = write_log(tmp_path / "log", chance, 300)
    ship(log, server.url)
    report = ship(log, server.url)
    assert report.is_complete
    assert report.logs[0].num_frames == 0
    assert segments_in_stream(server.url) == segments_of(log)


def test_a_log_that_grew_is_gone_on_with(server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random) -> None:
    """Only what is new is shipped, across the restart of its writer."""
    log = write_log(tmp_path / "log", chance, 100)
    ship(log, server.url)
    store = reopened(log, segment_bytes=20_000)
    fill(store, chance, 100)
    store.close()
    report = ship(log, server.url)
    assert report.logs[0].num_frames == 100
    assert segments_in_stream(server.url) == segments_of(log)


def test_a_log_is_shipped_as_it_was_written_while_its_segments_are_compressed(
    server: NatsServer, ship: Ship, tmp_path: Path
) -> None:
    """The stream gets raw segments; its cursor means the same place before and after."""
    raw: dict[str, bytes] = {}
    log = write_log(tmp_path / "log", random.Random(1), 1)
    for num_frames in (60, 70, 120):
        store = reopened(log, segment_bytes=20_000)
        for number in range(num_frames):
            store.append(b"%d, which can be compressed" % number * 20, 3)
        store.close()
        raw |= {name: data for name, data in segments_of(log).items() if not is_compressed(log / name)}
        compress_closed(log)
        report = ship(log, server.url)
        assert report.is_complete
        assert segments_in_stream(server.url) == raw
    assert sum(map(is_compressed, segment_paths(log))) > 5
    (copy,) = mirror(StreamAddress.parse(server.url), tmp_path / "mirror", access=Access())
    assert segments_of(copy) == raw


def test_an_empty_log_is_its_header(server: NatsServer, ship: Ship, tmp_path: Path) -> None:
    """An engine that just started."""
    SegmentEventStore.create(tmp_path / "log", {}).close()
    report = ship(tmp_path / "log", server.url)
    assert report.is_complete
    assert segments_in_stream(server.url) == segments_of(tmp_path / "log")


def test_every_log_of_a_directory_is_shipped(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Each under its own subject, interleaved in one stream."""
    logs = [write_log(tmp_path / "logs" / name, chance, 200) for name in ("a", "b", "c")]
    report = ship(tmp_path / "logs", server.url)
    assert report.is_complete
    for log, progress in zip(logs, report.logs, strict=True):
        assert segments_in_stream(server.url, progress.log_id) == segments_of(log)


def test_a_live_log_is_followed_over_its_rollovers(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """The writer does not know of the shipper; a log that appears later is taken up as well."""
    logs = tmp_path / "logs"
    logs.mkdir()

    def write() -> None:
        for name in ("first", "second"):
            store = SegmentEventStore.create(logs / name, {}, segment_bytes=5_000)
            for _ in range(20):
                fill(store, chance, 10)
                wait.wait(0.01)
            store.close()

    async def follow() -> Any:
        shipper = ship.make(logs, server.url, follow=True)
        running = asyncio.ensure_future(shipper.run())
        writer.start()
        await asyncio.to_thread(writer.join)
        shipper.stop()
        return await running

    wait = threading.Event()
    writer = threading.Thread(target=write)
    report = asyncio.run(follow())
    assert report.is_complete
    assert len(report.logs) == 2
    for progress in report.logs:
        assert progress.num_frames == 200
        assert len(segments_of(progress.directory)) > 3
        assert segments_in_stream(server.url, progress.log_id) == segments_of(progress.directory)


def test_segments_retired_after_shipping_stay_in_the_stream(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """The stream keeps what the engine's disk does not."""
    log = tmp_path / "log"
    store = SegmentEventStore.create(log, {}, segment_bytes=20_000)
    fill(store, chance, 500)
    ship(log, server.url)
    before = segments_of(log)
    for name in list(before)[:3]:
        (log / name).unlink()
    fill(store, chance, 50)
    store.close()
    report = ship(log, server.url)
    assert report.is_complete
    assert not report.is_damaged
    assert segments_in_stream(server.url) == {**before, **segments_of(log)}


def test_segments_retired_before_shipping_are_named_as_lost(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """What is left is shipped, the report has the gap, and the files made of the stream show it, too."""
    log = write_log(tmp_path / "log", chance, 20)
    ship(log, server.url)
    shipped = segments_of(log)
    store = reopened(log, segment_bytes=2_000)
    fill(store, chance, 200)
    store.close()
    for name in list(segments_of(log))[:4]:
        (log / name).unlink()
    report = ship(log, server.url)
    (first, last), *others = report.logs[0].lost.items()
    assert not others
    assert report.is_damaged
    assert any(f"events {first} to {last} were retired" in remark for remark in ship.remarks)
    assert segments_in_stream(server.url) == {**shipped, **segments_of(log)}
    (copy,) = mirror(StreamAddress.parse(server.url), tmp_path / "mirror", access=Access())
    assert [damage.kind for damage in read_to_end(copy).damage] == ["missing_segment"]


def test_a_retired_log_that_was_never_shipped_begins_late(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """The first segment there is comes first."""
    log = write_log(tmp_path / "log", chance, 300)
    next(iter(sorted(log.glob("*.kvlog")))).unlink()
    report = ship(log, server.url)
    assert list(report.logs[0].lost) == [1]
    assert segments_in_stream(server.url) == segments_of(log)


@pytest.mark.parametrize("where", ["in the last segment", "before it"])
def test_a_damaged_log_is_shipped_up_to_the_damage(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random, where: str
) -> None:
    """Then the shipper says what is wrong, in the reader's words, and ships nothing from behind it."""
    log = write_log(tmp_path / "log", chance, 300)
    segment = sorted(log.glob("*.kvlog"))[-1 if where == "in the last segment" else 2]
    data = bytearray(segment.read_bytes())
    damaged_at = (read_header(segment).num_bytes + len(data)) // 2  # among the frames, however few the last segment has
    data[damaged_at] ^= 1
    segment.write_bytes(data)
    report = ship(log, server.url)
    assert report.is_damaged
    assert "corrupt_frame" in report.logs[0].problem
    stream = segments_in_stream(server.url)
    assert b"".join(segments_of(log).values()).startswith(b"".join(stream.values()))
    assert max(stream) == segment.name
    assert len(stream[segment.name]) <= damaged_at


@pytest.mark.parametrize("what", ["frame", "segment"])
def test_what_does_not_follow_is_not_shipped(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random, what: str
) -> None:
    """Intact and with the right number, of another history: the chain says so."""
    log = write_log(tmp_path / "log", chance, 50)
    ship(log, server.url)
    shipped = segments_in_stream(server.url)
    reader = read_to_end(log)
    if what == "frame":
        with max(log.glob("*.kvlog")).open("ab") as file:
            file.write(encode_frame(FrameKind.EVENTS, reader.next_sequence, 1, b"", b"other".ljust(16))[0])
    else:
        block = encode_header(str(reader.header["log_id"]), reader.next_sequence, b"other".ljust(16), {})
        (log / segment_name(reader.next_sequence)).write_bytes(block)
    report = ship(log, server.url)
    assert "chain_broken" in report.logs[0].problem
    assert segments_in_stream(server.url) == shipped


def test_a_torn_tail_is_not_shipped_and_is_gone_on_behind(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """What a crash left of a frame stays where it is; the stream never saw it."""
    log = write_log(tmp_path / "log", chance, 50)
    segment = max(log.glob("*.kvlog"))
    whole = segment.read_bytes()
    segment.write_bytes(whole + b"\xf5Kand then the power went")
    report = ship(log, server.url)
    assert report.is_damaged
    assert "torn_tail" in report.logs[0].problem
    assert segments_in_stream(server.url)[segment.name] == whole
    store = reopened(log)
    fill(store, chance, 20)
    store.close()
    report = ship(log, server.url)
    assert report.is_complete
    assert not report.is_damaged
    assert segments_in_stream(server.url) == segments_of(log)


def test_a_log_that_lost_what_was_shipped_is_refused(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """After a power cut the file may be shorter, and then continue otherwise: the stream takes no second history."""
    log = write_log(tmp_path / "log", chance, 50)
    ship(log, server.url)
    shipped = segments_in_stream(server.url)
    segment = max(log.glob("*.kvlog"))
    frames = list(read_log(log))
    segment.write_bytes(segment.read_bytes()[: -len(frames[-1].payload) - 39])
    report = ship(log, server.url)
    assert report.is_damaged
    assert "the stream holds" in report.logs[0].problem
    store = reopened(log)
    fill(store, chance, 3)
    store.close()
    report = ship(log, server.url)
    assert report.is_damaged
    assert "the stream holds" in report.logs[0].problem
    assert segments_in_stream(server.url) == shipped


def test_two_copies_of_a_log_that_went_on_differently_are_not_mixed(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Same log id, same places, other bytes: the message ids differ, so nothing is taken for a repetition."""
    log = write_log(tmp_path / "log", chance, 50)
    shutil.copytree(log, tmp_path / "copy")
    for directory in (log, tmp_path / "copy"):
        store = reopened(directory)
        fill(store, chance, 20)
        store.close()
    assert ship(log, server.url).is_complete
    assert ship(tmp_path / "copy", server.url).is_damaged
    assert segments_in_stream(server.url) == segments_of(log)


def test_a_frame_larger_than_the_servers_limit_is_named_and_not_skipped(
    new_server: Callable[[str], NatsServer], ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Everything before it is shipped, nothing behind it; with a larger limit shipping goes on."""
    server = new_server("max_payload: 65536")
    store = SegmentEventStore.create(tmp_path / "log", {})
    fill(store, chance, 30)
    store.append(chance.randbytes(65_400), 3)  # fits the limit only without its headers
    fill(store, chance, 10)
    store.close()
    report = ship(tmp_path / "log", server.url)
    assert not report.is_complete
    assert not report.is_damaged
    assert report.logs[0].num_frames == 30
    for part in ("events", "65536", "max_payload"):
        assert part in report.logs[0].problem
    server.configuration = "max_payload: 131072"
    server.restart()
    assert ship(tmp_path / "log", server.url).is_complete
    assert segments_in_stream(server.url) == segments_of(tmp_path / "log")


def test_frames_up_to_the_limit_are_shipped_and_found_again(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """A message just under the default megabyte, also as the last one, from which a shipper goes on."""
    log = tmp_path / "log"
    store = SegmentEventStore.create(log, {})
    for _ in range(5):
        store.append(chance.randbytes((1 << 20) - 400), 1)
    assert ship(log, server.url).is_complete
    fill(store, chance, 10)
    store.close()
    assert ship(log, server.url).logs[0].num_frames == 10
    assert segments_in_stream(server.url) == segments_of(log)


def test_a_log_stays_under_the_subject_it_began_with(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """A host that was renamed, or a copy of the log shipped from elsewhere, begins no second copy in the stream."""
    log = write_log(tmp_path / "log", chance, 100)
    ship(log, server.url, label="old-name")
    store = reopened(log)
    fill(store, chance, 20)
    store.close()
    report = ship(log, server.url, label="new-name")
    assert report.is_complete
    assert ".old-name." in report.logs[0].subject
    (found,) = logs_in_stream(StreamAddress.parse(server.url), access=Access())
    assert found.label == "old-name"
    assert segments_in_stream(server.url) == segments_of(log)


def test_a_full_stream_refuses_and_loses_nothing(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """What fitted is a beginning of the files; the shipper says so, and gives up when it may.

    Bounds of all kinds: nats-server 2.9 drops the oldest message for one that fits but for the server's overhead.
    """
    store = SegmentEventStore.create(tmp_path / "log", {})
    for _ in range(100):
        store.append(chance.randbytes(20), 1)
    store.close()
    (whole,) = segments_of(tmp_path / "log").values()
    for max_bytes in range(20_000, 20_400, 25):
        with pytest.raises(StreamUnavailable, match="full"):
            ship(tmp_path / "log", server.url, new_stream=new_stream(max_bytes=max_bytes), give_up_after_s=0)
        (stored,) = segments_in_stream(server.url).values()
        assert whole.startswith(stored)
        server.asked(lambda jetstream: jetstream.delete_stream("KVLEDGER"))


def test_the_heads_of_files_and_stream_are_the_same(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """The anchor noted on the engine's machine holds for the stream."""
    log = write_log(tmp_path / "log", chance, 200)
    report = ship(log, server.url)
    (copy,) = mirror(StreamAddress.parse(server.url), tmp_path / "mirror", access=Access())
    assert head_hash(copy) == head_hash(log) == report.logs[0].last.chain_hash


def test_a_log_that_cannot_be_read_does_not_keep_the_others(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """One whose file is no file, one of a later format, one without a readable header: each is named."""
    good = write_log(tmp_path / "logs" / "good", chance, 50)
    (tmp_path / "logs" / "directory" / "00000000000000000001.kvlog").mkdir(parents=True)
    newer = write_log(tmp_path / "logs" / "newer", chance, 5)
    (segment,) = newer.glob("*.kvlog")
    data = bytearray(segment.read_bytes())
    num_body_bytes = int.from_bytes(data[10:14], "little")
    data[8:10] = (99).to_bytes(2, "little")
    data[14:18] = crc32c(bytes(data[:14]) + bytes(data[18 : 18 + num_body_bytes])).to_bytes(4, "little")
    segment.write_bytes(data)
    (tmp_path / "logs" / "rubbish").mkdir()
    (tmp_path / "logs" / "rubbish" / "00000000000000000001.kvlog").write_bytes(b"no log")
    problems = {log.directory.name: log.problem for log in ship(tmp_path / "logs", server.url).logs}
    assert problems["good"] == ""
    assert "cannot be read" in problems["directory"]
    assert "format 99" in problems["newer"]
    assert "no segment has a readable header" in problems["rubbish"]
    assert segments_in_stream(server.url) == segments_of(good)


def test_a_shipped_log_may_vanish(server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random) -> None:
    """Retention takes closed logs altogether; a shipper that follows goes on, and says up to where it has them."""
    logs = [write_log(tmp_path / "logs" / name, chance, 30) for name in ("a", "b")]

    async def follow() -> Any:
        shipper = ship.make(tmp_path / "logs", server.url, follow=True)
        running = asyncio.ensure_future(shipper.run())
        while not (shipper.report().is_complete and len(shipper.logs) == 2):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
        kept = segments_of(logs[0])
        shutil.rmtree(logs[0])
        while not any("deleted" in remark for remark in ship.remarks):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        shipper.stop()
        return await running, kept

    report, kept = asyncio.run(follow())
    assert report.is_complete
    assert not report.is_damaged
    vanished = next(log for log in report.logs if log.directory == logs[0])
    assert segments_in_stream(server.url, vanished.log_id) == kept


UNFIT = {
    "interest": ({"retention": "interest"}, "retention"),
    "work queue": ({"retention": "workqueue"}, "retention"),
    "no acknowledgements": ({"no_ack": True}, "no_ack"),
    "one message a subject": ({"max_msgs_per_subject": 1}, "max_msgs_per_subject"),
    "other subjects": ({"subjects": ["somebody.else.>"]}, "subjects"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_stream_that_would_lose_frames_is_refused(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random, case: str
) -> None:
    """Before anything is sent, with the setting named."""
    settings, word = UNFIT[case]
    server.make_stream(**settings)
    with pytest.raises(StreamRefused, match=word):
        ship(write_log(tmp_path / "log", chance, 10), server.url)


RISKY = {
    "drops the oldest": ({"max_bytes": 1 << 20, "discard": "old"}, "drops its oldest"),
    "in memory": ({"storage": "memory"}, "memory"),
}


@pytest.mark.parametrize("case", RISKY)
def test_what_a_stream_may_lose_is_said_and_shipped(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random, case: str
) -> None:
    """An operator may want that, and should know."""
    settings, word = RISKY[case]
    server.make_stream(**settings)
    assert ship(write_log(tmp_path / "log", chance, 10), server.url).is_complete
    assert any(word in remark for remark in ship.remarks)


def test_a_missing_stream_is_made_only_when_allowed(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """A typing error in the URL must not make a stream nobody looks at."""
    log = write_log(tmp_path / "log", chance, 10)
    with pytest.raises(StreamRefused, match="--create-stream"):
        ship(log, f"{server.url}/KVLEGDER", new_stream=None)
