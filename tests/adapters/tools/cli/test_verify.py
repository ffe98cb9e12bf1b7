"""`kvledger verify`: every exit code, and what stands behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from lifecycle_driver import Driver, keys_of
from log_torture import reopened
from stored_logs import header_of, play_story, replaced, unfoldable, write_log

from kvledger.adapters.core import composed_core
from kvledger.adapters.units import duration
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events, vocabulary_header
from kvledger.storage.events import SegmentEventStore
from kvledger.storage.events.segment_file import read_header


def only_segment(log: Path) -> Path:
    """The one segment of a log."""
    (segment,) = log.glob("*.kvlog")
    return segment


def flip(path: Path, offset: int) -> None:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def lose_header(segment: Path) -> None:
    """Overwrite both copies of a segment's header."""
    num_bytes = read_header(segment).num_bytes
    segment.write_bytes(bytes(num_bytes) + segment.read_bytes()[num_bytes:])


def test_a_sound_log_gives_0(run: Any, log: Path) -> None:
    """Chain, rules and decisions are each reported to be in order."""
    result = run("verify", log)
    assert result.exit_code == 0, result.out
    assert "intact" in result.out
    assert f"{len(Core.standard().rules)} checked" in result.out
    assert "repeated, all equal" in result.out
    assert result.out.endswith("sound\n")


def test_a_broken_rule_gives_1_and_is_named_with_its_evidence(run: Any, story: Driver, tmp_path: Path) -> None:
    """Rule, event, request, generation, and the events that show it."""
    events = replaced(story.observed, e.BlocksAllocated, 1, num_external_tokens=80)
    log = write_log(tmp_path / "broken", events, story.configuration)
    sequence = 1 + next(place for place, event in enumerate(events) if getattr(event, "num_external_tokens", 0) == 80)
    result = run("verify", log)
    assert result.exit_code == 1
    assert f"ALLOC_MATCHES_LOOKUP at event {sequence}, request chat-17-b6, generation 1" in result.out
    assert f"{sequence - 1}  looked up 65 tokens" in result.out
    assert f"{sequence}  got 5 blocks, 80 offered tokens claimed" in result.out
    first, *_ = run("verify", "--json", log).objects("violation")
    assert first["rule"] == "ALLOC_MATCHES_LOOKUP"
    assert first["sequence"] == sequence
    assert first["request_id"] == "chat-17-b6"
    assert first["generation"] == 1
    assert first["evidence"] == [sequence - 1]


def test_a_flipped_bit_gives_2_and_is_located(run: Any, log: Path) -> None:
    """Damage is reported with segment, offset and the sequence it hits."""
    flip(only_segment(log), only_segment(log).stat().st_size - 500)
    result = run("verify", "--json", log)
    assert result.exit_code == 2
    (damage,) = result.objects("damage")
    assert damage["kind"] == "corrupt_frame"
    assert damage["segment"] == only_segment(log).name
    (verdict,) = result.objects("verdict")
    assert verdict["verdict"] == "damaged"
    assert 0 < verdict["num_events_checked"] < verdict["num_events"]
    assert "missing" in verdict["remarks"][0]


def test_a_damaged_copy_of_the_header_is_named_and_everything_is_checked(run: Any, log: Path) -> None:
    """The header names vocabulary and configuration; it is there twice."""
    sound = run("verify", "--json", log).objects("verdict")[0]
    flip(only_segment(log), 100)
    result = run("verify", "--json", log)
    assert result.exit_code == 2
    assert [damage["kind"] for damage in result.objects("damage")] == ["corrupt_header"]
    (verdict,) = result.objects("verdict")
    same = ("num_events", "num_events_checked", "num_violations", "num_divergences", "head_hash", "rules")
    assert [verdict[name] for name in same] == [sound[name] for name in same]


def test_without_any_header_events_are_still_read_and_it_is_named_what_cannot_be_judged(
    run: Any, story: Driver, tmp_path: Path
) -> None:
    """A log of one segment, both copies damaged: today's vocabulary fits, the configuration is gone."""
    log = write_log(tmp_path / "log", story.observed, story.configuration)
    lose_header(only_segment(log))
    result = run("verify", "--json", log)
    assert (result.exit_code, result.err) == (2, "")
    assert [damage["kind"] for damage in result.objects("damage")] == ["corrupt_header"]
    (verdict,) = result.objects("verdict")
    assert (verdict["num_events"], verdict["num_events_checked"], verdict["rules"]) == (len(story.observed), 0, [])
    assert "neither rules nor decisions can be checked" in verdict["remarks"][0]
    text = run("verify", log)
    assert "rules       not checked" in text.out
    assert "decisions" not in text.out.replace("nor decisions can", "")
    listed = run("show", log)
    assert listed.exit_code == 0
    assert "chat-17-b6" in listed.out
    assert "corrupt_header" in listed.err
    assert run("show", "--json", log).objects("log")[0]["figures"] is None
    for arguments in (
        ("show", log, "chat-17"),
        ("show", log, "--at", 5),
        ("why", log, "chat-17"),
        ("stats", log),
        ("export", log, "--perfetto"),
        ("export", log, "--html"),
        ("repro", log, "-o", "test_incident.py"),
    ):
        refused = run(*arguments)
        assert refused.exit_code == 2, arguments
        assert "which has the configuration, is intact" in refused.err, arguments


def test_events_that_todays_vocabulary_does_not_fit_are_not_guessed_without_a_header(run: Any, tmp_path: Path) -> None:
    """They were written by another version, and the header that said how is gone."""
    store = SegmentEventStore.create(tmp_path / "log", {})
    store.append(b"\x91\x92\x00\x01", 1)
    store.close()
    lose_header(only_segment(tmp_path / "log"))
    result = run("verify", tmp_path / "log")
    assert result.exit_code == 2
    assert "no segment has a readable header" in result.err


def test_a_torn_tail_gives_2(run: Any, log: Path) -> None:
    """A log that ends in the middle of a frame has no clean end: something was being written and is lost."""
    segment = only_segment(log)
    segment.write_bytes(segment.read_bytes()[:-3])
    result = run("verify", log)
    assert result.exit_code == 2
    assert "torn_tail" in result.out
    assert "repeated, all equal" in result.out


def test_events_that_the_writer_lost_give_2_and_end_the_checks(run: Any, story: Driver, tmp_path: Path) -> None:
    """After a gap the state is not known, so nothing after it can be judged."""
    store = SegmentEventStore.create(tmp_path / "gap", header_of(story.configuration))
    store.append(encode_events(story.observed[:4]), 4)
    store.append_gap(3, "no space left on device")
    store.append(encode_events(story.observed[7:9]), 2)
    store.close()
    result = run("verify", "--json", tmp_path / "gap")
    assert result.exit_code == 2
    (damage,) = result.objects("damage")
    assert damage["kind"] == "lost_events"
    assert damage["sequence"] == 5
    assert "no space left on device" in damage["detail"]
    (verdict,) = result.objects("verdict")
    assert (verdict["num_events"], verdict["num_events_checked"]) == (6, 4)
    (end,) = result.objects("end")
    assert end["num_open_requests"] is None, "the state before the gap is not that of the end"


def test_a_frame_that_is_not_what_the_header_promises_gives_2(run: Any, story: Driver, tmp_path: Path) -> None:
    """Intact bytes that are no events, and a wrong count of events, are damage too."""
    store = SegmentEventStore.create(tmp_path / "odd", header_of(story.configuration))
    store.append(encode_events(story.observed[:1]), 1)
    store.append(b"not msgpack", 1)
    store.append(encode_events(story.observed[1:2]), 2)
    store.close()
    result = run("verify", "--json", tmp_path / "odd")
    assert result.exit_code == 2
    assert [damage["kind"] for damage in result.objects("damage")] == ["undecodable", "miscounted"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"schema_version": 99, "kvledger_version": "9.9.9"}, "9.9.9"),
        (
            {"schema_version": 1, "kvledger_version": "0.0.1"},
            "kvledger 0.0.1 wrote the log: read it with that version",
        ),
        ({"configuration": {"block_size": 16, "chunk_size": 8, "num_slots": 8, "tiers": 2}}, "tiers"),
        ({"configuration": {"block_size": 16, "chunk_size": 7, "num_slots": 8}}, "chunk_size: 7"),
        ({"configuration": None}, "no configuration"),
        ({"vocabulary": [{"id": "moon.landed", "version": 1, "fields": []}]}, "moon.landed"),
    ],
)
def test_a_log_that_cannot_be_understood_gives_2_and_says_why(
    changes: dict[str, object], named: str, run: Any, story: Driver, tmp_path: Path
) -> None:
    """Too new, or not ours: the message names what is unknown."""
    log = write_log(tmp_path / "new", story.observed, story.configuration, header=changes)
    result = run("verify", log)
    assert result.exit_code == 2
    assert result.out == ""
    assert named in result.err


def test_a_file_that_is_no_log_gives_2(run: Any, tmp_path: Path) -> None:
    """Whatever it is, it cannot be decoded."""
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    result = run("verify", path)
    assert result.exit_code == 2
    assert "no segment has a readable header" in result.err


def test_another_decision_gives_3(run: Any, story: Driver, tmp_path: Path) -> None:
    """No rule is broken, for any free slot will do, but today's code would have written something else."""
    place, save = next((at, event) for at, event in enumerate(story.observed) if isinstance(event, e.SaveIssued))
    slots = tuple(slot + 8 for slot in save.slots)
    events = replaced(story.observed[: place + 1], e.SaveIssued, 0, slots=slots)
    result = run("verify", "--json", write_log(tmp_path / "other", events, story.configuration))
    assert result.exit_code == 3
    (divergence,) = result.objects("divergence")
    assert divergence["recorded"]["slots"] == list(slots)
    assert divergence["decided"]["slots"] == list(save.slots)
    assert run("verify", tmp_path / "other").exit_code == 3


@pytest.mark.usefixtures("failing_fold")
def test_an_event_that_cannot_be_folded_gives_3(run: Any, story: Driver, tmp_path: Path) -> None:
    """Such a log was not written by this code; the command says so instead of failing."""
    events = unfoldable(story.observed)
    log = write_log(tmp_path / "alien", events, story.configuration)
    result = run("verify", "--json", log)
    assert result.objects("unfoldable")
    assert result.exit_code in {1, 3}
    assert "cannot be folded" in run("verify", log).out


def test_damage_goes_over_a_broken_rule_and_that_over_a_divergence(run: Any, story: Driver, tmp_path: Path) -> None:
    """One exit code for several findings: the one that makes the others doubtful."""
    events = replaced(story.observed, e.LookupAnswered, 1, num_external_tokens=56, miss_reason="evicted")
    log = write_log(tmp_path / "both", events, story.configuration)
    result = run("verify", "--json", log)
    assert result.objects("violation")
    assert result.objects("divergence")
    assert result.exit_code == 1
    segment = only_segment(log)
    segment.write_bytes(segment.read_bytes()[:-3])
    result = run("verify", "--json", log)
    assert result.objects("violation")
    assert result.exit_code == 2


def test_what_was_not_checked_is_listed(run: Any, log: Path) -> None:
    """In JSON always, for people on request, and its number in any case."""
    not_checked = Core.standard().not_checked
    assert {item["rule"] for item in run("--json", "verify", log).objects("not_checked")} == set(not_checked)
    assert "STEP_WHILE_PENDING: " in run("verify", "--verbose", log).out
    brief = run("verify", log).out
    assert "STEP_WHILE_PENDING: " not in brief
    assert f"{len(not_checked)} rules that a log cannot decide" in brief


def test_another_transition_table_is_pointed_out(run: Any, story: Driver, tmp_path: Path) -> None:
    """Divergences from a log of another version have a cause that is no bug."""
    changes = {"table_fingerprint": "0" * 16, "handler_fingerprint": "new=Mine"}
    log = write_log(tmp_path / "old", story.observed, story.configuration, header=changes)
    result = run("verify", log)
    assert result.exit_code == 0
    assert "another transition table" in result.out
    assert "give its handlers with --handlers" in result.out


def test_a_later_segment_alone_is_verified_as_far_as_it_can_be(run: Any, story: Driver, tmp_path: Path) -> None:
    """Its chain and schema are checked; that rules could not be is reported, not passed over."""
    log = write_log(tmp_path / "long", story.observed, story.configuration, segment_bytes=9_500)
    segments = sorted(log.glob("*.kvlog"))
    assert len(segments) > 1
    assert run("verify", log).exit_code == 0
    assert run("verify", segments[0]).exit_code == 0
    result = run("verify", segments[-1])
    assert result.exit_code == 5
    assert "checked over" not in result.out
    assert "neither rules nor decisions could be checked" in result.out


def test_of_an_empty_log_nothing_can_be_checked(run: Any, story: Driver, tmp_path: Path) -> None:
    """An engine that served nothing."""
    SegmentEventStore.create(tmp_path / "empty", header_of(story.configuration)).close()
    assert run("verify", tmp_path / "empty").exit_code == 5
    assert run("show", tmp_path / "empty").exit_code == 5
    assert run("show", tmp_path / "empty", "--at", 1).exit_code == 5


def test_a_log_that_is_still_written_can_be_verified(run: Any, story: Driver, tmp_path: Path) -> None:
    """Neither side waits for the other."""
    store = SegmentEventStore.create(tmp_path / "live", header_of(story.configuration))
    store.append(encode_events(story.observed[:4]), 4)
    assert run("verify", tmp_path / "live").exit_code == 0
    store.append(encode_events(story.observed[4:5]), 1)
    (verdict,) = run("verify", "--json", tmp_path / "live").objects("verdict")
    assert verdict["num_events"] == 5
    store.close()


def test_violations_recorded_live_are_named(run: Any, tmp_path: Path) -> None:
    """What the connector itself saw go wrong needs no second opinion."""
    driver = Driver()
    driver.report(7)
    driver.observe(e.HookFailed("build_connector_meta", "", "ValueError: no", 1))
    log = write_log(tmp_path / "live", driver.observed, driver.configuration)
    result = run("verify", log)
    assert result.exit_code == 1
    assert "RECORDED at event 2" in result.out
    assert "hook build_connector_meta raised: ValueError: no" in result.out


def test_many_violations_are_cut_for_people_and_whole_for_programs(run: Any, tmp_path: Path) -> None:
    """Each of 30 requests is allocated more than it was answered: 30 findings, each with what the ledger recorded."""
    driver = Driver()
    for number in range(30):
        driver.arrive(f"r{number}", 40, keys_of("a", 2))
        driver.lookup(f"r{number}", 0, 40)
        driver.allocate(f"r{number}", (1, 2, 3), 16)
    log = write_log(tmp_path / "many", driver.observed, driver.configuration)
    result = run("verify", log)
    assert result.out.count("\n  ALLOC_MATCHES_LOOKUP at event") == 20
    assert "\n  … and 10 more\n" in result.out
    violations = run("verify", "--json", log).objects("violation")
    assert len({violation["finding"] for violation in violations}) == 30


def test_what_is_wrong_again_and_again_is_one_line(run: Any, tmp_path: Path) -> None:
    """30 reports of jobs that were never begun: the rule, and what the ledger recorded, with how often and how long."""
    driver = Driver()
    for job_id in range(1, 31):
        driver.report(job_id)
    log = write_log(tmp_path / "repeated", driver.observed, driver.configuration)
    result = run("verify", log)
    first, last = (driver.observed[place].time_ns for place in (0, -2))
    assert "findings    1\n" in result.out
    assert f"at events 1–59, 30 times in {duration(last - first)}\n" in result.out
    assert f"    then RECORDED at events 2–60, 30 times in {duration(last - first)}: " in result.out
    assert len(run("verify", "--json", log).objects("violation")) == 60


def test_the_verdict_names_the_head_of_the_chain(run: Any, log: Path) -> None:
    """Noted elsewhere, it makes a log that was rewritten as a whole detectable."""
    (verdict,) = run("verify", "--json", log).objects("verdict")
    store = reopened(log)
    assert verdict["head_hash"] == store.head_hash.hex()
    store.close()


SHY = """
from kvledger.lifecycle import Core, StateHandler
from kvledger.lifecycle.handlers import Running

class Shy(Running):
    tokens_settled = StateHandler.tokens_settled
"""


def test_a_log_of_other_handlers_is_checked_with_them(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their decisions are made again by themselves; without them the log diverges, and the remedy is named."""
    (tmp_path / "shy_handlers.py").write_text(SHY)
    monkeypatch.syspath_prepend(str(tmp_path))
    core = composed_core(["shy_handlers:Shy"])
    driver = Driver(num_slots=32, save_interval_tokens=32, core=core)
    play_story(driver)
    header = {"handler_fingerprint": core.handler_fingerprint()}
    log = write_log(tmp_path / "log", driver.observed, driver.configuration, header=header)
    without = run("verify", log)
    assert without.exit_code == 3
    assert "give its handlers with --handlers: it was written with" in without.out
    assert "running=shy_handlers:Shy" in without.out
    standard = "read here with kvledger.lifecycle.handlers:Running"
    assert f"running     shy_handlers:Shy, {standard}" in " ".join(run("core", log).out.split("\n"))
    assert run("core", "--json", log).objects("core")[0]["handlers"]["running"] == ["shy_handlers:Shy"]
    assert standard not in run("core", log, "--handlers", "shy_handlers:Shy").out
    assert run("verify", log, "--handlers", "shy_handlers:Shy").exit_code == 0


@pytest.mark.parametrize("name", ["shy", "os:path", "nowhere.at_all:Shy"])
def test_a_handler_that_is_none_is_wrong_usage(run: Any, log: Path, name: str) -> None:
    """It is named, with the remedy."""
    result = run("verify", log, "--handlers", name)
    assert result.exit_code == 64
    assert f"--handlers: '{name}'" in result.err


def test_events_of_a_newer_version_are_refused_or_skipped_and_counted(run: Any, story: Driver, tmp_path: Path) -> None:
    """Refused with a clear word and a remedy; with --lenient the rest is read, and what is missing is named."""
    vocabulary = vocabulary_header(Core.standard())["vocabulary"]
    assert isinstance(vocabulary, list)
    newer = [*vocabulary, {"id": "request.priority_changed", "version": 1, "fields": ["request_id", "priority"]}]
    store = SegmentEventStore.create(
        tmp_path / "log", header_of(story.configuration, {"vocabulary": newer, "kvledger_version": "9.9"})
    )
    unknown = msgspec.msgpack.encode([len(vocabulary), "chat-17-b6", 3])
    for number, event in enumerate(story.observed):
        encoded = encode_events([event])
        if number == 10:
            store.append(b"\x92" + encoded[1:] + unknown, 2)
        else:
            store.append(encoded, 1)
    store.close()
    refused = run("verify", tmp_path / "log")
    assert refused.exit_code == 2
    assert "request.priority_changed version 1, but this kvledger knows no such event" in refused.err
    assert "kvledger 9.9" in refused.err
    assert "--lenient" in refused.err
    lenient = run("verify", "--lenient", tmp_path / "log")
    assert "were skipped: 1 request.priority_changed" in lenient.out
    (verdict,) = run("verify", "--lenient", "--json", tmp_path / "log").objects("verdict")
    assert verdict["num_skipped"] == {"request.priority_changed": 1}
    assert verdict["num_events"] == len(story.observed) + 1
    assert verdict["num_damage"] == 0
    assert run("show", "--lenient", tmp_path / "log", "chat-17").exit_code == 0


def test_the_first_decision_that_comes_out_otherwise_is_named(run: Any, story: Driver, tmp_path: Path) -> None:
    """From that event on the log diverges, and not before."""
    events = replaced(story.observed, e.LookupAnswered, 1, miss_reason="evicted")
    sequence = 1 + [place for place, event in enumerate(events) if isinstance(event, e.LookupAnswered)][1]
    log = write_log(tmp_path / "other", events, story.configuration)
    assert f"a decision differs at event {sequence}" in run("verify", log).out
    (divergence,) = run("verify", "--json", log).objects("divergence")
    assert divergence["sequence"] == sequence
    assert run("verify", log, "--until", sequence - 1).exit_code == 0
