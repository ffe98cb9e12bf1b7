"""A log whose oldest segments were retired: read from its first snapshot, by every command."""

from __future__ import annotations

import html
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import pytest
from lifecycle_driver import play_seed
from msgspec.structs import replace
from stored_logs import header_of

import kvledger
from kvledger.adapters.tools.logs import index as index_module
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.reading import begin_model, take_batch
from kvledger.adapters.tools.logs.snapshots import write_snapshots
from kvledger.lifecycle import Core, Ledger, projections
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import vocabulary_header
from kvledger.lifecycle.projections.base import Subject
from kvledger.lifecycle.projections.costs import TokenCosts
from kvledger.lifecycle.reader import Life, Model, Reader, Visitor
from kvledger.lifecycle.snapshots import state_fingerprint
from kvledger.storage.events import SegmentEventStore, Snapshot, usable_snapshot, write_snapshot
from kvledger.storage.events.segment_file import segment_paths


@attrs.frozen
class Retired:
    """Two logs of the same events, of which one has lost its oldest half, and a request that arrived behind that."""

    whole: Path
    log: Path
    late_request: str
    early_request: str


class Miscounting(TokenCosts):
    """As the costs were before they were corrected: the same state, another fold."""

    def _load_issued(self, event: e.LoadIssued, sequence: int, subject: Subject) -> None:
        """Each load has twice its tokens."""
        super()._load_issued(replace(event, num_tokens=2 * event.num_tokens), sequence, subject)


@pytest.fixture
def retired(run: Any, tmp_path: Path) -> Retired:
    """Written by the code that reads it."""
    return write_retired(Core.standard(), run, tmp_path)


@pytest.fixture
def miscounted(run: Any, tmp_path: Path) -> Retired:
    """Written by other code."""
    code = MappingProxyType({**Core.standard().code, __name__: "0" * 32})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(projections, "TokenCosts", Miscounting)
        patched.setattr(Core, "code", property(lambda _core: code))
        return write_retired(Core.standard(), run, tmp_path)


def write_retired(core: Core, run: Any, tmp_path: Path) -> Retired:
    """Played twice, as an engine would have written it, with a snapshot at each new segment."""
    driver = play_seed(10, 140, chunk_size=16, block_size=16)
    observations = [event for event in driver.observed if not event.is_decision]
    for name in ("whole", "log"):
        header = header_of(driver.configuration, vocabulary_header(core))
        store = SegmentEventStore.create(tmp_path / name, header, segment_bytes=16_000)
        ledger = Ledger(core, driver.configuration, store)
        for event in observations:
            ledger.observe(event)
            ledger.commit()
        store.close()
        write_snapshots(open_log(tmp_path / name, core))
    log = tmp_path / "log"
    segments = segment_paths(log)
    kept = segments[len(segments) // 2]
    files = [file for segment in segments if segment >= kept for file in (segment, segment.with_suffix(".snapshot"))]
    num_bytes = sum(file.stat().st_size for file in files) + kept.stat().st_size // 2
    assert run("retire", log, "--max-bytes", num_bytes).exit_code == 0
    first = int(segment_paths(log)[0].stem)
    assert first > 1
    numbered = enumerate(driver.observed, 1)
    arrivals = [(at, event.request_id) for at, event in numbered if isinstance(event, e.RequestArrived)]
    late = next(name for at, name in arrivals if at > first + 40)
    return Retired(tmp_path / "whole", log, late, arrivals[0][1])


def without_finding(violation: dict[str, Any]) -> dict[str, Any]:
    """A finding may begin in what was retired."""
    return {name: value for name, value in violation.items() if name != "finding"}


def test_verify_finds_in_what_is_left_what_it_finds_in_the_whole(run: Any, retired: Retired) -> None:
    """From the snapshot on, and says so."""
    result = run("verify", "--json", retired.log)
    (verdict,) = result.objects("verdict")
    assert any("from a snapshot" in remark for remark in verdict["remarks"])
    assert verdict["num_events_checked"] == verdict["num_events"]
    whole = run("verify", "--json", retired.whole)
    first = whole.objects("verdict")[0]["num_events"] - verdict["num_events_checked"] + 1
    expected = [violation for violation in whole.objects("violation") if violation["sequence"] >= first]
    assert expected, "the walk plays doubled reports"
    assert list(map(without_finding, result.objects("violation"))) == list(map(without_finding, expected))
    assert result.exit_code == whole.exit_code


def test_the_page_judges_what_is_left_as_verify_does(run: Any, retired: Retired) -> None:
    """The same breaches, judged from the same snapshot; what was there then is drawn."""
    violations = run("verify", "--json", retired.log).objects("violation")
    page = html.unescape(run("export", "--html", retired.log).out)
    assert "were checked from event" in page
    for violation in violations:
        if violation["sequence"] == violation["finding"]:
            assert re.search(rf"{violation['rule']} at events? {violation['sequence']}\b", page)
    arrivals = kvledger.open_log(retired.log).to_arrow("requests")["sequence"].to_pylist()
    assert min(arrivals) < int(segment_paths(retired.log)[0].stem), "who was there in the snapshot"


def test_what_other_code_has_folded_is_not_trusted_unless_that_is_asked_for(run: Any, miscounted: Retired) -> None:
    """The parts have the same names and the state has the same layout; only the source tells."""
    refused, trusted = (run("verify", "--json", *options, miscounted.log) for options in ([], ["--trust-snapshots"]))
    (verdict,), (trusting,) = refused.objects("verdict"), trusted.objects("verdict")
    other_code = f"other code ({__name__})"
    assert any(f"the log was written by {other_code}" in remark for remark in verdict["remarks"])
    assert any("give --trust-snapshots to begin at one" in remark for remark in verdict["remarks"])
    assert any("neither rules nor decisions could be checked" in remark for remark in verdict["remarks"])
    assert verdict["num_divergences"] == 0
    assert trusting["num_events_checked"] > verdict["num_events_checked"]
    assert any(f"the log was written by {other_code}" in remark for remark in trusting["remarks"])
    shown = run("show", miscounted.log, "--at", 100_000)
    assert "give --trust-snapshots to begin at one" in shown.err
    assert f"the log was written by {other_code}" in shown.err


def test_an_index_is_not_trusted_that_begins_with_what_other_code_has_folded(
    run: Any, miscounted: Retired, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks without the option gets what he would get without an index."""
    monkeypatch.setattr(index_module, "INDEX_FROM_BYTES", 0)
    trusted = run("show", "--json", "--trust-snapshots", miscounted.log).out
    assert run("show", "--json", miscounted.log).out != trusted
    assert run("show", "--json", "--trust-snapshots", miscounted.log).out == trusted


def test_other_code_is_no_divergence_of_a_log_that_has_its_beginning(run: Any, miscounted: Retired) -> None:
    """It is folded from there, by the code that is here."""
    (verdict,) = run("verify", "--json", miscounted.whole).objects("verdict")
    assert any(f"the log was written by other code ({__name__})" in remark for remark in verdict["remarks"])
    assert (verdict["num_divergences"], verdict["num_events_checked"]) == (0, verdict["num_events"])


def test_show_counts_as_if_the_beginning_were_there(
    run: Any, retired: Retired, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Totals are part of what a snapshot holds; with an index and without."""
    (whole,) = run("show", "--json", retired.whole).objects("log")
    result = run("show", "--json", retired.log)
    assert result.objects("log")[0]["figures"] == whole["figures"]
    assert "are known from a snapshot only" in result.err
    monkeypatch.setenv("XDG_CACHE_HOME", str(retired.log.parent / "cache"))
    monkeypatch.setattr(index_module, "INDEX_FROM_BYTES", 0)
    assert run("show", "--json", retired.log).objects("log")[0]["figures"] == whole["figures"]


def _snapshot(path: Path) -> Snapshot:
    log = open_log(path.parent)
    fingerprint = state_fingerprint(log.core, log.configuration)
    snapshot = usable_snapshot(path, log_id=str(log.header["log_id"]), fingerprint=fingerprint)
    assert isinstance(snapshot, Snapshot), snapshot
    return snapshot


@pytest.mark.parametrize("is_indexed", [False, True])
def test_show_prints_no_totals_where_the_snapshot_has_none(
    run: Any, retired: Retired, monkeypatch: pytest.MonkeyPatch, *, is_indexed: bool
) -> None:
    """Sums of what is left would be taken for sums of the log. All else is known."""
    first = min(retired.log.glob("*.snapshot"))
    snapshot = _snapshot(first)
    assert snapshot.totals
    for path in retired.log.glob("*.snapshot"):
        path.unlink()
    write_snapshot(first.with_suffix(".kvlog"), attrs.evolve(snapshot, totals=b""))
    assert write_snapshots(open_log(retired.log)) > 0
    assert {_snapshot(path).totals for path in retired.log.glob("*.snapshot")} == {b""}
    for options in ((), ("--at", 100_000)):
        shown = run("show", retired.log, *options)
        assert "no totals of the events before it" in shown.err + shown.out
    if is_indexed:
        monkeypatch.setattr(index_module, "INDEX_FROM_BYTES", 0)
    result = run("show", "--json", retired.log)
    assert result.objects("log")[0]["figures"] is None
    assert "totals of this log are not known" in result.err
    assert result.objects("request")
    (state,) = run("show", "--json", retired.log, "--at", 100_000).objects("state")
    assert state["totals"] is None
    assert "not known: reading begins at a snapshot" in run("export", "--html", retired.log).out


class Ends(Visitor[Model]):
    """Collects the lives that end, and what is missing."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.ended_lives: dict[int, tuple[str, str, int, bool]] = {}
        self.gaps: list[tuple[int, int]] = []

    def ended(self, life: Life) -> None:
        """Remember it."""
        self.ended_lives[life.ordinal] = life.request_id, life.path, life.generation, life.is_partial

    def lost(self, first_sequence: int, last_sequence: int) -> None:
        """Remember it."""
        self.gaps.append((first_sequence, last_sequence))


def read_ends(path: Path) -> tuple[Ends, int]:
    """Read a log; returns what ended, and the event that it begins with."""
    log = open_log(path)
    model = begin_model(log)
    visitor = Ends(model)
    reader = Reader(model, [visitor])
    for batch in log.batches():
        take_batch(reader, log, batch)
    return visitor, log.first_sequence


def test_the_reader_begins_at_the_snapshot_or_as_behind_a_gap(retired: Retired) -> None:
    """With the snapshot it knows every life that ends later; without, the same lives, whose beginning is missing."""
    whole, _ = read_ends(retired.whole)
    rest, first = read_ends(retired.log)
    assert rest.ended_lives
    assert rest.ended_lives.items() <= whole.ended_lives.items()
    assert not rest.gaps
    for path in retired.log.glob("*.snapshot"):
        path.unlink()
    late, _ = read_ends(retired.log)
    assert late.gaps == [(1, first - 1)]
    assert late.ended_lives.keys() == rest.ended_lives.keys()
    assert any(is_partial for *_, is_partial in late.ended_lives.values())
    whole_lives = {life for life in late.ended_lives.items() if not life[1][-1]}
    assert whole_lives <= whole.ended_lives.items()


def test_the_state_at_a_moment_is_that_of_the_whole_log(run: Any, retired: Retired) -> None:
    """As long as the moment lies behind the snapshot."""
    last = run("verify", "--json", retired.whole).objects("verdict")[0]["num_events"]
    for moment in (last, last - 30):
        whole = run("show", "--json", retired.whole, "--at", moment).objects("state")
        assert run("show", "--json", retired.log, "--at", moment).objects("state") == whole


def test_a_request_that_arrived_later_is_shown_as_before(run: Any, retired: Retired) -> None:
    """Its last incarnation, to the same end; that something is missing before it is reported once."""
    groups = run("show", "--json", retired.log, retired.late_request).objects("group")
    whole = run("show", "--json", retired.whole, retired.late_request).objects("group")
    assert groups[-1] == whole[-1]
    assert [group["what"] for group in groups].count("lost") == 1


def test_a_request_that_the_snapshot_knows_is_shown_in_its_state(run: Any, retired: Retired) -> None:
    """Its steps, too, which do not name it: its arrival is gone, and the state of each group was empty."""
    names = [life.request_id for life in begin_model(open_log(retired.log)).lives]
    assert names
    for name in names:
        lost, *groups = run("show", "--json", retired.log, name).objects("group")
        assert lost["what"] == "lost"
        whole = run("show", "--json", retired.whole, name).objects("group")
        behind = [group for group in whole if group["first_sequence"] > lost["last_sequence"]]
        assert [group["state_after"] for group in groups[-len(behind) :]] == [group["state_after"] for group in behind]


@pytest.mark.parametrize("command", [("stats",), ("why", "LATE"), ("export", "--perfetto")])
def test_the_other_commands_read_what_is_left(run: Any, retired: Retired, command: tuple[str, ...]) -> None:
    """None of them needs the beginning."""
    name, *rest = (retired.late_request if word == "LATE" else word for word in command)
    result = run(name, retired.log, *rest)
    assert result.exit_code == 0, result.err
    assert result.out
