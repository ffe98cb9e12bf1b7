"""`kvledger stats`: figures of one log and of many, percentiles in bounded memory, reasons that add up."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lifecycle_driver import Driver, keys_of, play_seed
from stored_logs import adds_up, header_of, write_log

from kvledger.adapters.tools.cli.percentiles import Percentiles
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events
from kvledger.storage.events import SegmentEventStore

REQUEST = "chat-17-b6"


@pytest.fixture
def walked(tmp_path: Path) -> tuple[Path, Driver]:
    """The log of a random walk."""
    driver = play_seed(5, 70, chunk_size=8, block_size=16)
    return write_log(tmp_path / "walk", driver.observed, driver.configuration), driver


def one(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The only one."""
    (found,) = objects
    return found


# --- one log ------------------------------------------------------------------------------------


def test_the_figures_of_a_log_are_printed_in_words(run: Any, log: Path) -> None:
    """What an operator looks at first."""
    result = run("stats", log)
    assert result.exit_code == 0
    lines = result.out.splitlines()
    assert any(line.startswith("preempted   1 time; tokens recovered 64, retained 0, recomputed 0") for line in lines)
    assert any(line.startswith("saved       8 chunks, ") for line in lines)
    assert any(line.startswith("loaded      64 tokens, 100 B") for line in lines)
    assert any(line.startswith("preempted → running again") for line in lines)
    assert "vLLM's prefix cache + 64 loaded" in result.out


def test_the_objects_say_what_the_projections_count(run: Any, walked: tuple[Path, Driver]) -> None:
    """Figures, reasons and events of the whole log."""
    log, driver = walked
    result = run("stats", "--json", log)
    statistics = one(result.objects("statistics"))
    assert statistics["figures"] == attrs.asdict(driver.totals.figures)
    assert statistics["num_events"] == len(driver.observed)
    assert statistics["num_steps"] == len(driver.all_of(e.StepScheduled))
    assert statistics["num_deferrals"] == len(driver.all_of(e.LookupDeferred))
    total = one(result.objects("total"))
    assert adds_up(total)
    assert sum(total["recomputed"].values()) == driver.totals.figures.num_tokens_recomputed > 0
    counted = {row["event"]: row["num_events"] for row in result.objects("events")}
    assert counted == Counter(event.id for event in driver.observed)


def test_bytes_by_event_are_what_the_encoder_writes(run: Any, walked: tuple[Path, Driver]) -> None:
    """So that a log that grows too fast can be understood."""
    log, driver = walked
    num_bytes = {row["event"]: row["num_bytes"] for row in run("stats", "--json", log).objects("events")}
    steps = driver.all_of(e.StepScheduled)
    assert num_bytes["step.scheduled"] == sum(len(encode_events([step])) - 1 for step in steps)
    assert sum(num_bytes.values()) < one(run("stats", "--json", log).objects("statistics"))["num_bytes"]


def test_times_of_copies_and_recoveries_have_percentiles(run: Any, tmp_path: Path) -> None:
    """A recovery ends with the first step that schedules the request, as in the metrics."""
    driver = Driver()
    driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    driver.preempt("a", 32)
    (preempted,) = driver.all_of(e.RequestPreempted)
    driver.settle_all()
    driver.lookup("a", 0, 40)
    driver.allocate("a", (4, 5, 6), 32)
    driver.step(("a", 32, 4, 40))
    driver.settle_all()
    driver.step(("a", 36, 4, 40))
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    rows = {row["of"]: row for row in run("stats", "--json", log).objects("percentiles")}
    took = driver.all_of(e.StepScheduled)[-2].time_ns - preempted.time_ns
    assert (rows["recovery_time_ns"]["count"], rows["recovery_time_ns"]["max"]) == (1, took)
    assert (rows["load_time_ns"]["count"], rows["load_time_ns"]["max"]) == (1, 10)
    assert rows["save_time_ns"]["count"] == len(driver.all_of(e.TransferReported)) - 1
    assert rows["events_per_step"]["count"] == 3


def test_the_requests_that_computed_most_again_are_named(run: Any, walked: tuple[Path, Driver]) -> None:
    """Where to go on with `why`."""
    log, _ = walked
    top = run("stats", "--json", log).objects("top_request")
    counts = [row["num_tokens_recomputed"] for row in top]
    assert counts == sorted(counts, reverse=True)
    assert 0 < len(counts) <= 10
    why = run("why", "--json", log, top[0]["request_id"]).objects("total")
    assert counts[0] in [total["num_tokens_recomputed"] for total in why]


# --- parts of logs, and many --------------------------------------------------------------------


def test_two_windows_of_a_log_add_up_to_it(run: Any, walked: tuple[Path, Driver]) -> None:
    """What lies before the window is known and not counted."""
    log, driver = walked
    middle = len(driver.observed) // 2
    whole = one(run("stats", "--json", log).objects("total"))
    first = one(run("stats", "--json", log, "--until", middle).objects("total"))
    second = one(run("stats", "--json", log, "--since", middle + 1).objects("total"))
    for name in ("num_tokens_needed", "num_tokens_recomputed", "num_tokens_loaded", "num_tokens_offered"):
        assert first[name] + second[name] == whole[name]
    assert Counter(first["recomputed"]) + Counter(second["recomputed"]) == Counter(whole["recomputed"])
    assert first["num_tokens_recomputed"] > 0
    assert second["num_tokens_recomputed"] > 0


def test_one_request_can_be_summed_up_alone(run: Any, walked: tuple[Path, Driver]) -> None:
    """Its reasons are those that `why` tells."""
    log, driver = walked
    request_id = driver.all_of(e.RequestPreempted)[0].request_id
    result = run("stats", "--json", log, "--request", request_id)
    incarnations = run("why", "--json", log, request_id).objects("total")
    total = one(result.objects("total"))
    assert total["num_tokens_needed"] == sum(each["num_tokens_needed"] for each in incarnations)
    assert total["num_tokens_recomputed"] == sum(each["num_tokens_recomputed"] for each in incarnations)
    events = {row["event"]: row["num_events"] for row in result.objects("events")}
    arrivals = [event for event in driver.all_of(e.RequestArrived) if event.request_id == request_id]
    assert events["request.arrived"] == len(arrivals)
    assert "step.scheduled" not in events


def test_several_logs_are_summed_up_one_by_one_and_together(run: Any, tmp_path: Path) -> None:
    """Each engine start writes a log of its own."""
    for seed in (1, 2):
        driver = play_seed(seed, 50, chunk_size=8, block_size=16)
        header = {"opened_at_unix_ns": seed}
        write_log(tmp_path / "logs" / str(seed), driver.observed, driver.configuration, header=header)
    result = run("stats", "--json", tmp_path / "logs")
    first, second, both = result.objects("statistics")
    assert [Path(first["path"]).name, Path(second["path"]).name, both["path"]] == ["1", "2", None]
    assert both["num_logs"] == 2
    for name in ("num_events", "num_bytes", "num_steps", "duration_ns"):
        assert first[name] + second[name] == both[name]
    for name, count in first["figures"].items():
        assert count + second["figures"][name] == both["figures"][name]
    totals = result.objects("total")
    assert totals[0]["num_tokens_recomputed"] + totals[1]["num_tokens_recomputed"] == totals[2]["num_tokens_recomputed"]
    assert adds_up(totals[2])
    loads = [row["count"] for row in result.objects("percentiles") if row["of"] == "save_time_ns"]
    assert loads[0] + loads[1] == loads[2]
    assert "all 2 logs" in run("stats", tmp_path / "logs").out


def test_a_window_counts_what_was_asked_in_it_and_knows_what_was_saved_before(run: Any, tmp_path: Path) -> None:
    """The second request finds what the first one saved, with every size."""
    driver = Driver(chunk_size=16, block_size=16, num_slots=16)
    driver.save_prefix("a", keys_of("a", 2))
    since = len(driver.observed) + 1
    driver.admit("b", keys_of("a", 2), 33, (1, 2, 3), num_external=32)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    found = one(run("stats", "--json", log, "--since", since).objects("pool_sizes"))
    assert {size["num_tokens_loaded"] for size in found["pool_sizes"]} == {found["num_tokens_asked"]} == {32}
    assert found["error"] is None
    assert "so the error of the estimate is not known" in run("stats", log).out


def test_a_pool_size_that_equals_the_pool_as_it_was_is_left_out(run: Any, tmp_path: Path) -> None:
    """A pool holds a chunk at least, so half of this one is the whole."""
    driver = Driver(chunk_size=16, block_size=16, num_slots=1)
    driver.save_prefix("a", keys_of("a", 1))
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    lines = run("stats", log).out.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("pool "))
    assert [line.split()[:2] for line in lines[first + 1 : first + 3]] == [["as", "it"], ["twice", "2"]]


def test_changes_are_advised_for_each_log_and_not_for_all_together(run: Any, tmp_path: Path) -> None:
    """Logs may have different configurations. A request that still waits counts."""
    driver = Driver()
    driver.start("a", keys_of("a", 4), 32, (1, 2))
    driver.arrive("b", 33)
    driver.pass_ns(9 * 10**9)
    driver.preempt("a", 32, 33)
    driver.pass_ns(2 * 10**9)
    driver.step()
    for name in ("1", "2"):
        write_log(tmp_path / "logs" / name, driver.observed, driver.configuration)
    result = run("stats", "--json", tmp_path / "logs")
    assert [list(total["advice"]) for total in result.objects("total")] == [["queued"], ["queued"], []]
    out = run("stats", tmp_path / "logs").out
    assert out.count("\npossible changes\n  queued: ") == 2


def test_where_pools_of_other_sizes_cannot_be_estimated_stats_says_why(
    run: Any, walked: tuple[Path, Driver], log: Path
) -> None:
    """Chunks of 8 tokens share blocks of 16; and one request alone has no pool."""
    assert "not estimated: chunks that are shorter than a block share slots" in run("stats", walked[0]).out
    assert "not estimated: only all requests together have an estimate" in run("stats", log, "--request", REQUEST).out
    found = one(run("stats", "--json", walked[0]).objects("pool_sizes"))
    assert (found["pool_sizes"], found["why_not"] != "") == ([], True)


# --- damage, and faults of our own --------------------------------------------------------------


def test_a_log_with_a_gap_is_summed_up_on_both_sides_of_it(
    run: Any, walked: tuple[Path, Driver], tmp_path: Path
) -> None:
    """Some reasons are unknown then; the sums are not."""
    _, driver = walked
    third = len(driver.observed) // 3
    store = SegmentEventStore.create(tmp_path / "gap", header_of(driver.configuration))
    store.append(encode_events(driver.observed[:third]), third)
    store.append_gap(third, "the disk was full")
    rest = driver.observed[2 * third :]
    store.append(encode_events(rest), len(rest))
    store.close()
    result = run("stats", "--json", tmp_path / "gap")
    assert result.exit_code == 0
    assert "lost_events" in result.err
    assert one(result.objects("statistics"))["num_events"] == len(driver.observed) - third
    assert adds_up(one(result.objects("total")))


def test_a_log_whose_oldest_segments_were_retired_is_summed_up_as_far_as_it_goes(
    run: Any, walked: tuple[Path, Driver], tmp_path: Path
) -> None:
    """What came before is unknown; nothing is made up about it, and the sums hold."""
    _, driver = walked
    log = write_log(tmp_path / "late", driver.observed, driver.configuration, segment_bytes=4_000)
    segments = sorted(log.glob("*.kvlog"))
    for segment in segments[: len(segments) // 2]:
        segment.unlink()
    result = run("stats", "--json", log)
    assert result.exit_code == 5
    assert "begins with event" in str(one(result.objects("statistics"))["incomplete"])
    total = one(result.objects("total"))
    assert adds_up(total)
    assert total["num_tokens_needed"] > 0
    request_id = driver.all_of(e.RequestFinished)[-1].request_id
    incarnations = run("why", "--json", log, request_id).objects("total")
    assert all(map(adds_up, incarnations))


def test_the_figures_of_a_damaged_log_say_that_they_are_incomplete(run: Any, log: Path) -> None:
    """Incident: only stderr had the damage, so the JSON of a damaged log looked like that of a sound one."""
    (segment,) = log.glob("*.kvlog")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    result = run("stats", "--json", log)
    assert result.exit_code == 0
    assert "the log is damaged (corrupt_" in str(one(result.objects("statistics"))["incomplete"])
    assert "events may be missing" in run("stats", log).out


# --- percentiles --------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_is_right_within_one_per_cent(values: list[int], share: float) -> None:
    """Whatever the values are, compared with sorting all of them."""
    percentiles = Percentiles()
    for value in values:
        percentiles.add(value)
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    assert abs(percentiles.at(share) - exact) <= 0.01 * exact + 1
    summary = percentiles.summary()
    assert (summary["count"], summary["sum"], summary["max"]) == (len(values), sum(values), max(values))


@given(st.lists(st.integers(0, 10**12)), st.lists(st.integers(0, 10**12)))
def test_two_halves_merge_to_the_whole(first: list[int], second: list[int]) -> None:
    """As needed for several logs."""
    halves = [Percentiles(), Percentiles()]
    whole = Percentiles()
    for half, values in zip(halves, (first, second), strict=True):
        for value in values:
            half.add(value)
            whole.add(value)
    halves[0].merge(halves[1])
    assert halves[0] == whole


def test_percentiles_need_bounded_memory() -> None:
    """Nine hundred counts for each power of ten."""
    percentiles = Percentiles()
    for value in range(1, 200_000):
        percentiles.add(value)
    assert len(percentiles._counts) < 900 * 6
    assert Percentiles().summary() == {"count": 0, "sum": 0, "p50": 0, "p90": 0, "p99": 0, "max": 0}


def test_events_are_sorted_by_the_column_that_was_asked_for(run: Any, log: Path) -> None:
    """The largest first, and names in their order."""

    def column(name: str, *sort: str) -> list[Any]:
        return [each[name] for each in run("stats", log, "--json", *sort).objects("events")]

    assert column("event", "--sort", "event") == sorted(column("event"))
    assert column("num_events", "--sort", "events") == sorted(column("num_events"), reverse=True)
    assert column("num_bytes") == column("num_bytes", "--sort", "bytes") == sorted(column("num_bytes"), reverse=True)
    assert run("stats", log, "--sort", "weight").exit_code == 64
