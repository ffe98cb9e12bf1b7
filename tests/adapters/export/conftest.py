"""Logs to export: a short story, worlds on vLLM's real scheduler, and any events written as a log."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import msgspec
import pytest
from headless_browser import Page, open_browser
from lifecycle_driver import Driver, keys_of

from kvledger.adapters.cli.main import main
from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import EventEncoder, vocabulary_header
from kvledger.storage.events import SegmentEventStore

OPENED_AT = 1_750_000_000_000_000_000
SEEDS = (1, 3, 7, 12, 20, 33)
"""Worlds with preemption, loads, evictions, broken rules, reset caches, killed engines and full disks among them."""


def write_log(
    directory: Path,
    events: Sequence[e.Event],
    configuration: LedgerConfiguration,
    header: Mapping[str, object] | None = None,
    *,
    segment_bytes: int = 1 << 20,
) -> Path:
    """Write a log, one frame per observation with its decisions, and close it; `header` changes parts of the header."""
    store = open_log(directory, configuration, header, segment_bytes=segment_bytes)
    encoder = EventEncoder()
    frame: list[e.Event] = []
    for event in events:
        if frame and not event.is_decision:
            store.append(encoder.encode(frame), len(frame))
            frame = []
        frame.append(event)
    if frame:
        store.append(encoder.encode(frame), len(frame))
    store.close()
    return directory


def open_log(
    directory: Path,
    configuration: LedgerConfiguration,
    header: Mapping[str, object] | None = None,
    *,
    segment_bytes: int = 1 << 20,
) -> SegmentEventStore:
    """Begin a log."""
    whole_header = {
        **vocabulary_header(Core.standard()),
        "configuration": attrs.asdict(configuration),
        "kvledger_version": "0.1.0",
        "vllm_version": "0.32.0",
        "opened_at_unix_ns": OPENED_AT,
        **(header or {}),
    }
    return SegmentEventStore.create(directory, whole_header, segment_bytes=segment_bytes)


def tell_story(request_id: str = "chat-17-b6", other_id: str = "chat-9") -> Driver:
    """A request computes, decodes, is preempted, is polled, comes back by a load, ends; another one is new."""
    driver = Driver(num_slots=32)
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
    driver.ledger.commit()
    driver.observed[:] = [in_milliseconds(event) for event in driver.observed]
    return driver


def in_milliseconds(event: e.Event) -> e.Event:
    """The driver's clock ticks in microseconds; engines take milliseconds."""
    time_ns = getattr(event, "time_ns", None)
    return event if time_ns is None else msgspec.structs.replace(event, time_ns=1700 * time_ns)


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
    open_log = staticmethod(open_log)
    tell_story = staticmethod(tell_story)
    serve_many = staticmethod(serve_many)


@pytest.fixture(scope="session")
def tools() -> Tools:
    """Functions that make logs."""
    return Tools()


@pytest.fixture(scope="module")
def story() -> Driver:
    """The story, played once."""
    return tell_story()


@pytest.fixture
def log(story: Driver, tmp_path: Path) -> Path:
    """The story as a log."""
    return write_log(tmp_path / "log", story.observed, story.configuration)


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Seed -> a directory with the logs of its engines."""
    from sim.world import World

    found = {}
    for seed in SEEDS:
        with World(seed, in_files=True) as world:
            world.run()
            found[seed] = tmp_path_factory.mktemp("worlds") / str(seed)
            assert world.log_dir is not None
            shutil.copytree(world.log_dir, found[seed])
    return found


@pytest.fixture(scope="session")
def page(browser_path: str) -> Iterator[Page]:
    """A real browser."""
    with open_browser(browser_path) as opened:
        yield opened
