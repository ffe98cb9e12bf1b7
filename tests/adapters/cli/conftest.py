"""Logs on disk for the command line to read: a healthy one, and any events written as a log."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import msgspec
import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.adapters.cli.main import main
from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import EventEncoder, vocabulary_header
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
    events: Sequence[e.Event],
    configuration: LedgerConfiguration,
    *,
    segment_bytes: int = 1 << 20,
    header: Mapping[str, object] | None = None,
) -> Path:
    """Write a log, one frame per observation with its decisions, and close it; `header` changes parts of the header."""
    store = SegmentEventStore.create(directory, header_of(configuration, header), segment_bytes=segment_bytes)
    encoder = EventEncoder()
    frame: list[e.Event] = []
    for event in events:
        if frame and not event.is_decision:
            store.append(encoder.encode(frame), len(frame))
            frame = []
        frame.append(event)
    store.append(encoder.encode(frame), len(frame))
    store.close()
    return directory


def preempted_story() -> Driver:
    """`chat-17-b6` computes, decodes, is preempted, is polled, comes back by a load, ends; `chat-9` is new."""
    driver = Driver(num_slots=32)
    play_story(driver)
    driver.ledger.commit()
    return driver


def play_story(driver: Driver) -> None:
    """Play it on a driver with at least 16 slots."""
    keys = keys_of("a", 8)
    driver.start("chat-17-b6", keys[:5], 45, (1, 2, 3))
    driver.keys("chat-17-b6", 5, keys[5:6])
    driver.step(("chat-17-b6", 45, 1, 46), settled=[("chat-17-b6", 0, 45)])
    driver.settle_all()
    for step in range(18):
        driver.step(extended=[("chat-17-b6", (4,))] if step == 2 else ())
    driver.keys("chat-17-b6", 6, keys[6:8])
    driver.preempt("chat-17-b6", 64)
    driver.settle_all()
    for _ in range(3):
        driver.lookup("chat-17-b6", 0, 65)
    driver.allocate("chat-17-b6", (7, 8, 9, 10, 11), 64)
    driver.step(("chat-17-b6", 64, 1, 65))
    driver.settle_all()
    driver.finish("chat-17-b6", 65, 66)
    driver.arrive("chat-9", 20)
    driver.step()


@pytest.fixture(scope="module")
def story() -> Driver:
    """The story, played once."""
    return preempted_story()


@pytest.fixture
def log(story: Driver, tmp_path: Path) -> Path:
    """The story as a log of one segment."""
    return write_log(tmp_path / "log", story.observed, story.configuration)


def replaced(events: Sequence[e.Event], event_class: type[e.Event], index: int, **fields: object) -> list[e.Event]:
    """The events with fields of the `index`-th event of a class replaced."""
    changed = list(events)
    places = [place for place, event in enumerate(changed) if type(event) is event_class]
    changed[places[index]] = msgspec.structs.replace(changed[places[index]], **fields)
    return changed


@attrs.frozen
class Result:
    """What a command printed and returned."""

    exit_code: int
    out: str
    err: str

    def objects(self, type_name: str | None = None) -> list[dict[str, object]]:
        """The JSON objects on stdout, all or those of a type."""
        found = [json.loads(line) for line in self.out.splitlines()]
        return [item for item in found if type_name in {None, item["type"]}]


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `kvledger` in this process."""

    def run_main(*arguments: object) -> Result:
        capsys.readouterr()
        exit_code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(exit_code, captured.out, captured.err)

    return run_main


@attrs.frozen
class Tools:
    """What tests call by name: a test folder is no package, so nothing can be imported from here."""

    write_log = staticmethod(write_log)
    header_of = staticmethod(header_of)
    replaced = staticmethod(replaced)
    play_story = staticmethod(play_story)


@pytest.fixture(scope="session")
def tools() -> Tools:
    """Functions that make logs."""
    return Tools()
