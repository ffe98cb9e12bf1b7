"""Each rule of a recorded log names what is wrong, by its name; logs are real ones in which one thing is altered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import pytest
from sim.connectors import NamedConnector, Recorded, Several
from sim.recorded import audited, events_of, payloads_in

from kvledger.adapters.lab.simulation.connectors import Offloading
from kvledger.adapters.recorded.extension import Recorder
from kvledger.adapters.recorded.payloads import EndReturned, LookupReturned, ReportedToVLLM, Sent, Transferred
from kvledger.adapters.recorded.rules.ends import MAX_SILENT_NS
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

Events = list[tuple[int, e.Event]]
Record = Callable[..., tuple[Any, Any]]
NEIGHBOUR = NamedConnector(
    name="Neighbour", module="sim.neighbour", options={"num_tokens": 48, "num_steps": 2, "seed": 1}
)


@attrs.frozen
class Log:
    """What a recorder wrote."""

    recording: Any
    events: Events

    def named(self, events: Events) -> set[str]:
        """The rules that other events in the place of these break."""
        return {violation.rule for violation in audited(self.recording, events).violations}


@pytest.fixture
def saved(record: Record) -> Log:
    """OffloadingConnector saves two requests and loads one of them again."""
    engine, recording = record(Offloading(), enable_prefix_caching=False)
    for request_id, first in (("a", 0), ("b", 500), ("again", 0)):
        engine.add(request_id, range(first, first + 64), 20)
        engine.run()
    return Log(recording, events_of(recording))


def served(record: Record, *, as_child: bool) -> Log:
    """A cache whose loads take two steps serves one request; alone, or as a child of MultiConnector."""
    outer = Several(children=(Recorded(inner=NEIGHBOUR),)) if as_child else Recorded(inner=NEIGHBOUR)
    engine, recording = record(setup=outer)
    engine.add("theirs", range(64), 5)
    engine.add("other", range(500, 564), 20)
    engine.run()
    return Log(recording, events_of(recording))


def with_said(events: Events, place: int, **changes: Any) -> Events:
    """The same events, one of which says something else."""
    sequence, event = events[place]
    assert isinstance(event, e.ExtensionObserved | e.ExtensionNoted)
    payload = msgspec.structs.replace(Recorder.payload_of(event), **changes)  # type: ignore[type-var]
    changed = msgspec.structs.replace(event, payload=msgspec.msgpack.encode(payload))
    return [*events[:place], (sequence, changed), *events[place + 1 :]]


def test_nothing_is_named_where_nothing_is_altered(saved: Log, record: Record) -> None:
    """Else the rest would show nothing."""
    assert saved.named(saved.events) == set()
    for as_child in (False, True):
        log = served(record, as_child=as_child)
        assert log.named(log.events) == set()


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_external_tokens": -1},
        {"num_external_tokens": 64, "is_async": False},
        {"num_external_tokens": 65, "is_async": True},
        {"num_external_tokens": 0, "is_async": True},
    ],
    ids=str,
)
def test_an_answer_that_vllm_cannot_take_breaks_last_token(saved: Log, wrong: dict[str, Any]) -> None:
    """Less than nothing, all tokens within the step, more than there are, or nothing, asynchronously."""
    place = next(place for place, event, _ in payloads_in(saved.events, LookupReturned) if event.request_id == "a")
    assert "LAST_TOKEN" in saved.named(with_said(saved.events, place, **wrong))


def test_an_answer_up_to_the_last_token_keeps_it(saved: Log) -> None:
    """One is left to compute; of an asynchronous load vLLM computes the last one again by itself."""
    place = next(place for place, event, _ in payloads_in(saved.events, LookupReturned) if event.request_id == "a")
    for right in ({"num_external_tokens": 63, "is_async": False}, {"num_external_tokens": 64, "is_async": True}):
        assert "LAST_TOKEN" not in saved.named(with_said(saved.events, place, **right))


@pytest.mark.parametrize("is_load", [False, True])
def test_a_copy_of_the_wrong_place_breaks_table_eq(saved: Log, is_load: bool) -> None:
    """Two of its own blocks change places."""
    place, _, copy = next(
        found
        for found in payloads_in(saved.events, Transferred)
        if found[2].is_load is is_load and len(found[2].block_ids) > 1
    )
    first, second, *others = copy.block_ids
    assert saved.named(with_said(saved.events, place, block_ids=(second, first, *others))) == {"TABLE_EQ"}


def test_a_save_of_a_foreign_block_breaks_src_block_owned(saved: Log) -> None:
    """Also where the metadata does not say at which place of the table it stands."""
    place, _, copy = next(found for found in payloads_in(saved.events, Transferred) if not found[2].is_load)
    foreign = (59, *copy.block_ids[1:])
    assert saved.named(with_said(saved.events, place, block_ids=foreign)) == {"TABLE_EQ", "SRC_BLOCK_OWNED"}
    assert saved.named(with_said(saved.events, place, block_ids=foreign, first_block=-1)) == {"SRC_BLOCK_OWNED"}


@pytest.mark.parametrize("request_id", ["a", "b"])
def test_a_save_that_leaves_out_what_nobody_has_saved_breaks_store_contiguous(saved: Log, request_id: str) -> None:
    """The third request saves nothing of what it has in common with the first, and that is no hole."""
    place, _, copy = next(
        found
        for found in payloads_in(saved.events, Transferred)
        if not found[2].is_load and found[1].request_id == request_id
    )
    later = with_said(saved.events, place, first_block=copy.first_block + 1, block_ids=copy.block_ids[1:])
    assert saved.named(later) == {"STORE_CONTIGUOUS"}


def heard(log: Log) -> tuple[int, e.ExtensionNoted]:
    """Where vLLM hears of the end of the load."""
    return next(
        (place, event) for place, event, told in payloads_in(log.events, ReportedToVLLM) if told.finished_recving
    )


def renumbered(events: Events) -> Events:
    """Numbered as if nothing had been put in or left out."""
    return [(sequence, event) for sequence, (_, event) in enumerate(events, 1)]


@pytest.mark.parametrize("as_child", [False, True])
def test_an_end_that_vllm_hears_twice_breaks_completion_once(record: Record, as_child: bool) -> None:
    """Also inside of MultiConnector: no child loads into the same blocks again."""
    log = served(record, as_child=as_child)
    place, event = heard(log)
    twice = [*log.events[: place + 1], (0, event), *log.events[place + 1 :]]
    audit = audited(log.recording, [(sequence, each) for sequence, (_, each) in enumerate(twice, 1)])
    assert {violation.rule for violation in audit.violations} >= {"COMPLETION_ONCE"}
    assert "a second time" in next(each.detail for each in audit.violations if each.rule == "COMPLETION_ONCE")


@pytest.mark.parametrize("what", ["finished_recving", "failed_recving", "finished_sending"])
def test_the_end_of_what_nobody_is_owed_breaks_completion_once(record: Record, what: str) -> None:
    """Alone; inside of MultiConnector it may be another child's."""
    for as_child, named in ((False, {"COMPLETION_ONCE"}), (True, set())):
        log = served(record, as_child=as_child)
        place, _ = heard(log)
        ids = ("theirs", "other") if what == "finished_recving" else ("other",)
        assert log.named(with_said(log.events, place, **{what: ids})) == named


def test_a_load_without_an_end_breaks_liveness(record: Record) -> None:
    """After a minute in which steps were made, and once."""
    log = served(record, as_child=False)
    place, _ = heard(log)
    silent = with_said(log.events, place, finished_recving=())
    last = max(number for number, (_, event) in enumerate(silent) if isinstance(event, e.StepScheduled))
    for later_ns, named in ((0, False), (2 * MAX_SILENT_NS, True)):
        sequence, step = silent[last]
        assert isinstance(step, e.StepScheduled)
        later = msgspec.structs.replace(step, time_ns=step.time_ns + later_ns)
        rules = log.named([*silent[:last], (sequence, later), *silent[last + 1 :]])
        assert ("LIVENESS" in rules) is named


def test_what_a_finished_request_keeps_is_owed_one_end(saved: Log) -> None:
    """OffloadingConnector keeps blocks or not; `finished.held` ends when vLLM hears of it."""
    kept = [event.request_id for _, event, told in payloads_in(saved.events, EndReturned) if told.keeps_blocks]
    sent = [event.request_id for _, event, _ in payloads_in(saved.events, Sent)]
    assert sorted(kept) == sorted(sent)
    released = [event.request_id for _, event in saved.events if isinstance(event, e.RequestReleased)]
    assert sorted(released) == ["a", "again", "b"]
