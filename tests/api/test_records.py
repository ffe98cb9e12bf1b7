"""What `open_log` gives of a log: the same as the commands and the exported tables, as frozen records."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import pytest
from lifecycle_driver import Driver, keys_of, play_seed
from stored_logs import header_of, unfoldable, write_log

import kvledger
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.logs import index as index_module
from kvledger.adapters.tools.logs.log import open_log as stored_log
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events
from kvledger.lifecycle.projections.jobs import Jobs
from kvledger.storage.events import SegmentEventStore

Objects = Callable[..., list[dict[str, Any]]]
REQUEST = "chat-17-b6"


@pytest.fixture(params=["story", 3, 7], ids=["a story", "a random world", "another random world"])
def any_log(request: Any, story: Driver, tmp_path: Path) -> Path:
    """In a random world copies fail, ranks stay silent, requests are preempted and caches are reset."""
    driver = story
    if request.param != "story":
        driver = play_seed(request.param, 70, chunk_size=16, block_size=16, is_watched=False)
    return write_log(tmp_path / "log", driver.observed, driver.configuration)


def assert_equal(records: list[Any], rows: list[dict[str, Any]], columns: dict[str, Callable[[Any], object]]) -> None:
    """Each record has in its fields what its row has in these columns; other columns have other names or units."""
    assert rows
    shared = {field.name for field in attrs.fields(type(records[0]))} & rows[0].keys() - columns.keys()
    for record, row in zip(records, rows, strict=True):
        values = {name: getattr(record, name) for name in shared} | {
            name: value(record) for name, value in columns.items()
        }
        found = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        assert {name: None if value == "" else value for name, value in found.items()} == {
            name: row[name] for name in found
        }


def rows_of(log: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a table."""
    rows: list[dict[str, Any]] = kvledger.open_log(log).to_arrow(name).to_pylist()
    return rows


# --- one event each -----------------------------------------------------------------------------


def test_entries_are_the_events_with_their_numbers(any_log: Path) -> None:
    """A decision has the time of its observation."""
    entries = list(kvledger.open_log(any_log).entries())
    stored = list(stored_log(any_log).batches())
    timed = [each for batch in stored for each in batch.timed()]
    assert [(entry.sequence, entry.event, entry.time_ns) for entry in entries] == timed
    assert {entry.start for entry in entries} == {any_log.name}
    decisions = [entry for entry in entries if entry.cause is not None]
    assert all(entry.time_ns == entries[entry.cause - 1].time_ns for entry in decisions if entry.cause)


def test_lookups_are_the_rows_of_the_table(any_log: Path) -> None:
    """Answers and deferrals."""
    assert_equal(list(kvledger.open_log(any_log).lookups()), rows_of(any_log, "lookups"), {})


def test_steps_are_the_rows_of_the_table(any_log: Path) -> None:
    """Those that only decode, too."""
    assert_equal(list(kvledger.open_log(any_log).steps()), rows_of(any_log, "steps"), {})


def test_copies_are_the_rows_of_the_table_with_what_became_of_them(any_log: Path) -> None:
    """In the order of their settlements; those without one stand at the end. Times in a table never run backwards."""
    times = accumulate(
        kvledger.open_log(any_log).entries(), lambda latest, entry: max(latest, entry.time_ns), initial=0
    )
    latest_ns = dict(enumerate(times))
    columns: dict[str, Callable[[Any], object]] = {
        "time_ns": lambda copy: latest_ns[copy.sequence],
        "settled_ns": lambda copy: latest_ns.get(copy.settled_sequence),
        "copied_bytes": lambda copy: copy.num_bytes,
        "num_chunks": lambda copy: len(copy.chunks),
        "is_before_forward": lambda copy: copy.before_forward,
        "ranks_done": lambda copy: sorted(copy.ranks_done),
        "ranks_failed": lambda copy: sorted(copy.ranks_failed),
    }
    copies = list(kvledger.open_log(any_log).copies())
    assert_equal(copies, rows_of(any_log, "copies"), columns)
    is_settled = [copy.settled_sequence is not None for copy in copies]
    assert is_settled == sorted(is_settled, reverse=True)
    settled = [copy.settled_sequence for copy in copies if copy.settled_sequence is not None]
    assert settled == sorted(settled)


def test_an_eviction_names_the_chunks_in_their_order_and_the_request_that_took_their_slots(tmp_path: Path) -> None:
    """With two slots, the save of `b` takes those of `a`."""
    driver = Driver(num_slots=2)
    for name in ("a", "b"):
        driver.save_prefix(name, keys_of(name, 4))
    driver.ledger.commit()
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    evictions = list(kvledger.open_log(log).evictions())
    recorded = [event for event in driver.observed if isinstance(event, e.ChunksEvicted)]
    assert [(each.keys, each.request_id) for each in evictions] == [(event.keys, "b") for event in recorded]
    assert {key for each in evictions for key in each.keys} <= set(keys_of("a", 4))
    columns: dict[str, Callable[[Any], object]] = {
        "num_chunks": lambda each: len(each.keys),
        "cause_sequence": lambda each: each.cause,
    }
    assert_equal(evictions, rows_of(log, "evictions"), columns)


# --- requests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("has_index", [False, True], ids=["read", "from an index"])
def test_requests_are_those_that_show_lists_with_each_of_their_lives(
    any_log: Path, objects: Objects, monkeypatch: pytest.MonkeyPatch, has_index: bool
) -> None:
    """In the order of their first arrivals; the log may leave some of them open."""
    shown = objects("request", "show", any_log, "--limit", 0)
    if has_index:
        monkeypatch.setattr(index_module, "INDEX_FROM_BYTES", 0)
    lives = {request.request_id: request.lives for request in kvledger.open_log(any_log).requests()}
    fields = [field.name for field in attrs.fields(kvledger.Life)]
    expected: dict[str, list[dict[str, Any]]] = {}
    for each in shown:
        expected.setdefault(each["request_id"], []).append({name: each[name] for name in fields})
    assert {name: [attrs.asdict(life) for life in its] for name, its in lives.items()} == expected
    assert list(lives) == list(expected)
    assert all(kvledger.open_log(any_log).request(name).lives == its for name, its in lives.items())


def test_a_request_is_found_by_a_part_of_its_id(log: Path) -> None:
    """As a client knows it, without what vLLM adds."""
    opened = kvledger.open_log(log)
    assert {opened.request(name).request_id for name in (REQUEST, "chat-17", "17-b")} == {REQUEST}


# --- why ----------------------------------------------------------------------------------------


INCIDENT = """\
event 5, left to compute: tokens 0–511: no request had computed them before
event 5, left to compute: tokens 512–698: after the last whole chunk, so they have no key to be saved under
event 5, left to compute: token 699: the last known token is always computed, because …
event 18, left to compute: tokens 336–591 (chunks 1–2): claimed, but not loaded, because a rule was broken (event 19: …
event 18, left to compute: tokens 592–698: after the last whole chunk, so they have no key to be saved under
event 18, left to compute: token 699: the last known token is always computed, because …
event 26, computed again after a rollback: tokens 592–699 (chunk 2): rolled back by the scheduler (event 25, …
"""


def test_the_incident_of_the_readme_is_explained_by_what_prints(incident: Path) -> None:
    """That a rule was broken, at which event, and what it cost."""
    printed = [str(reason) for reason in kvledger.open_log(incident).request("cmpl-bench").why()]
    for shown, line in zip(INCIDENT.splitlines(), printed, strict=True):
        assert line.startswith(shown.removesuffix("…")), line


@pytest.mark.parametrize("has_index", [False, True], ids=["read", "from an index"])
def test_the_reasons_of_a_request_add_up_to_its_totals(
    any_log: Path, objects: Objects, monkeypatch: pytest.MonkeyPatch, has_index: bool
) -> None:
    """Those of admissions to what was missed, and the others to what was computed again."""
    if has_index:
        monkeypatch.setattr(index_module, "INDEX_FROM_BYTES", 0)
    for request in kvledger.open_log(any_log).requests():
        totals = objects("total", "why", any_log, request.request_id)
        missed: Counter[str] = Counter()
        again: Counter[str] = Counter()
        for reason in request.why():
            counts = {"admission": missed, "lookup": Counter[str]()}.get(reason.of, again)
            counts[reason.code.value] += reason.num_tokens
        assert missed == sum((Counter(total["missed"]) for total in totals), Counter())
        parts = (total[name] for total in totals for name in ("recomputed", "computed_twice"))
        assert again == sum(map(Counter, parts), Counter())


def test_the_reasons_of_the_incident_add_up_in_spite_of_the_rollback(incident: Path, objects: Objects) -> None:
    """The tokens that were claimed and not loaded were taken back afterwards."""
    (total,) = objects("total", "why", incident, "cmpl-bench")
    missed: Counter[str] = Counter()
    for reason in kvledger.open_log(incident).request("cmpl-bench").why():
        if reason.of == "admission":
            missed[reason.code.value] += reason.num_tokens
    assert missed == total["missed"]


def test_a_request_that_waits_has_the_reasons_of_its_last_lookup(tmp_path: Path) -> None:
    """It got no blocks yet, so nothing else can be said."""
    driver = Driver()
    driver.arrive("a", 33, keys_of("x", 4))
    driver.lookup("a", 0, 33)
    driver.ledger.commit()
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    reasons = list(kvledger.open_log(log).request("a").why())
    assert {reason.of for reason in reasons} == {"lookup"}
    assert sum(reason.num_tokens for reason in reasons) == 33
    assert str(reasons[0]).startswith("event 3, not found: tokens 0–31")


# --- verify -------------------------------------------------------------------------------------


def test_a_report_says_what_verify_says(incident: Path, objects: Objects) -> None:
    """Verdict, violations, divergences, and the rules that a log cannot decide."""
    report = kvledger.open_log(incident).verify()
    (of_log,) = report.logs
    (verdict,) = objects("verdict", "verify", incident)
    assert (report.verdict, of_log.text, of_log.ended) == (verdict["verdict"], verdict["text"], verdict["end"])
    assert (of_log.head_hash, of_log.num_events) == (verdict["head_hash"], verdict["num_events"])
    assert (of_log.first_event_checked, of_log.last_event_checked) == (1, 29)
    assert of_log.num_violations == verdict["num_violations"]
    shown = ("rule", "sequence", "request_id", "generation", "detail")
    expected = [tuple(each[name] for name in shown) for each in objects("violation", "verify", incident)]
    assert [tuple(getattr(each, name) for name in shown) for each in report.violations] == expected
    assert list(kvledger.open_log(incident).violations()) == list(report.violations)
    assert [each.sequence for each in report.divergences] == [17]
    assert report.divergences[0].recorded != report.divergences[0].decided
    assert report.not_judged == {each["rule"]: each["reason"] for each in objects("not_checked", "verify", incident)}
    assert report.damage == ()
    assert f"{incident}: rule broken\n  LOOKUP_PURE at event 17" in str(report)


def test_the_incident_of_the_readme_is_one_finding_in_every_tool(
    incident: Path, objects: Objects, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three breaches, two of them seen only by the audit, and a decision that comes out otherwise have one cause."""
    report = kvledger.open_log(incident).verify()
    (finding,) = report.findings
    assert finding.text.startswith("LOOKUP_PURE at event 17, request cmpl-bench-16-0, generation 1: answered 256 ")
    assert [re.sub(r":.*", "", text) for text in finding.follows] == [
        "LOOKUP_PURE at event 17",
        "a decision differs at event 17",
        "RECORDED at event 19",
    ]
    assert {each.finding for each in (*report.violations, *report.divergences)} == {17}
    assert objects("verdict", "verify", incident)[0]["num_findings"] == 1
    assert main(["verify", str(incident)]) == 1
    assert "findings    1\n" in capsys.readouterr().out
    assert main(["export", str(incident), "--html"]) == 0
    page = capsys.readouterr().out
    assert ">1 finding<" in page
    assert page.count('class="finding"') == 1
    assert main(["stats", str(incident)]) == 0
    assert "faults      1 broken rule and 0 failed hooks recorded by the connector\n" in capsys.readouterr().out
    assert main(["why", str(incident), "cmpl"]) == 0
    why = capsys.readouterr().out
    assert why.count("BROKEN") == 2, "the cause, and the reason of the tokens that it cost"
    assert "19–20  LOADABLE_AFTER_COMMIT BROKEN: " in why


def test_a_sound_log_is_called_sound(log: Path) -> None:
    """A verdict is a word that can be compared."""
    report = kvledger.open_log(log).verify()
    assert report.verdict is kvledger.Verdict.SOUND
    assert (report.violations, report.divergences, report.damage) == ((), (), ())


def test_damage_is_reported_and_what_can_be_read_is_given(story: Driver, tmp_path: Path) -> None:
    """Events 5 to 7 were lost: entries and lookups go on, and nothing behind the gap is checked."""
    store = SegmentEventStore.create(tmp_path / "log", header_of(story.configuration))
    store.append(encode_events(story.observed[:4]), 4)
    store.append_gap(3, "no space left on device")
    store.append(encode_events(story.observed[7:]), len(story.observed) - 7)
    store.close()
    log = kvledger.open_log(tmp_path / "log")
    report = log.verify()
    assert report.verdict is kvledger.Verdict.DAMAGED
    assert [(each.kind, each.sequence) for each in report.damage] == [("lost_events", 5)]
    assert report.logs[0].last_event_checked == 4
    numbers = [entry.sequence for entry in log.entries()]
    assert numbers == [*range(1, 5), *range(8, len(story.observed) + 1)]
    assert [request.request_id for request in log.requests()] == [REQUEST, "chat-9"]
    assert list(log.request(REQUEST).why())


def test_an_event_that_cannot_be_folded_is_a_divergence_with_its_error(
    story: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No event is known to cause that now, so a fold is made to fail."""

    def doubt_saves(_projection: Jobs, ordinal: int) -> None:
        raise KeyError(ordinal)

    monkeypatch.setattr(Jobs, "_doubt_saves", doubt_saves)
    log = write_log(tmp_path / "log", unfoldable(story.observed), story.configuration)
    report = kvledger.open_log(log).verify()
    assert report.verdict is kvledger.Verdict.RULE_BROKEN
    (error,) = [each.error for each in report.divergences if each.error]
    assert error.startswith("KeyError")
    assert [request.request_id for request in kvledger.open_log(log).requests()] == [REQUEST, "chat-9"]


def test_records_are_frozen(log: Path) -> None:
    """They can be kept, compared and put into sets."""
    opened = kvledger.open_log(log)
    for record in (next(opened.entries()), next(opened.requests()), next(opened.lookups()), next(opened.copies())):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            record.start = "other"  # type: ignore[misc]
    assert len({*opened.copies(), *opened.copies()}) == len(list(opened.copies()))
