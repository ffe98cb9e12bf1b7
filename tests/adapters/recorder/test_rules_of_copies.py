"""Each rule about copies that are under way names what is wrong; logs are real ones in which one thing is altered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from sim.recorded import audited, events_of, payloads_in

from kvledger.adapters.lab.simulation.connectors import Offloading, SimpleCPU
from kvledger.adapters.recorded.extension import Recorder
from kvledger.adapters.recorded.payloads import JOB, Transferred, TransferredFor, TransfersAwaited, TransfersEnded
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

Events = list[tuple[int, e.Event]]
Record = Callable[..., tuple[Any, Any]]


def named(recording: Any, events: Events) -> dict[str, str]:
    """Rule -> all that it says of these events in the place of those that were written."""
    numbered = [(number, event) for number, (_, event) in enumerate(events, 1)]
    found: dict[str, str] = {}
    for each in audited(recording, numbered).violations:
        found[each.rule] = f"{found.get(each.rule, '')}{each.detail}. "
    return found


def saying(event: Any, payload: msgspec.Struct, **changes: Any) -> tuple[int, e.Event]:
    """The event with something else in it."""
    payload = msgspec.structs.replace(payload, **changes)
    return 0, msgspec.structs.replace(event, payload=msgspec.msgpack.encode(payload))


@pytest.fixture
def loaded(record: Record) -> tuple[Any, Events]:
    """A request whose first block is cached here and whose others are loaded, slowly, while another one computes."""
    engine, recording = record(SimpleCPU(num_questions=4), num_blocks=14, max_model_len=200)
    engine.add("first", range(96), 3)
    engine.run()
    engine.add("all", range(500, 500 + 180), 2)
    engine.run()
    engine.add("begins alike", range(20), 2)
    engine.run()
    engine.add("again", range(96), 3)
    engine.add("other", range(900, 935), 40)
    engine.run()
    return recording, events_of(recording)


def the_load(events: Events) -> tuple[int, Any, Transferred]:
    """The load of several blocks, with what is cached before it."""
    return next(found for found in payloads_in(events, Transferred) if found[2].is_load and len(found[2].block_ids) > 2)


def test_nothing_is_named_where_nothing_is_altered(loaded: tuple[Any, Events]) -> None:
    """And the log has what the others alter: a load with something computed before it."""
    recording, events = loaded
    assert named(recording, events) == {}
    _, event, load = the_load(events)
    assert event.request_id == "again"
    allocated = next(each for _, each in events if isinstance(each, e.BlocksAllocated) and each.request_id == "again")
    assert load.block_ids[0] == allocated.block_ids[1]


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (lambda load, table: (table[0], *load), "whose tokens vLLM counts as computed"),
        (lambda load, _: (13, *load), "which does not belong to the request"),
        (lambda load, _: (load[0], *load), "twice"),
    ],
    ids=["computed", "foreign", "twice"],
)
def test_a_load_of_other_blocks_than_it_was_given_breaks_load_dst_exclusive(
    loaded: tuple[Any, Events], blocks: Any, words: str
) -> None:
    """Those that are computed, those of somebody else, and its own twice."""
    recording, events = loaded
    place, event, load = the_load(events)
    table = next(
        each.block_ids for _, each in events if isinstance(each, e.BlocksAllocated) and each.request_id == "again"
    )
    foreign = next(block for block in range(1, 14) if block not in table)
    changed = tuple(foreign if block == 13 and block not in table else block for block in blocks(load.block_ids, table))
    found = named(recording, [*events[:place], saying(event, load, block_ids=changed), *events[place + 1 :]])
    assert words in found["LOAD_DST_EXCLUSIVE"]


def test_two_loads_into_one_block_break_load_dst_exclusive(loaded: tuple[Any, Events]) -> None:
    """Whatever the second one is called."""
    recording, events = loaded
    place, event, load = the_load(events)
    again = saying(event, load, job="another")
    found = named(recording, [*events[: place + 1], again, *events[place + 1 :]])
    assert "is still filling" in found["LOAD_DST_EXCLUSIVE"]


def test_a_load_that_nobody_asked_for_breaks_load_dst_exclusive(loaded: tuple[Any, Events]) -> None:
    """It is for a request of which vLLM has taken up nothing."""
    recording, events = loaded
    place, event, _ = the_load(events)
    other = (0, msgspec.structs.replace(event, request_id="other"))
    found = named(recording, [*events[:place], other, *events[place + 1 :]])
    assert "for which vLLM has claimed no tokens" in found["LOAD_DST_EXCLUSIVE"]


def test_a_block_that_is_given_away_while_a_load_fills_it_breaks_load_dst_exclusive(
    loaded: tuple[Any, Events],
) -> None:
    """To the other one, in the step of a load for somebody who does not have the block any more."""
    recording, events = loaded
    place, event, load = the_load(events)
    lost = (0, Recorder.noted(TransferredFor("again", load), event.time_ns))
    at = next(number for number in range(place, 0, -1) if isinstance(events[number][1], e.StepScheduled))
    step: Any = events[at][1]
    other = next(each for _, each in events if isinstance(each, e.RequestArrived) and each.request_id == "other")
    given = msgspec.structs.replace(step, extended=(*step.extended, (other.ordinal, (load.block_ids[-1],))))
    found = named(recording, [*events[:at], (0, given), *events[at + 1 : place], lost, *events[place + 1 :]])
    assert "goes to another request while load" in found["LOAD_DST_EXCLUSIVE"]


def test_a_save_of_what_a_load_fills_breaks_load_xor_stores(loaded: tuple[Any, Events]) -> None:
    """It begins behind the load."""
    recording, events = loaded
    place, event, load = the_load(events)
    save = saying(event, load, is_load=False, job="save", ends_with=JOB)
    found = named(recording, [*events[: place + 1], save, *events[place + 1 :]])
    assert "is still filling" in found["LOAD_XOR_STORES"]
    assert "SRC_BLOCK_STABLE" not in found


def test_a_load_into_what_a_save_reads_breaks_src_block_stable(loaded: tuple[Any, Events]) -> None:
    """It begins behind the save."""
    recording, events = loaded
    place, event, load = the_load(events)
    save = saying(event, load, is_load=False, job="save", ends_with=JOB)
    found = named(recording, [*events[:place], save, *events[place:]])
    assert "still reads" in found["SRC_BLOCK_STABLE"]
    assert "LOAD_XOR_STORES" not in found
    ended = saying(*next((each, said) for _, each, said in payloads_in(events, TransfersEnded)), jobs=("save",))
    found = named(recording, [*events[:place], save, ended, *events[place:]])
    assert "SRC_BLOCK_STABLE" not in found


def test_a_save_before_the_step_that_computes_breaks_chunk_complete(loaded: tuple[Any, Events]) -> None:
    """Blocks are there, and nothing in them."""
    recording, events = loaded
    place, event, _ = next(found for found in payloads_in(events, Transferred) if not found[2].is_load)
    given = next(number for number, (_, each) in enumerate(events) if isinstance(each, e.BlocksAllocated))
    found = named(recording, [*events[: given + 1], (0, event), *events[given + 1 : place], *events[place + 1 :]])
    assert "but only 0 tokens of the request are computed" in found["CHUNK_COMPLETE"]


def test_blocks_that_are_given_away_under_a_save_break_block_reuse_fenced(record: Record) -> None:
    """OffloadingConnector has its workers wait for such saves; without that word in the log it is named."""
    engine, recording = record(Offloading(num_questions=30), num_blocks=12, max_model_len=160, max_num_seqs=1)
    for request_id, first in (("a", 0), ("b", 500)):
        engine.add(request_id, range(first, first + 140), 3)
    engine.run()
    events = events_of(recording)
    assert named(recording, events) == {}
    awaited = [(place, event, said) for place, event, said in payloads_in(events, TransfersAwaited)]
    for place, event, said in awaited:
        events[place] = saying(event, said, jobs=())
    assert "goes to another request while save" in named(recording, events)["BLOCK_REUSE_FENCED"]


def test_what_a_save_of_nobody_reads_is_not_given_away_either(record: Record) -> None:
    """SimpleCPUOffloadConnector keeps free blocks for its lazy saves; where it did not, it is named."""
    engine, recording = record(SimpleCPU(is_lazy=True, num_questions=3), num_blocks=14, max_model_len=200)
    for number in range(4):
        engine.add(str(number), range(500 * number, 500 * number + 100), 3)
        engine.run()
    events = events_of(recording)
    assert named(recording, events) == {}
    place, event, said = next(iter(payloads_in(events, TransferredFor)))
    given = next(
        each.block_ids[-1]
        for number, (_, each) in enumerate(events)
        if number > place and isinstance(each, e.BlocksAllocated)
    )
    copy = msgspec.structs.replace(said.copy, block_ids=(given,), job="for ever")
    events[place] = saying(event, said, copy=copy)
    assert "goes to another request while save for ever" in named(recording, events)["BLOCK_REUSE_FENCED"]
