"""--since, --until and --request: what is shown, and that nothing else changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver, keys_of
from stored_logs import replaced, write_log

from kvledger.adapters.tools.cli.options import Moment, moment
from kvledger.lifecycle import events as e

REQUEST = "chat-17-b6"


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("90211", "event", 90211),
        ("1.5s", "since_opening_ns", 1_500_000_000),
        ("250ms", "since_opening_ns", 250_000_000),
        ("1h30m", "since_opening_ns", 5_400_000_000_000),
        ("2d", "since_opening_ns", 172_800_000_000_000),
        ("0s", "since_opening_ns", 0),
        ("1970-01-01T00:00:01", "unix_ns", 1_000_000_000),
        ("1970-01-01T01:00:01+01:00", "unix_ns", 1_000_000_000),
        ("1970-01-02", "unix_ns", 86_400_000_000_000),
        ("00:00:01.5", "of_day_ns", 1_500_000_000),
        ("01:00:01+01:00", "of_day_ns", 1_000_000_000),
    ],
)
def test_a_moment_is_an_event_a_time_in_the_log_or_a_time_of_day(text: str, kind: str, value: int) -> None:
    """Whatever the on-call engineer has at hand."""
    assert moment(text) == Moment(kind, value, text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "0", "-1", "yesterday", "1.5", "1.5s later", "5 m", "25:00"])
def test_what_is_no_moment_is_refused_with_examples(text: str) -> None:
    """The next try succeeds."""
    with pytest.raises(ValueError, match="1h30m"):
        moment(text)


def test_a_wrong_moment_is_wrong_usage(run: Any, log: Path) -> None:
    """And not a traceback."""
    result = run("verify", log, "--since", "yesterday")
    assert result.exit_code == 64
    assert "'yesterday' is not a moment" in result.err


def test_until_ends_the_reading_and_since_the_telling(run: Any, log: Path) -> None:
    """The groups of a request between two events are those of the whole log that lie there."""
    groups = run("show", "--json", log, REQUEST).objects("group")
    some = run("show", "--json", log, REQUEST, "--since", 32, "--until", 44).objects("group")
    assert some == [group for group in groups if group["last_sequence"] >= 32 and group["first_sequence"] <= 44]
    assert 0 < len(some) < len(groups)


def test_a_time_selects_the_same_as_its_event(run: Any, log: Path) -> None:
    """Times in the log and times of day are turned into event numbers."""
    groups = run("show", "--json", log, REQUEST).objects("group")
    preempted = next(group for group in groups if group["what"] == "request.preempted")
    since_opening = f"{preempted['time_ns']}ns"
    expected = run("show", "--json", log, REQUEST, "--since", preempted["first_sequence"]).out
    assert run("show", "--json", log, REQUEST, "--since", since_opening).out == expected
    assert run("show", "--json", log, REQUEST, "--since", "2025-06-15T15:06:40+00:00").out == (
        run("show", "--json", log, REQUEST).out
    )
    until = run("show", "--json", log, REQUEST, "--until", since_opening).objects("group")
    assert until[-1]["what"] == "request.preempted"
    assert until[-1]["text"] == preempted["text"], "decisions belong to their observation"


def test_times_that_are_printed_select_what_they_stand_beside(run: Any, tmp_path: Path) -> None:
    """They are cut to milliseconds, or seconds, and have no date; the night is in between."""
    driver = Driver()
    for name in ("a", "b", "c"):
        driver.arrive(name, 5)
    hour_ns = 3_600 * 10**9
    times = (700_123_456, 10 * hour_ns + 800_123_456, 11 * hour_ns + 900_123_456)
    events = driver.observed
    for place, time_ns in enumerate(times):
        events = replaced(events, e.RequestArrived, place, time_ns=time_ns)
    log = write_log(tmp_path / "log", events, driver.configuration)  # opened at 15:06:40
    printed = {line.split()[0]: line.split()[2] for line in run("show", log).out.splitlines()[-3:]}
    assert list(printed.values()) == ["15:06:40.700", "01:06:40.800", "02:06:40.900"]

    def shown(*options: str) -> list[object]:
        return [request["request_id"] for request in run("show", "--json", log, *options).objects("request")]

    for names, name in (("a", "a"), ("ab", "b"), ("abc", "c")):
        assert shown("--until", printed[name]) == list(names)
        assert shown("--until", printed[name][:8]) == list(names)
    assert shown("--until", "15:06:40.699") == []


def test_a_selection_without_an_event_is_refused(run: Any, log: Path) -> None:
    """Rather than an empty page."""
    result = run("verify", log, "--since", 40, "--until", 30)
    assert result.exit_code == 64
    assert "--since 40 --until 30 selects no event" in result.err


def test_a_time_of_day_needs_a_log_that_knows_its_own(run: Any, story: Driver, tmp_path: Path) -> None:
    """The remedy is named."""
    log = write_log(tmp_path / "log", story.observed, story.configuration, header={"opened_at_unix_ns": "unknown"})
    result = run("verify", log, "--since", "2025-06-15T15:06:40Z")
    assert result.exit_code == 64
    assert "has no opening time" in result.err


@pytest.fixture
def two_breaches(tmp_path: Path) -> Path:
    """A log in which first `a` and then `b` is given more than it was offered."""
    driver = Driver()
    for request_id in ("a", "b"):
        driver.start(request_id, keys_of(request_id, 2), 20, (1, 2) if request_id == "a" else (3, 4))
        driver.settle_all()
    events = driver.observed
    for index in (0, 1):
        events = replaced(events, e.BlocksAllocated, index, num_external_tokens=8)
    log: Path = write_log(tmp_path / "breaches", events, driver.configuration)
    return log


def test_verify_shows_only_the_findings_that_are_selected(run: Any, two_breaches: Path) -> None:
    """By request and by time; the rest of the log is still what the findings are judged by."""
    everything = run("verify", "--json", two_breaches).objects("violation")
    assert {violation["request_id"] for violation in everything} == {"a", "b"}
    only_b = run("verify", "--json", two_breaches, "--request", "b")
    assert only_b.objects("violation") == [v for v in everything if v["request_id"] == "b"]
    first_of_b = only_b.objects("violation")[0]["sequence"]
    assert run("verify", "--json", two_breaches, "--since", first_of_b).objects("violation") == [
        v for v in everything if v["sequence"] >= first_of_b
    ]
    before = run("verify", "--json", two_breaches, "--until", everything[0]["sequence"] - 1)
    assert before.exit_code == 0
    (verdict,) = before.objects("verdict")
    assert "are reported" in verdict["remarks"][0]


def test_two_causes_are_two_findings(run: Any, two_breaches: Path) -> None:
    """Each request's breach is a finding with what follows from it, in text and for programs."""
    text = run("verify", two_breaches).out
    assert "findings    2\n" in text
    for request_id in ("a", "b"):
        assert re.search(rf"^  \S+ at event \d+, request {request_id}, generation 0$", text, re.MULTILINE)
    result = run("verify", "--json", two_breaches)
    assert result.objects("verdict")[0]["num_findings"] == 2
    finding_of: dict[int, set[str]] = {}
    for violation in result.objects("violation"):
        finding_of.setdefault(violation["finding"], set()).add(violation["request_id"])
    assert sorted(map(sorted, finding_of.values())) == [["a"], ["b"]]


def test_requests_that_ended_before_are_not_listed(run: Any, log: Path) -> None:
    """`show --since` lists those that lived then."""
    end = run("show", "--json", log, REQUEST).objects("group")[-1]["last_sequence"]
    listed = run("show", "--json", log, "--since", end).objects("request")
    assert [request["request_id"] for request in listed] == [REQUEST, "chat-9"]
    listed = run("show", "--json", log, "--since", end + 1).objects("request")
    assert [request["request_id"] for request in listed] == ["chat-9"]
    listed = run("show", "--json", log, "--until", 20).objects("request")
    assert [request["request_id"] for request in listed] == [REQUEST]


def test_a_state_is_that_of_the_log_or_of_a_request(run: Any, log: Path) -> None:
    """Of the whole state, or of a request's."""
    assert "state after event 20" in run("show", log, "--at", 20).out
    state = run("show", "--json", log, "--at", 20, "--request", REQUEST).objects("request_state")
    assert [item["request_id"] for item in state] == [REQUEST]
