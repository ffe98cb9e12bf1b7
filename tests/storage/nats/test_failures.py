"""Whatever dies, is cut or is doubled in between: the stream ends equal to the files, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from log_torture import reopened
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import APIError
from nats_server import NatsServer, Proxy, fill, segments_in_stream, segments_of, write_log
from processes import finished, started, wait_until

from kvledger.storage.events import SegmentEventStore
from kvledger.storage.events.nats import (
    Access,
    ShippingReport,
    StreamAddress,
    StreamUnavailable,
    mirror,
    new_stream,
)
from kvledger.storage.events.nats.connection import connect
from kvledger.storage.events.nats.messages import message_headers
from kvledger.storage.events.nats.publisher import BatchResult, publish
from kvledger.storage.events.nats.tail import LogTail

Ship = Any


class Shipping:
    """A shipper that follows in a thread of its own, while the test breaks things."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._ready = threading.Event()
        self.report: ShippingReport | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        self._ready.wait()

    async def _run(self) -> None:
        self.shipper = self._make()
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        try:
            self.report = await self.shipper.run()
        except Exception as error:  # noqa: BLE001 - `stop` raises it
            self.error = error

    @property
    def num_frames(self) -> int:
        """How many frames it has shipped so far."""
        return sum(log.num_frames for log in self.shipper.logs.values())

    @property
    def is_running(self) -> bool:
        """Whether it neither ended nor failed."""
        return self._thread.is_alive()

    def wait_for(self, num_frames: int) -> None:
        """Wait until that many are shipped."""
        wait_until(lambda: self.num_frames >= num_frames or not self.is_running)
        assert self.num_frames >= num_frames

    def stop(self) -> ShippingReport:
        """Let it ship the rest, and end."""
        if self.is_running:
            self._loop.call_soon_threadsafe(self.shipper.stop)
        self._thread.join()
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self.report


def test_a_killed_and_restarted_server_is_gone_on_with(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """`kill -9` of the server, several times, while an engine writes and a shipper ships."""
    store = SegmentEventStore.create(tmp_path / "log", {}, segment_bytes=20_000)
    shipping = Shipping(lambda: ship.make(tmp_path / "log", server.url, follow=True))
    for _ in range(4):
        already = shipping.num_frames
        fill(store, chance, 300)
        shipping.wait_for(already + chance.randrange(1, 300))
        server.kill()
        fill(store, chance, 50)
        server.start()
    store.close()
    assert shipping.stop().is_complete
    assert any("trying again" in remark for remark in ship.remarks)
    assert segments_in_stream(server.url) == segments_of(tmp_path / "log")


def test_a_cut_network_is_gone_on_with(
    server: NatsServer, proxy: Proxy, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Connections break in the middle of messages, again and again; nobody waits for answers that cannot come."""
    log = write_log(tmp_path / "log", chance, 3_000)
    proxy.cut_after(250_000)
    report = ship(log, proxy.url, answer_within_s=86_400)
    assert report.is_complete
    assert proxy.num_cuts >= 3
    assert segments_in_stream(server.url) == segments_of(log)


def test_a_network_that_swallows_everything_is_left_and_gone_on_with(
    server: NatsServer, proxy: Proxy, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """No connection breaks, nobody answers: the shipper notices by itself."""
    store = SegmentEventStore.create(tmp_path / "log", {}, segment_bytes=20_000)
    fill(store, chance, 200)
    shipping = Shipping(lambda: ship.make(tmp_path / "log", proxy.url, follow=True, answer_within_s=0.5))
    shipping.wait_for(200)
    proxy.swallow()
    fill(store, chance, 200)
    wait_until(lambda: any("trying again" in remark for remark in ship.remarks))
    proxy.pass_on()
    store.close()
    shipping.wait_for(400)
    assert shipping.stop().is_complete
    assert segments_in_stream(server.url) == segments_of(tmp_path / "log")


def test_a_log_that_is_shortened_while_it_is_followed_is_stopped(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Nothing is wrong with what is left of the file; the stream has more."""
    log = write_log(tmp_path / "log", chance, 50)
    shipping = Shipping(lambda: ship.make(log, server.url, follow=True))
    shipping.wait_for(50)
    os.truncate(max(log.glob("*.kvlog")), (max(log.glob("*.kvlog"))).stat().st_size - 1)
    wait_until(lambda: any("the stream holds the frame" in remark for remark in ship.remarks))
    assert shipping.stop().is_damaged


def test_a_shipper_killed_at_random_points_is_gone_on_with(
    server: NatsServer, tmp_path: Path, chance: random.Random
) -> None:
    """`kill -9` of the process; the next one finds its place in the stream, there is nothing else to find it in."""
    log = write_log(tmp_path / "log", chance, 4_000, segment_bytes=300_000)
    command = [sys.executable, "-m", "kvledger.adapters.tools.cli.main", "ship", str(log), "--to", server.url]
    before = set(tmp_path.rglob("*"))
    num_killed_in_the_middle = 0
    while num_killed_in_the_middle < 2:
        store = reopened(log, segment_bytes=300_000)
        fill(store, chance, 4_000)
        store.close()
        enough = num_messages(server) + chance.randrange(1, 2_000)
        with started([*command, "--create-stream"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while num_messages(server) < enough and process.poll() is None:
                time.sleep(0.01)  # the process and the server want the processor, too
            num_killed_in_the_middle += process.poll() is None
    left = {path for path in tmp_path.rglob("*") if "server-" not in str(path) and path.suffix != ".kvlog"}
    assert left <= before
    last = finished(command)
    assert last.returncode == 0, last.stderr
    assert segments_in_stream(server.url) == segments_of(log)


def num_messages(server: NatsServer) -> int:
    """How many messages the stream has; 0 if there is no stream yet."""
    with contextlib.suppress(APIError):
        return server.asked(lambda jetstream: jetstream.stream_info("KVLEDGER")).state.messages
    return 0


def test_a_shipper_that_is_told_to_stop_ships_the_rest_and_says_how_it_stands(
    server: NatsServer, tmp_path: Path, chance: random.Random
) -> None:
    """SIGTERM, as systemd and Kubernetes send it; exit code 0 because nothing is left."""
    log = write_log(tmp_path / "log", chance, 100)
    command = [sys.executable, "-m", "kvledger.adapters.tools.cli.main", "ship", str(log), "--to", server.url]
    with started(
        [*command, "--create-stream", "--follow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: num_messages(server) >= 100)
        store = reopened(log, segment_bytes=20_000)
        fill(store, chance, 500)
        store.close()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert "600 frames" in out
    assert segments_in_stream(server.url) == segments_of(log)


def test_a_shipper_that_is_stopped_without_a_server_says_that_something_is_left(
    tmp_path: Path, server: NatsServer, chance: random.Random
) -> None:
    """Exit code 75: the same command later."""
    log = write_log(tmp_path / "log", chance, 10)
    server.kill()
    command = [
        sys.executable,
        "-m",
        "kvledger.adapters.tools.cli.main",
        "ship",
        str(log),
        "--to",
        server.url,
        "--follow",
    ]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert "trying again" in line
    assert process.returncode == 75


def test_two_shippers_of_one_log_double_nothing(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Both follow a live log: every frame is in the stream once, and one of them says that it is not alone."""
    store = SegmentEventStore.create(tmp_path / "log", {}, segment_bytes=20_000)
    fill(store, chance, 500)
    both = [Shipping(lambda: ship.make(tmp_path / "log", server.url, follow=True)) for _ in range(2)]

    def noticed() -> bool:
        fill(store, chance, 20)
        return any("another shipper" in remark for remark in ship.remarks)

    wait_until(lambda: noticed() or not all(shipping.is_running for shipping in both))
    store.close()
    reports = [shipping.stop() for shipping in both]
    assert all(report.is_complete for report in reports)
    assert segments_in_stream(server.url) == segments_of(tmp_path / "log")


def test_two_shippers_beyond_the_duplicate_window_double_nothing(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Message ids are forgotten after the window; what is expected is not."""
    log = write_log(tmp_path / "log", chance, 300)
    window = new_stream(duplicate_window_s=0.1)
    ship(log, server.url, new_stream=window)
    store = reopened(log, segment_bytes=20_000)
    fill(store, chance, 100)
    store.close()
    time.sleep(0.3)
    both = [Shipping(lambda: ship.make(log, server.url, follow=True)) for _ in range(2)]
    reports = [shipping.stop() for shipping in both]
    assert all(report.is_complete for report in reports)
    assert segments_in_stream(server.url) == segments_of(log)


def send(server: NatsServer, tail: LogTail, indices: list[int], *, is_batch: bool) -> list[str]:
    """Send some of a log's records as a shipper would, and return what the server answered to each."""
    records = tail.read(100, 1 << 20)

    async def answer(jetstream: JetStreamContext, index: int) -> str:
        headers = message_headers(records[index])
        if is_batch and index:
            headers["Nats-Expected-Last-Msg-Id"] = records[index - 1].message_id
        else:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(index)
        try:
            subject = f"kvledger.log.host.{tail.log_id}"
            acknowledged = await jetstream.publish(subject, records[index].data, headers=headers)
        except APIError as error:
            return str(error.err_code)
        return "repeated" if acknowledged.duplicate else "stored"

    async def answers(jetstream: JetStreamContext) -> list[str]:
        return [await answer(jetstream, index) for index in indices]

    return server.asked(answers)


@pytest.mark.parametrize("is_batch", [False, True])
def test_what_is_out_of_order_is_refused_by_the_server(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random, is_batch: bool
) -> None:
    """A record is taken only behind the one before it, and a repetition is recognised as one."""
    log = write_log(tmp_path / "log", chance, 5)
    server.make_stream()
    answers = send(server, LogTail(log), [0, 2, 1, 1, 0, 3, 2, 4, 3, 4], is_batch=is_batch)
    refused = "10070" if is_batch else "10071"
    expected = ["stored", refused, "stored", "repeated", "repeated", refused, "stored", refused, "stored", "stored"]
    assert answers == expected
    report = ship(log, server.url)
    assert report.is_complete
    assert segments_in_stream(server.url) == segments_of(log)


def test_of_a_batch_in_the_wrong_place_nothing_is_stored(
    server: NatsServer, tmp_path: Path, chance: random.Random
) -> None:
    """Each message expects the one before it, so when the first is refused, all are."""
    tail = LogTail(write_log(tmp_path / "log", chance, 5))
    server.make_stream()

    async def publish_there() -> BatchResult:
        async with connect(StreamAddress.parse(server.url), Access(), "test") as connection:
            return await publish(connection, f"kvledger.log.host.{tail.log_id}", tail.read(100, 1 << 20), 7)

    result = asyncio.run(publish_there())
    assert (result.num_stored, result.is_repetition, result.problem) == (0, False, None)
    assert num_messages(server) == 0


def test_other_logs_in_between_do_not_disturb(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Three hosts ship at once into one stream: their batches break each other, and nothing is lost or doubled."""
    logs = [write_log(tmp_path / name, chance, 1_500) for name in ("a", "b", "c")]
    server.make_stream()
    shippings = [Shipping(lambda log=log: ship.make(log, server.url, label=log.name, follow=True)) for log in logs]
    reports = [shipping.stop() for shipping in shippings]
    assert all(report.is_complete for report in reports)
    for log, report in zip(logs, reports, strict=True):
        assert segments_in_stream(server.url, report.logs[0].log_id) == segments_of(log)


def leader_of(servers: list[NatsServer]) -> tuple[NatsServer, int] | None:
    """The server that leads the stream, and how many messages it has; None while there is neither."""
    for server in servers:
        with contextlib.suppress(NatsError, OSError):
            info = server.asked(lambda jetstream: jetstream.stream_info("KVLEDGER"))
            leader = info.cluster.leader if info.cluster else None
            return (servers[int(leader)], info.state.messages) if leader else None
    return None


def test_a_cluster_that_loses_its_leader_is_gone_on_with(
    cluster: list[NatsServer], ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Three replicas, two shippers of one log; through whichever server it is read, it is the files."""
    log = write_log(tmp_path / "log", chance, 4_000, segment_bytes=200_000)
    url = "nats://" + ",".join(server.url.removeprefix("nats://") for server in cluster)
    replicated = new_stream(num_replicas=3)

    def make() -> Any:
        return ship.make(log, url, follow=True, new_stream=replicated, answer_within_s=1.0)

    both = [Shipping(make) for _ in range(2)]
    leader, num_messages_before = leader_with_messages(cluster, 200, both)
    leader.kill()
    leader.start()
    leader_with_messages(cluster, 4_000 + len(segments_of(log)), both)
    print(f"killed with {num_messages_before} messages")
    assert all(shipping.stop().is_complete for shipping in both)
    for server in cluster:
        found = segments_when_it_answers(server)
        assert sizes_of(found) == sizes_of(segments_of(log))
        assert found == segments_of(log)


def sizes_of(segments: dict[str, bytes]) -> dict[str, int]:
    """A difference that can be read."""
    return {name: len(data) for name, data in segments.items()}


def leader_with_messages(
    servers: list[NatsServer], num_messages: int, shippings: list[Shipping]
) -> tuple[NatsServer, int]:
    """Wait until a server leads a stream of so many messages, or more."""
    while (found := leader_of(servers)) is None or found[1] < num_messages:
        assert all(shipping.is_running for shipping in shippings), "a shipper gave up"
        time.sleep(0.02)
    return found


def segments_when_it_answers(server: NatsServer) -> dict[str, bytes]:
    """What the stream holds, asked through a server that may still be finding its cluster."""
    while True:
        with contextlib.suppress(NatsError):
            return segments_in_stream(server.url)


def test_a_foreign_message_on_a_logs_subject_stops_the_shipper_with_its_number(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """Somebody else published there; the mirror shows the bytes as what they are."""
    log = write_log(tmp_path / "log", chance, 20)
    subject = ship(log, server.url).logs[0].subject

    number = server.asked(lambda jetstream: jetstream.publish(subject, b"hello")).seq
    report = ship(log, server.url)
    assert report.is_damaged
    assert f"message {number}" in report.logs[0].problem
    (copy,) = mirror(StreamAddress.parse(server.url), tmp_path / "mirror", access=Access())
    assert b"".join(segments_of(copy).values()) == b"".join(segments_of(log).values()) + b"hello"


@pytest.mark.parametrize("duplicate_window_s", [120, 0.1])
def test_the_stream_of_a_server_that_lost_its_end_is_filled_again(
    server: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random, duplicate_window_s: float
) -> None:
    """Acknowledged is not for ever: the files still have it. What a server remembers wrongly deceives nobody."""
    log = write_log(tmp_path / "log", chance, 200)
    ship(log, server.url, new_stream=new_stream(duplicate_window_s=duplicate_window_s))

    server.delete_messages(range(150, 201 + len(segments_of(log))))
    left = segments_in_stream(server.url)
    assert left != segments_of(log)
    time.sleep(0.3 if duplicate_window_s < 1 else 0)
    # It may know the ids of what it lost, and nats-server 2.9 knows no last message of the subject any more.
    with pytest.raises(StreamUnavailable, match="deleted"):
        ship(log, server.url, give_up_after_s=0)
    assert segments_in_stream(server.url) == left
    server.restart()
    assert ship(log, server.url).is_complete
    assert segments_in_stream(server.url) == segments_of(log)
