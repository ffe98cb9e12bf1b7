"""`kvledger show`: a log, a request's life, a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from lifecycle_driver import Driver, keys_of
from stored_logs import header_of, replaced, unfoldable, write_log

from kvledger.adapters.tools.exit_codes import CommandFailed
from kvledger.adapters.tools.logs import index as index_module
from kvledger.adapters.tools.logs.describe import plain
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.snapshots import write_snapshots
from kvledger.lifecycle import Core, fold
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events
from kvledger.storage.events import SegmentEventStore

REQUEST = "chat-17-b6"


def test_a_log_is_summarised_with_one_line_per_request(run: Any, log: Path) -> None:
    """Versions, sizes, figures, requests."""
    result = run("show", log)
    assert result.exit_code == 0
    assert "kvledger 0.1.0, vLLM 0.32.0" in result.out
    assert "2025-06-15 15:06:40 UTC" in result.out
    assert "block 16 tokens, chunk 8 tokens, 32 slots, 1 rank" in result.out
    assert "1 time; tokens recovered 64, retained 0, recomputed 0" in result.out
    line = next(line for line in result.out.splitlines() if line.startswith(REQUEST))
    assert line.split()[1:3] == ["STOPPED", "15:06:40.000"]
    assert line.split()[6:] == ["45", "66", "1", "4", "64", "8", "0"]
    assert any(line.startswith("chat-9  ") and " new " in line for line in result.out.splitlines())


def test_the_summary_has_the_same_figures_in_json(run: Any, log: Path, story: Driver) -> None:
    """Programs get what the projections count."""
    result = run("show", "--json", log)
    (summary,) = result.objects("log")
    assert summary["figures"] == attrs.asdict(story.totals.figures)
    assert summary["outcomes"] == {"FINISHED_STOPPED": 1, "new": 1}
    first, second = result.objects("request")
    assert (first["request_id"], first["num_tokens_loaded"]) == (REQUEST, 64)
    assert second["outcome"] == "new"


def test_a_request_is_shown_as_groups_in_plain_words(run: Any, log: Path) -> None:
    """Steps and polls are gathered; what moved the request stands on lines of its own."""
    result = run("show", log, REQUEST)
    assert result.exit_code == 0
    texts = [line.split("  ")[-1] for line in result.out.splitlines()]
    assert any("arrived with 45 prompt tokens" in line for line in texts)
    assert any("computed 45 tokens (0 → 45)" in line for line in texts)
    assert any("decoded 19 tokens in 19 steps (45 → 64); 1 more block; saving 5 chunks" in line for line in texts)
    assert any("preempted with 64 settled tokens, lost 4 blocks; save 2 starts: chunks 5–7" in line for line in texts)
    polls = [line for line in texts if "looked up 65 tokens" in line]
    assert len(polls) == 1
    assert polls[0].endswith("— 3 times in 2.0 µs")
    assert any("load 3 starts: tokens 0–63 into 4 blocks (7–10)" in line for line in texts)
    assert any("load 3 has arrived; 100 B in" in line for line in texts)
    assert "preempted → recovering" in result.out
    assert "running → released" in result.out


def test_the_groups_in_json_cover_the_request_without_overlap(run: Any, log: Path) -> None:
    """A program can go from a group to its events."""
    groups = run("show", "--json", log, REQUEST).objects("group")
    assert [group["what"] for group in groups[:4]] == ["arrived", "lookup", "blocks.allocated", "prefill"]
    ends = [0, *(group["last_sequence"] for group in groups)]
    assert all(end < group["first_sequence"] for end, group in zip(ends, groups, strict=False))
    decode = next(group for group in groups if group["what"] == "decode")
    assert (decode["first_token"], decode["num_tokens"], decode["num_blocks"], decode["num_bytes"]) == (45, 19, 1, 100)


def test_only_what_a_load_brought_in_place_counts_as_loaded(run: Any, tmp_path: Path) -> None:
    """A load that failed is a failure; one that is under way is neither."""
    driver = Driver(async_load_tokens=0)
    driver.save_prefix("a", keys_of("x", 4))
    for first_block, name in enumerate(("good", "bad", "open")):
        driver.admit(name, keys_of("x", 4), 33, range(3 * first_block, 3 * first_block + 3), num_external=32)
    jobs = {job.request_id: job.job_id for job in driver.all_of(e.LoadIssued)}
    driver.report(jobs["good"])
    driver.report(jobs["bad"], ok=False)
    driver.ledger.commit()
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    shown = {fields["request_id"]: fields for fields in run("show", "--json", log).objects("request")}
    assert {name: shown[name]["num_tokens_loaded"] for name in jobs} == {"good": 32, "bad": 0, "open": 0}
    assert {name: shown[name]["num_failures"] for name in jobs} == {"good": 0, "bad": 1, "open": 0}


def test_a_save_that_failed_is_never_told_as_saved(run: Any, tmp_path: Path) -> None:
    """It was begun, it failed; who asks for its chunks is told that they are not there, and `why` has the failure."""
    driver = Driver()
    driver.start("a", keys_of("x", 4), 33, (1, 2, 3))
    driver.step(settled=[("a", 0, 32)])
    (save,) = driver.all_of(e.SaveIssued)
    driver.report(save.job_id, ok=False)
    driver.arrive("b", 33, keys_of("x", 4))
    assert driver.lookup("b", 0, 33).miss_reason == "missing"
    driver.ledger.commit()
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    of_saver, of_asker = run("show", log, "a").out, run("show", log, "b").out
    assert "saving 4 chunks" in of_saver
    assert f"save {save.job_id} failed: it broke" in of_saver
    assert "0 are saved, 0 offered; the next chunk is not in the pool" in of_asker
    assert "saved 4 chunks" not in of_saver
    assert f"save {save.job_id} by request a failed at event" in run("why", log, "b").out


def test_a_part_filled_last_chunk_is_shown_when_it_is_saved_and_when_it_is_loaded(run: Any, tmp_path: Path) -> None:
    """A reader sees where the tokens after the last whole chunk went, and that they came back."""
    driver = Driver()
    driver.start("a", keys_of("a", 3), 29, (1, 2))
    driver.preempt("a", 28)
    driver.step()
    driver.settle_all()
    driver.lookup("a", 0, 29)
    driver.allocate("a", (5, 6), 28)
    driver.step(("a", 28, 1, 29))
    driver.settle_all()
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    out = run("show", log, "a").out
    assert (
        "copies out 4 tokens of the request's part-filled last chunk from 1 block (2), before these are overwritten"
        in out
    )
    assert "tokens 0–27 into 2 blocks (5–6)" in out
    assert "computed 1 token (28 → 29)" in out
    assert run("verify", log).exit_code == 0


def test_the_most_preempted_request_is_last_in_the_list(run: Any, log: Path) -> None:
    """Found in a trial: nothing led from "26 preemptions" to the requests that were preempted."""
    listed = run("show", log, "--sort", "preempted", "--json").objects("request")
    assert [(request["request_id"], request["num_preemptions"]) for request in listed] == [("chat-9", 0), (REQUEST, 1)]


def test_a_unique_beginning_of_an_id_is_enough(run: Any, log: Path) -> None:
    """VLLM adds random endings to ids."""
    assert run("show", log, "chat-1").out == run("show", log, REQUEST).out


def test_an_ambiguous_or_unknown_id_gives_64_and_lists_candidates(run: Any, log: Path) -> None:
    """The next try succeeds."""
    ambiguous = run("show", log, "chat")
    assert ambiguous.exit_code == 64
    assert "'chat' is in the ids of several requests, the shortest first: chat-9, chat-17-b6" in ambiguous.err
    unknown = run("show", log, "video")
    assert unknown.exit_code == 64
    assert "no request has 'video' in its id; the last requests: chat-9, chat-17-b6; `kvledger show LOG" in unknown.err
    assert "no request has 'chat-8' in its id; did you mean: chat-9, chat-17-b6" in run("show", log, "chat-8").err


@pytest.mark.parametrize("has_index", [False, True])
def test_the_id_that_a_client_gave_is_enough(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_index: bool
) -> None:
    """VLLM's front ends write `cmpl-` before it, and a number and a random ending behind it."""
    if has_index:
        monkeypatch.setattr(index_module, "INDEX_FROM_BYTES", 0)
    driver = Driver()
    names = [f"cmpl-user-{number}-0-{8 * number:08x}" for number in range(1, 40)]
    for name in names:
        driver.arrive(name, 5)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    assert run("show", log, "user-39").out == run("show", log, names[-1]).out
    assert run("show", log, "user-3").out == run("show", log, names[2]).out, "the others have more behind it"
    assert f"did you mean: {names[38]}, " in run("show", log, "user-399").err
    several = run("show", log, "ser-3")
    assert several.exit_code == 64
    assert several.err.partition("the shortest first: ")[2].startswith(f"{names[2]}, {names[29]}, ")
    assert f"the last requests: {names[-1]}, " in run("show", log, "zzz").err


def test_a_whole_id_wins_over_longer_ones(run: Any, tmp_path: Path) -> None:
    """`a` is a request of its own, though `ab` begins with it."""
    driver = Driver()
    driver.arrive("ab", 5)
    driver.arrive("a", 6)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    assert "arrived with 6 prompt tokens" in run("show", log, "a").out


def test_an_id_that_is_used_again_is_shown_with_all_its_lives(run: Any, tmp_path: Path) -> None:
    """A client may repeat its ids."""
    driver = Driver()
    for _ in range(2):
        driver.arrive("a", 5)
        driver.finish("a", 0, 5)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    assert "life 2 of this id" in run("show", log, "a").out


def test_a_life_begins_without_what_the_one_before_it_left_open(run: Any, tmp_path: Path) -> None:
    """The id arrives again before the last save is reported: neither that save nor its state is the new life's."""
    driver = Driver()
    driver.start("a", keys_of("a", 2), 17, (1, 2))
    driver.finish("a", 17, 18)
    driver.arrive("a", 5)
    driver.settle_all()
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    first, second = run("show", "--json", log).objects("request")
    assert (first["outcome"], second["outcome"]) == ("FINISHED_STOPPED", "new")
    assert (second["num_chunks_saved"], second["last_sequence"]) == (0, second["first_sequence"])
    for shown in (run("show", log, "a").out, run("show", "--follow", "--since", 1, log).out):
        (line,) = (line for line in shown.splitlines() if "arrived with 5 prompt tokens" in line)
        assert " new " in line
        assert "finished" not in line


def test_broken_rules_and_failures_stand_out_in_a_timeline(run: Any, tmp_path: Path) -> None:
    """The engineer who reads it looks for these."""
    driver = Driver()
    driver.arrive("a", 17)
    driver.observe(e.HookFailed("update_state_after_alloc", "a", "KeyError: 3", 9))
    driver.allocate("a", (1, 2), 16)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    out = run("show", log, "a").out
    assert "hook update_state_after_alloc FAILED: KeyError: 3" in out
    assert "ALLOC_MATCHES_LOOKUP BROKEN: tokens were claimed that no lookup had offered" in out
    assert "cache disabled for this request" in out
    groups = run("show", "--json", log, "a").objects("group")
    assert [group["num_broken"] for group in groups] == [0, 0, 1]


def test_lost_events_are_a_group_of_their_own(run: Any, story: Driver, tmp_path: Path) -> None:
    """A timeline with a hole must not look like one without."""
    store = SegmentEventStore.create(tmp_path / "gap", header_of(story.configuration))
    store.append(encode_events(story.observed[:4]), 4)
    store.append_gap(3, "no space")
    store.append(encode_events(story.observed[7:9]), 2)
    store.close()
    result = run("show", tmp_path / "gap", REQUEST)
    assert result.exit_code == 0
    assert "events 5–7 are missing" in result.out
    assert "lost_events" in result.err
    followed = run("show", "--follow", "--since", 1, tmp_path / "gap")
    assert (followed.exit_code, followed.err.count("events 5–7 are missing")) == (0, 1)


@pytest.mark.usefixtures("failing_fold")
def test_a_log_that_cannot_be_folded_is_shown_whole(run: Any, story: Driver, tmp_path: Path) -> None:
    """The reader reads on where the connector's own fold fails; the totals are counted by reading, too."""
    events = unfoldable(story.observed)
    log = write_log(tmp_path / "alien", events, story.configuration)
    result = run("show", log)
    assert result.exit_code == 0
    assert REQUEST in result.out
    assert not result.err
    shown = run("show", log, REQUEST)
    assert "released" in shown.out
    assert not shown.err


@pytest.mark.usefixtures("failing_fold")
def test_a_log_that_cannot_be_folded_is_followed_to_its_end(run: Any, story: Driver, tmp_path: Path) -> None:
    """A log with one job id for two lives ended the command with 70, as a mistake in kvledger."""
    log = write_log(tmp_path / "alien", unfoldable(story.observed), story.configuration)
    result = run("show", log, "--follow", "--since", 1)
    assert (result.exit_code, result.err) == (0, "")
    assert REQUEST in result.out
    assert result.out.splitlines()[-1].endswith("closed; 1 request was open")


@pytest.mark.usefixtures("failing_fold")
def test_no_snapshot_is_made_behind_an_event_that_cannot_be_folded(story: Driver, tmp_path: Path) -> None:
    """Those before the event are written."""
    events = unfoldable(story.observed)
    log = write_log(tmp_path / "alien", events, story.configuration, segment_bytes=300)
    with pytest.raises(CommandFailed, match="cannot be folded") as failed:
        write_snapshots(open_log(log))
    assert failed.value.exit_code == 3
    assert list(log.glob("*.snapshot"))


def test_the_state_of_one_request_or_of_all_at_a_moment(run: Any, log: Path) -> None:
    """A request that came later is not in it."""
    assert " running " in run("show", log, REQUEST, "--at", 20).out
    (state,) = run("show", "--json", log, REQUEST, "--at", 4).objects("request_state")
    assert (state["state"], state["block_ids"], state["sequence"]) == ("new", [], 4)
    assert "chat-9" not in run("show", log, "--at", 20).out
    assert "not known at that moment" in run("show", log, "chat-9", "--at", 20).out


def decoding() -> Driver:
    """A request that decodes: nine steps do not name it."""
    driver = Driver()
    driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    driver.step(("a", 33, 1, 34))
    for _ in range(9):
        driver.step()
    return driver


def test_the_state_of_a_preempted_request_has_all_of_its_tokens(run: Any, tmp_path: Path) -> None:
    """A trial on a real server: 512 tokens at one event, 349 from the preemption on, 513 at the next step."""
    driver = decoding()
    driver.preempt("a", 42, 44)
    log, preempted = write_log(tmp_path / "log", driver.observed, driver.configuration), len(driver.observed)
    (index,) = [place for place, event in enumerate(driver.observed, 1) if isinstance(event, e.RequestPreempted)]
    for sequence in range(index, preempted + 1):
        (state,) = run("show", "--json", log, "a", "--at", sequence).objects("request_state")
        assert state["num_tokens"] == 44, sequence
    (shown,) = run("show", "--json", log).objects("request")
    assert shown["num_tokens"] == 44


def test_the_state_of_a_request_that_was_rolled_back_has_all_of_its_tokens(run: Any, tmp_path: Path) -> None:
    """A request that decodes is not named by the steps: the last number in an event is that of its first tokens."""
    driver = decoding()
    driver.roll_back("a", 16)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    (state,) = run("show", "--json", log, "a", "--at", len(driver.observed)).objects("request_state")
    assert (state["num_tokens"], state["num_computed_tokens"]) == (43, 16)


def test_the_state_at_the_end_is_the_fold_of_the_log(run: Any, log: Path, story: Driver) -> None:
    """The same state as the live ledger had."""
    result = run("show", "--json", log, "--at", len(story.observed))
    assert result.exit_code == 0
    (state,) = result.objects("state")
    assert state["projections"] == plain(story.projections.states())


def test_the_state_at_a_moment_is_the_fold_of_what_came_before(run: Any, log: Path, story: Driver) -> None:
    """The state after event 20 is the fold of the first 20 events."""
    (state,) = run("show", "--json", log, "--at", 20).objects("state")
    expected = fold(Core.standard(), story.sink.events(), story.configuration, at=20)
    assert state["sequence"] == 20
    assert state["projections"] == plain(expected.states())
    assert "state after event 20" in run("show", log, "--at", 20).out
    assert "not to 100000" in run("show", log, "--at", 100_000).err


def test_of_a_damaged_log_the_state_before_the_damage_is_shown(run: Any, log: Path) -> None:
    """It is still evidence, though not the state that was asked for: exit code 2. Incident: it was 0."""
    (segment,) = log.glob("*.kvlog")
    segment.write_bytes(segment.read_bytes()[:-3])
    result = run("show", log, "--at", 100_000)
    assert result.exit_code == 2
    assert "state after event" in result.out
    assert "torn_tail" in result.err


def test_only_requests_with_which_something_went_wrong_are_listed_on_demand(run: Any, tmp_path: Path) -> None:
    """A failed save, an error at the end, a quarantine; what a client aborted is no failure."""
    driver = Driver(num_slots=32)
    for name in ("stopped", "error", "aborted", "unsaved", "quarantined"):
        driver.start(name, keys_of(name, 2), 20, (1, 2, 3))
        driver.step((name, 20, 1, 21), settled=[(name, 0, 20)])
        if name == "unsaved":
            driver.report(driver.all_of(e.SaveIssued)[-1].job_id, ok=False)
        driver.settle_all()
        if name != "quarantined":
            driver.finish(name, 20, 21)
            driver.settle_all()
    driver.ledger.commit()
    life = next(event for event in driver.observed if getattr(event, "request_id", "") == "quarantined")
    events = [*driver.observed, e.RequestQuarantined("quarantined", life.ordinal, 0, "R", 1)]
    for number, status in ((1, "FINISHED_ERROR"), (2, "FINISHED_ABORTED")):
        events = replaced(events, e.RequestFinished, number, status=status)
    log = write_log(tmp_path / "log", events, driver.configuration)
    shown = run("show", "--failed", log)
    assert "3 of 5 requests failed" in shown.out
    assert [line.split()[0] for line in shown.out.splitlines()[-3:]] == ["error", "unsaved", "quarantined"]
    failed = run("show", "--failed", "--json", log).objects("request")
    assert [(each["request_id"], each["is_quarantined"]) for each in failed] == [
        ("error", False),
        ("unsaved", False),
        ("quarantined", True),
    ]
    assert "the last 1 of 3; --limit 0 lists all" in run("show", "--failed", "--limit", 1, log).out
