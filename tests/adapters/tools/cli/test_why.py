"""`kvledger why`: the chain of causes of a request, in plain words and as objects, with a table that adds up."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest
from lifecycle_driver import Driver, keys_of, play_seed
from stored_logs import adds_up, header_of, write_log

from kvledger.adapters.tools.logs import index as index_module
from kvledger.adapters.units import duration, milliseconds
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events
from kvledger.storage.events import SegmentEventStore

REQUEST = "chat-17-b6"


def evicted_story() -> Driver:
    """`a` is preempted for `b`; a save of `r812` evicts its chunks; it comes back and computes them again."""
    driver = Driver(num_slots=2, keep_for_preempted=False)
    driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    driver.start("b", keys_of("b", 2), 17, (4, 5))
    driver.preempt("a", 32)
    driver.step(("b", 17, 1, 18), extended=[("b", (1,))])
    driver.settle_all()
    driver.save_prefix("r812", keys_of("x", 4))
    for _ in range(3):
        driver.lookup("a", 0, 33)
    driver.allocate("a", (7, 8, 9))
    driver.step(("a", 0, 20, 33))
    driver.step(("a", 20, 13, 33))
    driver.ledger.commit()
    return driver


@pytest.fixture
def evicted(tmp_path: Path) -> tuple[Path, Driver]:
    """That story as a log."""
    driver = evicted_story()
    return write_log(tmp_path / "evicted", driver.observed, driver.configuration), driver


@pytest.mark.parametrize(
    ("num_tokens", "text"),
    [
        (33, "no other request got a block; this request's 2 blocks were full, so it needed another block. vLLM takes"),
        (32, "the log does not show that another request got a block; inferred: the prefix cache was reset, or"),
    ],
)
def test_a_request_that_lost_its_blocks_to_nobody_needed_one_itself(
    run: Any, tmp_path: Path, num_tokens: int, text: str
) -> None:
    """Incident: for 2 of the demo's 4 preemptions nobody had got a block; the request's own next token needed one."""
    driver = Driver()
    driver.start("a", keys_of("a", 4), num_tokens - 1, (1, 2))
    driver.preempt("a", num_tokens - 1, num_tokens)
    driver.step()
    driver.ledger.commit()
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    (line,) = (line for line in run("why", log, "a").out.splitlines() if "preempted with" in line)
    assert text in line


def test_an_admission_and_a_preemption_tell_how_full_the_kv_cache_was(run: Any, tmp_path: Path) -> None:
    """A block that two requests share counts once. Without the size of the KV cache in the header nothing is told."""
    driver = Driver()
    driver.start("a", keys_of("a", 4), 32, (1, 2))
    driver.start("b", keys_of("a", 4), 32, (1, 3, 4))
    driver.preempt("b", 32, 33)
    driver.step()
    driver.ledger.commit()
    log = write_log(tmp_path / "log", driver.observed, driver.configuration, header={"num_device_blocks": 5})
    shown = run("why", log, "b").out
    assert "; all requests together now hold 4 of 5 blocks" in shown
    assert ", when requests held 4 of 5 blocks" in shown
    causes = run("--json", "why", log, "b").objects("cause")
    held = {each["what"]: each["num_blocks_held"] for each in causes if each["num_blocks_held"]}
    assert held == {"lookup": 2, "admission": 4, "request.preempted": 4}
    unknown = write_log(tmp_path / "unknown", driver.observed, driver.configuration)
    assert "requests h" not in run("why", unknown, "b").out


def test_reasons_that_changed_while_the_answer_did_not_stand_at_the_admission(run: Any, tmp_path: Path) -> None:
    """The other request that had been about to compute the chunks ended before it did."""
    driver = Driver()
    for name in ("b", "a"):
        driver.arrive(name, 33, keys_of("x", 4))
    driver.lookup("a", 0, 33)
    driver.finish("b", 0, 33)
    driver.lookup("a", 0, 33)
    driver.allocate("a", (1, 2, 3))
    driver.step(("a", 0, 33, 33))
    driver.ledger.commit()
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    asked, admitted = run("why", log, "a").out.split("admitted with")
    assert "tokens 0–31 (chunks 0–3): known to request b" in asked
    assert "— 2 times" in asked
    assert "tokens 0–31: no request had computed them before" in admitted


def number_of(driver: Driver, event_class: type[e.Event], index: int = 0) -> int:
    """The number of the `index`-th event of a class."""
    return [number for number, event in enumerate(driver.observed, 1) if isinstance(event, event_class)][index]


def test_a_lookup_names_the_eviction_the_request_it_was_for_and_how_long_before(
    run: Any, evicted: tuple[Path, Driver]
) -> None:
    """What an on-call engineer asks first."""
    log, driver = evicted
    result = run("why", log, "a")
    assert result.exit_code == 0
    evicted_by = number_of(driver, e.ChunksEvicted)
    saved = number_of(driver, e.SaveCompleted)
    line = next(line for line in result.out.splitlines() if "tokens 0–31 (chunks 0–3)" in line)
    assert f"evicted for a save of request r812 at event {evicted_by}, " in line
    assert " µs before; it had been saved by the request itself at event " + str(saved) in line
    assert "nothing is missing" not in result.out
    assert "the next chunk is not in the pool" in result.out
    assert "— 3 times" in result.out


def waiting_story() -> Driver:
    """`a` waits for 20 s and is asked about three times in 4 s; nobody ever asks about `b`."""
    driver = Driver()
    driver.arrive("a", 33, keys_of("x", 4))
    driver.arrive("b", 33)
    driver.pass_ns(20 * 10**9)
    for _ in range(3):
        driver.lookup("a", 0, 33)
        driver.pass_ns(2 * 10**9)
    driver.allocate("a", (1, 2, 3))
    driver.step(("a", 0, 33, 33))
    driver.finish("b", 0, 33)
    driver.ledger.commit()
    return driver


def test_show_and_why_tell_the_same_of_equal_lookups(run: Any, tmp_path: Path) -> None:
    """The first one's time, the events of all, how long they went on, and how long the request had waited."""
    driver = waiting_story()
    log = write_log(tmp_path / "log", [event for _, event in driver.sink.events()], driver.configuration)
    told = []
    for command in ("show", "why"):
        (line,) = [line for line in run(command, log, "a").out.splitlines() if "looked up" in line]
        assert line.endswith(
            "the next chunk is not in the pool — 3 times in 4.00 s; first looked up 20.00 s after the request arrived"
        )
        told.append([line.split()[0], line.split()[1], line.split()[2]])
    assert told[0] == told[1]
    (group,) = [each for each in run("show", log, "a", "--json").objects("group") if each["what"] == "lookup"]
    (cause,) = [each for each in run("why", log, "a", "--json").objects("cause") if each["what"] == "lookup"]
    for name in ("last_sequence", "time_ns", "until_ns", "waited_ns", "time_unix_ns", "until_unix_ns"):
        assert group[name] == cause[name]
    assert group["first_sequence"] == cause["sequence"]


def test_how_full_the_kv_cache_was_is_told_of_a_request_that_waited(run: Any, tmp_path: Path) -> None:
    """At its first lookup, also if the lookups differ; programs get it for each."""
    driver = Driver()
    driver.start("b", keys_of("b", 2), 33, (1, 2, 3))
    driver.arrive("a", 33, keys_of("x", 4))
    for num_computed in (8, 8, 16, 24, 16):
        driver.lookup("a", num_computed, 33)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration, header={"num_device_blocks": 3})
    (line,) = [line for line in run("why", log, "a").out.splitlines() if "looked up" in line]
    assert " — 5 times in " in line
    assert "; at first, requests held 3 of 3 blocks; reasons of the lookups from event " in line
    causes = run("why", log, "a", "--json").objects("cause")
    assert [cause["num_blocks_held"] for cause in causes if cause["what"] == "lookup"] == [3] * 4


def test_what_vllm_has_itself_is_no_hit(run: Any, tmp_path: Path) -> None:
    """Of 33 tokens 16 are saved, and vLLM has those in its own prefix cache. A second chunk would be a hit."""
    driver = Driver()
    driver.save_prefix("b", keys_of("x", 2))
    driver.arrive("a", 33, keys_of("x", 4))
    driver.lookup("a", 16, 33)
    driver.lookup("a", 0, 33)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    own, loaded = [line for line in run("why", log, "a").out.splitlines() if "looked up" in line]
    assert "16 of them computed already: 16 are saved, but vLLM has these itself, so 0 offered; the next chunk" in own
    assert "looked up 33 tokens: 16 are saved, 16 offered; the next chunk is not in the pool" in loaded


def test_of_a_request_that_only_waited_that_is_said(run: Any, tmp_path: Path) -> None:
    """A table of zeros says nothing."""
    driver = waiting_story()
    out = run("why", write_log(tmp_path / "log", driver.observed, driver.configuration), "b").out
    assert "\nnever scheduled: vLLM did not look it up and gave it no blocks\n\npossible changes\n  queued: " in out
    assert "left to compute" not in out


def test_a_preemption_names_who_got_blocks_and_says_what_is_inferred(run: Any, evicted: tuple[Path, Driver]) -> None:
    """The log does not record free blocks, so the connection is not a fact."""
    log, driver = evicted
    step = number_of(driver, e.StepScheduled, 2)
    line = next(line for line in run("why", log, "a").out.splitlines() if "preempted with 32 settled tokens" in line)
    assert f"In step 2 (event {step}) 1 request ran 1 token, and blocks went to b (1)" in line
    assert "inferred: vLLM took this request's blocks for that request" in line


def test_the_table_adds_up_and_says_so(run: Any, evicted: tuple[Path, Driver]) -> None:
    """Of each admission every token is accounted for."""
    log, _ = evicted
    out = run("why", log, "a").out
    assert "computed 32 tokens again in 2 steps: 32 tokens evicted" in out
    rows = {line.split()[0]: line.split()[1:3] for line in out.splitlines() if line.split()[1:3] and line[0] != " "}
    assert rows["evicted"] == ["32", "32"]
    assert rows["last_token"] == ["2", "0"]
    assert rows["all"] == ["66", "32"]
    assert "66 tokens at 2 admissions = 0 from vLLM's prefix cache + 0 loaded + 66 left to compute" in out


def test_objects_of_reasons_add_up_to_the_totals(run: Any, tmp_path: Path) -> None:
    """For every request of a random walk: by reason, and to what the projections count."""
    driver = play_seed(4, 70, chunk_size=8, block_size=16)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    num_recomputed = 0
    for request_id in sorted({event.request_id for event in driver.all_of(e.RequestArrived)}):
        result = run("why", "--json", log, request_id)
        totals: Counter[tuple[str, str]] = Counter()
        for total in result.objects("total"):
            assert adds_up(total)
            assert total["num_left_out"] == 0
            num_recomputed += total["num_tokens_recomputed"]
            totals.update({("recomputed", reason): count for reason, count in total["recomputed"].items()})
            totals.update({("computed_twice", reason): count for reason, count in total["computed_twice"].items()})
            failed = Counter({"load_failed": total["to_load"].get("failed", 0)})
            missed = Counter(total["missed"]) - failed
            totals.update({("admission", reason): count for reason, count in missed.items()})
        counted: Counter[tuple[str, str]] = Counter()
        for reason in result.objects("reason"):
            assert reason["evidence"]
            if reason["of"] != "lookup":
                counted[reason["of"], reason["reason"]] += reason["num_tokens"]
        assert counted == totals, request_id
    assert num_recomputed == driver.totals.figures.num_tokens_recomputed > 0


def test_a_request_with_several_incarnations_is_explained_one_by_one(run: Any, tmp_path: Path) -> None:
    """An id may be used again; each life has a table of its own."""
    driver = Driver()
    for num_tokens in (20, 30):
        driver.start("a", keys_of(str(num_tokens), 2), num_tokens, (1, 2))
        driver.finish("a", 0, num_tokens)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    out = run("why", log, "a").out
    assert out.index("life 1 of 2") < out.index("20 tokens at 1 admission") < out.index("life 2 of 2")
    assert out.index("life 2 of 2") < out.index("30 tokens at 1 admission")
    assert [total["ordinal"] for total in run("why", "--json", log, "a").objects("total")] == [0, 1]


def test_one_event_can_be_asked_for(run: Any, evicted: tuple[Path, Driver]) -> None:
    """What happened before it is left out."""
    log, driver = evicted
    at = number_of(driver, e.RequestPreempted)
    causes = run("why", "--json", log, "a", "--since", at, "--until", at).objects("cause")
    assert [cause["what"] for cause in causes] == ["request.preempted"]


def test_without_a_log_the_request_is_not_what_is_missing(run: Any) -> None:
    """A word that is no path may be either of the two."""
    result = run("why", "--newest", "crowd-8")
    assert result.exit_code == 64
    remedy = "if you mean a REQUEST, give the LOG before the REQUEST, or set KVLEDGER_LOG"
    assert f"crowd-8 does not exist; {remedy}" in result.err


def test_a_request_must_be_named_and_known(run: Any, evicted: tuple[Path, Driver]) -> None:
    """The next try succeeds."""
    log, _ = evicted
    assert run("why", log).exit_code == 64
    unknown = run("why", log, "nobody")
    assert unknown.exit_code == 64
    assert "the last requests: r812, b, a" in unknown.err


def test_a_window_limits_what_is_shown_not_what_is_known(run: Any, evicted: tuple[Path, Driver]) -> None:
    """The eviction lies before the window; it is still the reason."""
    log, driver = evicted
    since = number_of(driver, e.LookupRequested, 2)
    out = run("why", log, "a", "--since", since).out
    assert "arrived with" not in out
    assert "evicted for a save of request r812" in out
    until = number_of(driver, e.RequestPreempted)
    assert "computed 32 tokens again" not in run("why", log, "a", "--until", until).out


def test_a_quarantine_names_the_broken_rule_and_its_event(run: Any, tmp_path: Path) -> None:
    """From there on nothing helps the request, and every later miss points at it."""
    driver = Driver()
    driver.arrive("a", 33, keys_of("a", 4))
    driver.allocate("a", (1, 2, 3), 16)
    driver.step(("a", 0, 33, 33))
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    allocated = number_of(driver, e.BlocksAllocated)
    out = run("why", log, "a").out
    assert "ALLOC_MATCHES_LOOKUP BROKEN: tokens were claimed that no lookup had offered" in out
    assert f" (event {allocated}); the cache is disabled for this request\n" in out


def test_what_stands_behind_lost_events_is_explained_as_far_as_it_is_known(
    run: Any, evicted: tuple[Path, Driver], tmp_path: Path
) -> None:
    """The eviction is lost, so nobody knows whether the chunks were ever saved."""
    _, driver = evicted
    store = SegmentEventStore.create(tmp_path / "gap", header_of(driver.configuration))
    first = number_of(driver, e.ChunksEvicted) - 1
    last = first + 1
    store.append(encode_events(driver.observed[:first]), first)
    store.append_gap(last - first, "the disk was full")
    rest = driver.observed[last:]
    store.append(encode_events(rest), len(rest))
    store.close()
    result = run("why", tmp_path / "gap", "a")
    assert result.exit_code == 0
    assert "lost_events" in result.err
    assert "tokens 0–31 (chunks 0–3): not known" in result.out
    assert adds_up(run("why", "--json", tmp_path / "gap", "a").objects("total")[0])


def test_many_lookups_that_differ_in_numbers_are_one_line(run: Any, tmp_path: Path) -> None:
    """Of seven answers something was missing, of the eighth nothing; programs get each."""
    driver = Driver()
    driver.arrive("a", 65, keys_of("a", 8))
    for num_saved in range(1, 9):
        driver.save_prefix(f"b{num_saved}", keys_of("a", num_saved))
        driver.lookup("a", 0, 65)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    out = run("why", log, "a").out
    several, last = (line for line in out.splitlines() if "looked up" in line)
    asked = [event for event in driver.observed if isinstance(event, e.LookupRequested) and event.request_id == "a"]
    took = duration(asked[6].time_ns - asked[0].time_ns)
    assert "looked up 65 tokens: 8 → 56 are saved, 8 → 56 offered; the next chunk is not in" in several
    at = f"from event {driver.observed.index(asked[6]) + 1} ({milliseconds(asked[6].time_ns)} ms) on:"
    assert several.endswith(f" — 7 times in {took}; reasons of the lookups {at}"), "their reasons follow"
    assert "64 are saved, 64 offered; nothing is missing" in last
    assert len([cause for cause in run("why", "--json", log, "a").objects("cause") if cause["what"] == "lookup"]) == 8


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_an_index_gives_the_same_explanation(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With an index nothing is read but the events that the story names."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    driver = play_seed(seed, 60, chunk_size=8, block_size=16)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration, segment_bytes=16_000)
    preempted = sorted({event.request_id for event in driver.all_of(e.RequestPreempted)})
    arrived = sorted({event.request_id for event in driver.all_of(e.RequestArrived)})
    asked = [(*json, log, request_id) for request_id in [*preempted[:5], *arrived[:5]] for json in ((), ("--json",))]
    read = [attrs.astuple(run("why", *arguments)) for arguments in asked]
    monkeypatch.setattr(index_module, "INDEX_FROM_BYTES", 0)
    indexed = [attrs.astuple(run("why", *arguments)) for arguments in asked]
    assert list((tmp_path / "cache").rglob("*.sqlite"))
    assert indexed == read
