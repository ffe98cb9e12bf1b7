"""A log that is run again through the hooks of the real connector is the same log, but for names and times.

Worlds as in `sim/`, with everything that goes wrong in them: preemptions, evictions, resets, aborts, failed copies,
reports that come late, twice or never, both model runners, one and two steps in flight, sliding windows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from msgspec.structs import replace
from sim.hybrid_world import HybridWorld
from sim.settings import draw
from sim.world import World

from kvledger.adapters.lab.repro import Rerun, record, rerun, rerun_core
from kvledger.lifecycle import Core, LedgerConfiguration, SequencedEvent
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import EventDecoder

pytestmark = pytest.mark.scheduler

NUM_WORLDS = 14
NUM_SHORT = 4
NUM_HYBRID_WORLDS = 6
NUM_SHORT_HYBRID = 2


def events_of(engine: Any) -> tuple[LedgerConfiguration, list[tuple[int, e.Event]]]:
    """Configuration and events of the log of an engine, which keeps it in memory."""
    side = engine.connector.scheduler_side
    side.ledger.commit()
    header = getattr(side.log.store, "header", None) or side.log.store._store.header
    decoder = EventDecoder(Core.standard(), header)
    events = [
        (frame.first_sequence + offset, event)
        for frame in side.log.store.read()
        for offset, event in enumerate(decoder.decode(frame.payload))
    ]
    return LedgerConfiguration(**header["configuration"]), events


def without_log_before(events: list[tuple[int, e.Event]]) -> list[tuple[int, e.Event]]:
    """The events as if nothing had lain in `log_dir` at the start; a note of that is the second event."""
    if len(events) < 2 or not getattr(events[1][1], "text", "").startswith(e.LOG_BEFORE):
        return events
    moved = [events[0]]
    for sequence, event in events[2:]:
        causes = {name: getattr(event, name, 0) for name in ("cause", "delivered")}
        changes: dict[str, object] = {name: cause - 1 for name, cause in causes.items() if cause}
        if isinstance(event, e.TransferReported) and event.moments:
            changes["moments"] = (event.moments[0] - 1, *event.moments[1:])
        moved.append((sequence - 1, replace(event, **changes)))
    return moved


def without_names(events: Sequence[SequencedEvent]) -> list[SequencedEvent]:
    """The events with chunk keys numbered in the order in which they appear, and without times."""
    names: dict[bytes, bytes] = {}

    def named(key: bytes) -> bytes:
        return names.setdefault(key, str(len(names)).encode())

    found = []
    for sequence, event in events:
        changes: dict[str, object] = {name: 0 for name in ("time_ns", "duration_ns") if hasattr(event, name)}
        if isinstance(event, e.ChunkKeysObserved):
            changes["keys"] = tuple(named(key) for key in event.keys)
            changes["hash_prefixes"] = b""  # of other tokens
        elif isinstance(event, e.ChunksEvicted | e.ChunksTainted):
            changes["keys"] = tuple(map(named, event.keys))
        found.append((sequence, replace(event, **changes)))
    return found


def assert_same(recorded: list[tuple[int, e.Event]], outcome: Rerun, told_by: str) -> None:
    """Every event, in order, with its sequence number, and nothing besides."""
    expected, found = without_names(without_log_before(recorded)), without_names(outcome.events)
    for want, got in zip(expected, found, strict=False):
        assert got == want, told_by
    if len(found) > len(expected) and isinstance(found[-1][1], e.EffectsDelivered):
        found.pop()  # it stands in the frame after the step's, which an engine that is killed does not write
    assert len(found) == len(expected), told_by
    assert outcome.left_out == [], told_by


@pytest.mark.parametrize(
    "seed", [*range(NUM_SHORT), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(NUM_SHORT, NUM_WORLDS))]
)
def test_a_world_is_the_same_when_its_hook_calls_are_made_again(seed: int) -> None:
    """Observations and decisions of each of the world's engines, also of those that were killed."""
    connector = {**draw(random.Random(f"settings {seed}")).connector, "digests": "off"}  # no page is made again
    with World(seed, connector=connector) as world:
        world.run()
        logs = [log for log in (*world.dead_logs, world.log) if log.events]
    for log in logs:
        recording = record(log.configuration, log.events)
        assert_same(log.events, rerun(recording), f"make sim SEED={seed}")


@pytest.mark.parametrize(
    "seed",
    [
        *range(NUM_SHORT_HYBRID),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in range(NUM_SHORT_HYBRID, NUM_HYBRID_WORLDS)),
    ],
)
def test_a_world_with_sliding_windows_is_the_same(seed: int) -> None:
    """Several groups: their tables interleaved, and what windows have left."""
    world = HybridWorld(seed)
    world.run()
    configuration, events = events_of(world.engine)
    world.engine.shutdown()
    assert_same(events, rerun(record(configuration, events)), f"hybrid seed {seed}")


@pytest.mark.parametrize("seed", range(3))
def test_the_core_decides_the_same(seed: int) -> None:
    """Observations given to the ledger alone lead to the recorded decisions, keys and all."""
    with World(seed) as world:
        world.run()
        log = world.log
    outcome = rerun_core(record(log.configuration, log.events))
    recorded = [event for _, event in log.events if event.is_decision]
    found = [event for _, event in outcome.events if event.is_decision]
    assert [type(event) for event in found] == [type(event) for event in recorded]
    ours = [event for event in found if isinstance(event, e.LookupAnswered)]
    theirs = [event for event in recorded if isinstance(event, e.LookupAnswered)]
    assert [event.num_external_tokens for event in ours] == [event.num_external_tokens for event in theirs]


def test_another_story_is_recognised() -> None:
    """The comparison can fail: one prompt was a token longer."""
    with World(1) as world:
        world.run()
        log = world.log
    recording = record(log.configuration, log.events)
    place = next(i for i, (_, event) in enumerate(recording.observations) if isinstance(event, e.RequestArrived))
    sequence, event = recording.observations[place]
    changed = replace(event, num_prompt_tokens=event.num_prompt_tokens + 1)  # type: ignore[attr-defined]
    observations = (*recording.observations[:place], (sequence, changed), *recording.observations[place + 1 :])
    with pytest.raises(AssertionError):
        assert_same(log.events, rerun(attrs.evolve(recording, observations=observations)), "")
