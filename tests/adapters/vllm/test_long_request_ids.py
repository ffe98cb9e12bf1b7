"""A request id that a client has chosen: long, or no Unicode text. The log has it cut, and vLLM gets it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from sim.crowd import serve_crowd
from sim.reported import note_reports
from sim.slow_copies import slow_down

from kvledger.lifecycle import events as e
from kvledger.lifecycle import logged_request_id

pytestmark = pytest.mark.scheduler

LONG = "x" * 1_000_000
ODD_IDS = {
    "long": lambda name: f"{'long ' * 100}{name}",
    "long, different at its beginning": lambda name: f"{name} {'long ' * 100}",
    "many bytes a character": lambda name: f"{'é漢🚀' * 40}{name}",
    "lone surrogates": lambda name: f"\udcff\ud800 {name}",
    "long, with lone surrogates": lambda name: f"{chr(0xDFFF) * 300}{name}",
    "zero bytes": lambda name: f"\0{name}\0" + "\0" * 300,
}


@pytest.fixture(params=["sync", "async"])
def transfers(request: pytest.FixtureRequest) -> str:
    """Copies within steps, and asynchronous ones, whose ends vLLM is told by request id."""
    mode: str = request.param
    return mode


def strings(value: object) -> Iterator[str]:
    """Every text in a value of plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.items():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def crowd(make_engine: Any, named: Callable[[str], str], **options: Any) -> Any:
    """Three requests that preempt each other, an abort, a reset, and a second round that loads what was saved."""
    engine = make_engine(num_blocks=13, chunk_size=8, enable_prefix_caching=False, **options)
    serve_crowd(engine, named)
    assert engine.num_preemptions
    for number in range(3):
        engine.serve(named(f"again {number}"), range(100 * number, 100 * number + 40), 5)
    return engine


@pytest.mark.parametrize("kind", ODD_IDS)
def test_a_world_of_odd_ids_is_the_world_of_plain_ones(make_engine: Any, runner: dict[str, bool], kind: str) -> None:
    """Every event is the same but for the id and times, and no hook fails."""
    logs = []
    for named in (str, ODD_IDS[kind]):
        engine = crowd(make_engine, named, **runner)
        of_log = {logged_request_id(named(name)): name for name in ("0", "1", "2", "aborted")}
        of_log |= {logged_request_id(named(f"again {number}")): f"again {number}" for number in range(3)}
        assert not any(isinstance(event, e.HookFailed) for _, event in engine.events())
        assert len(engine.connector.scheduler_side.ids) == 0, "nothing is remembered of requests that are over"
        logs.append([plain(event, of_log) for _, event in engine.events()])
    assert logs[0] == logs[1]


def plain(event: e.Event, of_log: dict[str, str]) -> list[Any]:
    """Its fields, without times, with short ids."""
    fields = {name: getattr(event, name) for name in type(event).__match_args__ if not name.endswith("_ns")}
    if "request_id" in fields:
        fields["request_id"] = of_log[fields["request_id"]]
    return [type(event).__name__, fields]


def test_an_id_of_a_megabyte_takes_a_few_hundred_bytes_in_each_event(make_engine: Any) -> None:
    """Security review: one such id cost 19 MB of log, which pushed old evidence out."""
    engine = crowd(make_engine, lambda name: f"{LONG}{name}")
    assert all(
        len(text.encode()) <= 256 for _, event in engine.events() for text in strings(msgspec.to_builtins(event))
    )
    num_bytes = sum(len(frame.payload) for frame in engine.connector.scheduler_side.log.store.read())
    assert num_bytes < 300 * len(engine.events())


def test_ids_that_differ_behind_the_cut_are_two_requests(make_engine: Any) -> None:
    """At the same time, each with its own prompt and outputs."""
    engine = make_engine(num_blocks=40, chunk_size=8)
    for number in range(5):
        engine.add(f"{LONG}{number}", range(100 * number, 100 * number + 40), 20)
    engine.run()
    arrived = engine.logged(e.RequestArrived)
    assert len({event.request_id for event in arrived}) == 5
    assert {event.request_id for event in arrived} == {event.request_id for event in engine.logged(e.RequestFinished)}


@pytest.mark.parametrize("first", ["the long one", "the cut one"])
def test_the_cut_id_of_another_request_is_another_request(make_engine: Any, first: str) -> None:
    """A client that sends it on purpose gets no KV of the other request."""
    engine = make_engine(num_blocks=40, chunk_size=8, enable_prefix_caching=False)
    ids = [LONG, logged_request_id(LONG)]
    for place, request_id in enumerate(ids if first == "the long one" else reversed(ids)):
        engine.add(request_id, range(100 * place, 100 * place + 40), 20)
    for _ in range(4):
        engine.step()
    arrived = [event.request_id for event in engine.logged(e.RequestArrived)]
    assert len(set(arrived)) == 2
    assert logged_request_id(LONG) in arrived
    engine.run()


def test_the_cut_id_of_a_request_whose_save_runs_is_not_given_to_another(make_engine: Any) -> None:
    """A client sent the cut id, then the long one: the end of the first request was taken for one of the second.

    vLLM kept the blocks of the first request for ever, and the engine never became idle.
    """
    engine = make_engine(num_blocks=60, chunk_size=8, enable_prefix_caching=False, save_mode="async", load_mode="async")
    reported = note_reports(engine)
    copies = slow_down(engine, "save")
    cut = logged_request_id(LONG)
    engine.add(cut, range(64), 20)
    while cut not in engine.finish_reasons:
        engine.step()
    engine.add(LONG, range(300, 364), 40)
    engine.step()
    for worker in engine.workers:
        worker._worker_side._async_engine.slow.clear()
    for copy in copies[0].pending():
        copy.finish()
    engine.run()
    assert cut in reported.sent
    assert len({event.request_id for event in engine.logged(e.RequestArrived)}) == 2


def test_vllm_is_told_ends_by_its_own_ids(make_engine: Any) -> None:
    """It fails an assertion at an end of a request that it does not know, and keeps blocks of one that never ends."""
    engine = make_engine(num_blocks=40, chunk_size=8, enable_prefix_caching=False, save_mode="async", load_mode="async")
    reported = note_reports(engine)
    copies = slow_down(engine, "save")
    engine.add(LONG, range(64), 20)
    while LONG not in engine.finish_reasons:
        engine.step()
    for copy in copies[0].pending():
        copy.finish()
    engine.run()
    assert reported.sent == [LONG]
    for worker in engine.workers:
        worker._worker_side._async_engine.slow.clear()
    engine.serve(f"{LONG} again", range(64), 4)
    assert engine.logged(e.LoadIssued)


def test_an_id_may_be_used_again(make_engine: Any) -> None:
    """As soon as its blocks are free."""
    engine = make_engine(num_blocks=40, chunk_size=8)
    for start in (0, 300, 0):
        engine.serve(LONG, range(start, start + 40), 10)
    assert [event.request_id for event in engine.logged(e.RequestArrived)] == [logged_request_id(LONG)] * 3


def test_a_hook_that_fails_names_the_request_by_its_cut_id(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would cost as much as any other event."""
    engine = make_engine(num_blocks=40, chunk_size=8, replays=False)
    monkeypatch.setattr(engine.connector.scheduler_side.ids, "arrived", None)
    engine.serve(LONG, range(40), 3)
    (failed, *_) = engine.logged(e.HookFailed)
    assert failed.request_id == logged_request_id(LONG)
