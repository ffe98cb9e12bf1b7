"""States of snapshots that no fold leads to: they are refused, or they are harmless to every command."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
from msgspec import inspect

from kvledger.adapters.figures import State, Totals
from kvledger.adapters.recorded.extension import Recorder
from kvledger.adapters.tools.logs.log import StoredLog, open_log
from kvledger.adapters.tools.logs.snapshots import write_snapshots
from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle.audit import StartFolds
from kvledger.lifecycle.codec import EventDecoder
from kvledger.lifecycle.events import ExtensionEvent, field_names
from kvledger.lifecycle.ranges import MAX_INT64
from kvledger.lifecycle.snapshots import capture, restore, state_fingerprint
from kvledger.storage.events import find_snapshot, write_snapshot
from kvledger.storage.events.segment_file import segment_paths
from log_fuzz.commands import lines
from log_fuzz.guarded import run_guarded, size_of
from log_fuzz.mutations import borrowed_values, other_frames, other_snapshot
from log_fuzz.planted import story_log
from log_fuzz.seeds import Log, told

pytestmark = pytest.mark.xdist_group("log_fuzz")

CONFIGURATION = LedgerConfiguration(block_size=16, chunk_size=16, num_slots=8)


def with_snapshots() -> list[Log]:
    """Logs that begin with one."""
    return [log for log in told() if log.snapshot is not None]


def numbers_without_range(kind: inspect.Type, where: str) -> Iterator[str]:
    """Where the type of a state has an integer that may be any; keys of maps are among them."""
    if isinstance(kind, inspect.IntType) and (kind.ge is None or kind.le is None):
        yield where
    for name in getattr(kind, "__struct_fields__", ()):
        value = getattr(kind, name)
        if isinstance(value, inspect.Type):
            yield from numbers_without_range(value, f"{where}.{name}")
        for each in value if isinstance(value, tuple | list) else ():
            if isinstance(each, inspect.Field):
                yield from numbers_without_range(each.type, f"{where}.{each.name}")
            elif isinstance(each, inspect.Type):
                yield from numbers_without_range(each, where)


def test_every_number_of_states_events_and_payloads_has_a_range() -> None:
    """`kvledger export --html` ended with 70 for a record of life -2**63, which the state of a snapshot had."""
    states = Core.standard().new_projections(CONFIGURATION).states()
    kinds: dict[str, Any] = {
        "totals": State,
        **{name: type(state) for name, state in states.items()},
        **Core.standard().events,
        **Recorder.events,
    }
    found = [place for name, kind in kinds.items() for place in numbers_without_range(inspect.type_info(kind), name)]
    assert not found


def first_record(log: Log) -> tuple[int, dict[str, Any]]:
    """The first life in the state of a log, and its record."""
    assert log.snapshot is not None
    return next(iter(log.snapshot["state"]["tracker"]["requests"].items()))


def with_ordinal(log: Log, ordinal: int) -> None:
    """The first record is of this life."""
    first_record(log)[1]["ordinal"] = ordinal


def with_key(log: Log, ordinal: int) -> None:
    """The first record is kept for this life."""
    assert log.snapshot is not None
    records = log.snapshot["state"]["tracker"]["requests"]
    records[ordinal] = records.pop(first_record(log)[0])


def with_two_numbers(log: Log, ordinal: int) -> None:
    """Both."""
    with_ordinal(log, ordinal)
    with_key(log, ordinal)


def with_free_slot(log: Log, slot: int) -> None:
    """A slot is free that may not be."""
    assert log.snapshot is not None
    log.snapshot["state"]["slots"]["free"].append(slot)


def with_life_of_reader(log: Log, ordinal: int) -> None:
    """The reader's first life has this ordinal."""
    assert log.snapshot is not None
    log.snapshot["reader"]["model"]["lives"]["lives"][0][0]["ordinal"] = ordinal


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (with_ordinal, 7_000),
        (with_key, -1),
        (with_two_numbers, -(2**63)),
        (with_free_slot, 0),
        (with_life_of_reader, 2**64 - 1),
    ],
)
def test_a_state_that_no_fold_leads_to_is_refused_by_name(
    change: Any, number: int, places: dict[str, str | Path], tmp_path: Path
) -> None:
    """The commands go on as for a log without a snapshot, and say why.

    `kvledger tables` ended with 70 for a life of the reader whose ordinal fits into no column.
    """
    log = next(copy.deepcopy(log) for log in with_snapshots() if first_record_is_there(log))
    change(log, number)
    path = log.write(tmp_path / "logs" / "log")
    opened = open_log(path, Core.standard())
    assert opened.start() is None
    assert "state cannot be used" in opened.start_remarks[0]
    here = {**places, "LOG": path, "DIR": path.parent, "REQUEST": log.request_id}
    ended = run_guarded(lines(), here, size_of(path), cache=tmp_path / "cache")
    assert [str(each) for each in ended if not each.is_stated] == []


def test_totals_that_are_as_large_as_they_may_be_can_be_added_to(tmp_path: Path) -> None:
    """`kvledger show --since` ended with 70: a sum of tokens grew out of its range, and was read again."""
    log = next(copy.deepcopy(log) for log in with_snapshots() if log.name == "walk 5 without its beginning")
    assert log.snapshot is not None
    figures = log.snapshot["totals"][1]["figures"]
    sums = [name for name in figures if name.startswith(("num_tokens_", "num_bytes_")) or name.endswith("_ns")]
    figures |= dict.fromkeys(sums, MAX_INT64)
    opened = open_log(log.write(tmp_path / "logs" / "log"), Core.standard())
    start = opened.start()
    assert start is not None
    folds = StartFolds(opened.core, opened.configuration, start)
    totals = opened.totals(folds.projections)
    folds.take(opened.trusted_events())
    assert totals.figures.num_tokens_recomputed == MAX_INT64
    assert Totals.continued(folds.projections, totals.stored()).stored() == totals.stored()


def first_record_is_there(log: Log) -> bool:
    """Whether any request is known in the state of a log, and some slot is taken."""
    assert log.snapshot is not None
    state = log.snapshot["state"]
    return bool(state["tracker"]["requests"] and state["slots"]["num_touched"])


def test_a_state_that_is_accepted_can_be_folded_on(tmp_path: Path) -> None:
    """Whatever else of it was changed."""
    num_accepted = 0
    for seed in range(150):
        chance = random.Random(seed)
        mutation = other_snapshot(chance.choice(with_snapshots()), chance)
        log = open_log(mutation.write(tmp_path / str(seed)), Core.standard())
        start = log.start()
        if start is not None:
            num_accepted += 1
            folds = StartFolds(log.core, log.configuration, start)
            log.totals(folds.projections)
            folds.take(log.trusted_events())
    assert num_accepted > 20


def test_what_a_hostile_log_is_folded_to_can_be_restored(tmp_path: Path) -> None:
    """The ranges of states hold whatever events lead to. A shuffled log, with a job's number twice, ended a fold."""
    core = Core.standard().extended(Recorder())
    whole = [log for log in told() if log.snapshot is None]
    for seed in range(60):
        chance = random.Random(seed)
        mutation = chance.choice([borrowed_values, other_frames])(chance.choice(whole), chance)
        log = open_log(mutation.write(tmp_path / str(seed)), core)
        projections = core.new_projections(log.configuration)
        totals = Totals(projections)
        for sequence, event in log.trusted_events():
            projections.fold(event, sequence)
        assert Totals.continued(projections, totals.stored()).stored() == totals.stored(), mutation.text
        state = capture(projections)
        assert capture(restore(core, state, log.configuration)) == state, mutation.text


def test_the_fuzz_has_every_event_and_every_field() -> None:
    """As today's writers declare them, defaults included; each can be read."""
    core = Core.standard().extended(Recorder())
    fields, kinds = set(), set()
    for log in told():
        decoder = EventDecoder(core, log.header)
        for frame in log.frames:
            for event, raw in zip(decoder.decode(msgspec.msgpack.encode(frame)), frame, strict=True):
                fields |= {(event.id, name) for name in field_names(type(event))[: len(raw) - 1]}
                if isinstance(event, ExtensionEvent) and event.extension == Recorder.name:
                    kinds |= {(event.name, name) for name in msgspec.msgpack.decode(event.payload)}
    assert fields >= {(each.id, name) for each in core.events.values() for name in field_names(each)}
    assert kinds >= {(kind, name) for kind, each in Recorder.events.items() for name in each.__struct_fields__}


def test_a_snapshot_is_made_from_the_beginning_where_an_earlier_one_cannot_be_used(tmp_path: Path) -> None:
    """It failed where the state of the newest snapshot was none."""
    path = story_log(tmp_path / "log", segment_bytes=2000)
    log = open_log(path, Core.standard().extended(Recorder()))
    assert write_snapshots(log) > 1
    first, second, *_ = segment_paths(path)[1:]
    found, _ = find_snapshot(path, log_id=str(log.header["log_id"]), fingerprint=fingerprint_of(log))
    assert found is not None
    whole = second.with_suffix(".snapshot").read_bytes()
    second.with_suffix(".snapshot").unlink()
    first.with_suffix(".snapshot").unlink()
    write_snapshot(first, attrs.evolve(found, state=b"\x80"))
    assert write_snapshots(log) == 1
    assert second.with_suffix(".snapshot").read_bytes() == whole


def fingerprint_of(log: StoredLog) -> str:
    """What snapshots of the log are made with here."""
    return state_fingerprint(log.core, log.configuration)
