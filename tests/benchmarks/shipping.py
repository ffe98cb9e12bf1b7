"""How fast logs are shipped to a nats-server on loopback and fetched from it, and how long a fresh frame takes.

`python tests/benchmarks/shipping.py [--frames N] [--bytes N]`. Needs nats-server; one shipper, one replica.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import nats
from nats_server import NatsServer, segments_of

from kvledger.storage.events import SegmentEventStore
from kvledger.storage.events.nats import Access, Shipper, StreamAddress, mirror, new_stream

_LIVE_FRAMES = 300
_LIVE_INTERVAL_S = 0.02


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=40_000)
    parser.add_argument("--bytes", type=int, default=400, help="of a frame's payload, on average")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        server = NatsServer(directory / "server").start()
        try:
            _bulk(directory, server, arguments.frames, arguments.bytes)
            asyncio.run(_live(directory, server))
        finally:
            server.kill()


def _bulk(directory: Path, server: NatsServer, num_frames: int, num_bytes: int) -> None:
    chance = random.Random(0)
    store = SegmentEventStore.create(directory / "log", {})
    for _ in range(num_frames):
        store.append(chance.randbytes(chance.randrange(2 * num_bytes)), 8)
    store.close()
    total = sum(map(len, segments_of(directory / "log").values()))
    address = StreamAddress.parse(server.url)
    shipper = Shipper(directory / "log", address, Access(), "bench", new_stream=new_stream())
    began = _now()
    report = asyncio.run(shipper.run())
    _print("shipped", began, num_frames, total)
    assert report.is_complete
    began = _now()
    (copy,) = mirror(address, directory / "mirror", access=Access())
    _print("fetched", began, num_frames, total)
    assert segments_of(copy) == segments_of(directory / "log")
    began = time.perf_counter()
    mirror(address, directory / "mirror", access=Access())
    print(f"a mirror that is up to date: {(time.perf_counter() - began) * 1e3:.0f} ms")


async def _live(directory: Path, server: NatsServer) -> None:
    """How long after its `append` a frame is in the stream, at the pace of an engine."""
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
    quantiles = statistics.quantiles(delays_ms, n=100)
    print(f"from append to the stream: median {quantiles[49]:.0f} ms, 99 % within {quantiles[98]:.0f} ms")


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _print(what: str, began: tuple[float, float], num_frames: int, num_bytes: int) -> None:
    seconds, cpu_seconds = (now - then for now, then in zip(_now(), began, strict=True))
    rates = f"{num_frames / seconds:,.0f} frames/s, {num_bytes / seconds / 1e6:.1f} MB/s"
    print(f"{what}: {rates}, {cpu_seconds / num_frames * 1e6:.0f} µs of this process's CPU a frame")


if __name__ == "__main__":
    main()
