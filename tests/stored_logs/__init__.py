"""Logs on disk for tests of what reads logs: any events written as a log, and a short story to write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events, vocabulary_header
from kvledger.storage.events import SegmentEventStore

OPENED_AT = 1_750_000_000_000_000_000


def header_of(configuration: LedgerConfiguration, changes: Mapping[str, object] | None = None) -> dict[str, object]:
    """The header that a connector writes."""
    return {
        **vocabulary_header(Core.standard()),
        "configuration": attrs.asdict(configuration),
        "kvledger_version": "0.1.0",
        "vllm_version": "0.32.0",
        "block_size": configuration.block_size,
        "opened_at_unix_ns": OPENED_AT,
        **(changes or {}),
    }


def write_log(
    directory: Path,
    events: Iterable[e.Event],
    configuration: LedgerConfiguration,
    *,
    segment_bytes: int = 1 << 20,
    header: Mapping[str, object] | None = None,
) -> Path:
    """Write a log, one frame per observation with its decisions, and close it; `header` changes parts of the header."""
    store = SegmentEventStore.create(directory, header_of(configuration, header), segment_bytes=segment_bytes)
    frame: list[e.Event] = []
    for event in events:
        if frame and not event.is_decision:
            store.append(encode_events(frame), len(frame))
            frame = []
        frame.append(event)
    if frame:
        store.append(encode_events(frame), len(frame))
    store.close()
    return directory


def play_story(driver: Driver, request_id: str = "chat-17-b6", other_id: str = "chat-9") -> None:
    """A request computes, decodes, is preempted, is polled, comes back by a load, ends; another one is new.

    The driver needs 16 slots.
    """
    keys = keys_of("a", 8)
    driver.start(request_id, keys[:5], 45, (1, 2, 3))
    driver.keys(request_id, 5, keys[5:6])
    driver.step((request_id, 45, 1, 46), settled=[(request_id, 0, 45)])
    driver.settle_all()
    for step in range(18):
        driver.step(extended=[(request_id, (4,))] if step == 2 else ())
    driver.keys(request_id, 6, keys[6:8])
    driver.preempt(request_id, 64)
    driver.settle_all()
    for _ in range(3):
        driver.lookup(request_id, 0, 65)
    driver.allocate(request_id, (7, 8, 9, 10, 11), 64)
    driver.step((request_id, 64, 1, 65))
    driver.settle_all()
    driver.finish(request_id, 65, 66)
    driver.arrive(other_id, 20)
    driver.step()


def tell_story(request_id: str = "chat-17-b6", other_id: str = "chat-9", *, clock_rate: int = 1) -> Driver:
    """Play it, with times that many times as long: the driver's clock ticks in microseconds, engines take more."""
    driver = Driver(num_slots=32, save_interval_tokens=32)
    play_story(driver, request_id, other_id)
    driver.ledger.commit()
    for place, event in enumerate(driver.observed):
        if (time_ns := getattr(event, "time_ns", None)) is not None:
            driver.observed[place] = msgspec.structs.replace(event, time_ns=clock_rate * time_ns)
    return driver


def serve_many(num_requests: int) -> Driver:
    """Requests one after the other; the 777th is preempted."""
    driver = Driver(num_slots=64)
    for number in range(num_requests):
        name = f"r{number}"
        driver.start(name, keys_of(name, 2), 20, (1, 2))
        if number == 777:
            driver.preempt(name, 20)
        driver.settle_all()
        driver.finish(name, 20, 21)
        driver.settle_all()
    driver.ledger.commit()
    return driver


def replaced(events: Sequence[e.Event], event_class: type[e.Event], index: int, **fields: object) -> list[e.Event]:
    """The events with fields of the `index`-th event of a class replaced."""
    changed = list(events)
    places = [place for place, event in enumerate(changed) if type(event) is event_class]
    changed[places[index]] = msgspec.structs.replace(changed[places[index]], **fields)
    return changed


def unfoldable(events: Sequence[e.Event], number: int = 0) -> list[e.Event]:
    """The events with an event that no projection can fold: a quarantine of a life whose save another life has taken.

    Behind the save `number` stands another one with the same job id, which no ledger issues.
    """
    saves = [place for place, event in enumerate(events) if isinstance(event, e.SaveIssued)]
    save = events[saves[number]]
    assert isinstance(save, e.SaveIssued)
    taken = msgspec.structs.replace(save, ordinal=save.ordinal + 1000)
    changed = [*events[: saves[number] + 1], taken, *events[saves[number] + 1 :]]
    settled = next(
        place
        for place, event in enumerate(changed)
        if isinstance(event, e.SaveCompleted) and event.job_id == save.job_id
    )
    life = save.request_id, save.ordinal, save.generation
    changed.insert(settled + 1, e.RequestQuarantined(*life, "TABLE_EQ", save.cause))
    return changed


def adds_up(total: Mapping[str, Any]) -> bool:
    """Whether the parts of the sums that `why` and `stats` print as JSON are as many as the wholes."""
    is_offered = total["num_tokens_offered"] == sum(total["offered"].values())
    return is_offered and total["num_tokens_recomputed"] == sum(total["recomputed"].values())
