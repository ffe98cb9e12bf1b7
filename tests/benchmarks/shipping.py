"""How fast logs are shipped to a nats-server on loopback and fetched from it, and how long a fresh frame takes.

One shipper, one replica. The anchor is appending the same frames to the log itself. Needs nats-server.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import nats
from benchmarks.figures import CannotMeasure, Cases, Figure, compared
from nats_server import NatsServer, find_nats_server, segments_of

from kvledger.storage.events import SegmentEventStore
from kvledger.storage.events.nats import Access, Shipper, StreamAddress, mirror, new_stream

_NUM_FRAMES = 20_000
_LIVE_FRAMES, _LIVE_INTERVAL_S = 300, 0.02
_APPENDED = "appended to a log on disk"


def _measure(num_bytes: int, num_rounds: int) -> Sequence[Figure]:
    if find_nats_server() is None:
        raise CannotMeasure("there is no nats-server on PATH (Debian, Ubuntu: apt-get install nats-server)")
    rounds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for number in range(num_rounds):
            directory = Path(name, str(number))
            server = NatsServer(directory / "server").start()
            try:
                for what, taken_us in _bulk(directory, server, num_bytes).items():
                    rounds.setdefault(what, []).append(taken_us)
                delays_ms = asyncio.run(_live(directory, server))
            finally:
                server.kill()
    quantiles = statistics.quantiles(delays_ms, n=100)
    return [
        *compared("a frame", "µs", rounds, anchor=_APPENDED),
        Figure("from append to the stream, median", "shipped", quantiles[49], "ms"),
        Figure("99 % within", "shipped", quantiles[98], "ms"),
    ]


def _bulk(directory: Path, server: NatsServer, num_bytes: int) -> dict[str, float]:
    """Microseconds a frame, by what was done with them."""
    chance = random.Random(0)
    payloads = [chance.randbytes(chance.randrange(2 * num_bytes)) for _ in range(_NUM_FRAMES)]
    store = SegmentEventStore.create(directory / "log", {})
    times = [time.perf_counter()]
    for payload in payloads:
        store.append(payload, 8)
    store.close()
    times.append(time.perf_counter())
    address = StreamAddress.parse(server.url)
    report = asyncio.run(Shipper(directory / "log", address, Access(), "bench", new_stream=new_stream()).run())
    assert report.is_complete
    times.append(time.perf_counter())
    (copy,) = mirror(address, directory / "mirror", access=Access())
    times.append(time.perf_counter())
    assert segments_of(copy) == segments_of(directory / "log")
    taken = [(after - before) / _NUM_FRAMES * 1e6 for before, after in itertools.pairwise(times)]
    return dict(zip((_APPENDED, "shipped", "fetched"), taken, strict=True))


async def _live(directory: Path, server: NatsServer) -> list[float]:
    """Milliseconds from a frame's `append` until it is in the stream, at the pace of an engine."""
    store = SegmentEventStore.create(directory / "live" / "log", {})
    address = StreamAddress.parse(server.url)
    shipper = Shipper(directory / "live", address, Access(), "live", new_stream=new_stream(), follow=True)
    running = asyncio.ensure_future(shipper.run())
    client = await nats.connect(server.url)
    subscription = await client.subscribe("kvledger.log.live.*")
    await subscription.next_msg(10)  # the header block
    delays_ms = []
    for _ in range(_LIVE_FRAMES):
        await asyncio.sleep(_LIVE_INTERVAL_S)
        began = time.perf_counter()
        store.append(b"x" * 200, 1)
        await subscription.next_msg(10)
        delays_ms.append((time.perf_counter() - began) * 1e3)
    shipper.stop()
    await running
    await client.close()
    store.close()
    return delays_ms


def cases(*, full: bool) -> Cases:
    """Frames of 400 B, and of 4 KB."""
    return {f"frames of {num_bytes:,} B": partial(_measure, num_bytes, 3 if full else 1) for num_bytes in (400, 4000)}
