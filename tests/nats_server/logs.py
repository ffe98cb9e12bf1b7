"""Logs for shipping, and what a stream holds of them, fetched without any of the code under test."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import nats
from nats.js.api import AckPolicy, ConsumerConfig

from kvledger.storage.events import SegmentEventStore

_PATIENCE_S = 300.0  # for an answer; only what hangs takes as long


def fill(store: SegmentEventStore, chance: random.Random, num_frames: int, max_bytes: int = 300) -> None:
    """Append frames of arbitrary bytes."""
    for _ in range(num_frames):
        store.append(chance.randbytes(chance.randrange(max_bytes)), chance.randrange(1, 9))


def write_log(
    directory: Path, chance: random.Random, num_frames: int, *, segment_bytes: int = 20_000, max_bytes: int = 300
) -> Path:
    """Write a log of arbitrary bytes in several segments, and close it."""
    store = SegmentEventStore.create(directory, {"made": "for a test"}, segment_bytes=segment_bytes)
    fill(store, chance, num_frames, max_bytes)
    store.close()
    return directory


def segments_of(directory: Path) -> dict[str, bytes]:
    """The segment files: name to content."""
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.kvlog"))}


def segments_in_stream(url: str, log_id: str | None = None) -> dict[str, bytes]:
    """The messages of the stream's only log (or of the one named), one behind the other, by the segment they name."""

    async def fetch() -> dict[str, bytes]:
        client = await nats.connect(url)
        jetstream = client.jetstream(timeout=_PATIENCE_S)
        found: dict[str, bytes] = {}
        subject = f"kvledger.log.*.{log_id or '*'}"
        configuration = ConsumerConfig(ack_policy=AckPolicy.NONE, mem_storage=True)
        subscription = await jetstream.pull_subscribe(subject, stream="KVLEDGER", config=configuration)
        num_left = (await subscription.consumer_info()).num_pending or 0
        subjects = set()
        while num_left:
            with contextlib.suppress(TimeoutError):  # what is not there within a second is asked for again
                for message in await subscription.fetch(min(num_left, 200), timeout=1):
                    name = (message.headers or {})["Kvledger-Segment"]
                    found[name] = found.get(name, b"") + message.data
                    subjects.add(message.subject)
                    num_left -= 1
        await client.close()
        assert log_id is not None or len(subjects) <= 1, subjects
        return found

    return asyncio.run(fetch())
