"""What leaves the hooks and what arrives in them is counted in the log, and every difference is named.

108 deliberate mistakes were put into kvledger. Those on the way from a decision to vLLM led to wrong KV or a hang, and
`verify` called the log sound.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from sim.broken_copies import break_copies
from sim.slow_copies import slow_down

from kvledger.adapters.lab.simulation.hashed_model import HashedModel
from kvledger.adapters.vllm.connector import KVLedgerConnector
from kvledger.adapters.vllm.edge import Edge
from kvledger.adapters.vllm.journal import Journal
from kvledger.adapters.vllm.metadata import StepJobs
from kvledger.adapters.vllm.scheduler_side import SchedulerSide
from kvledger.adapters.vllm.worker_side import WorkerSide
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler
RULE = "TOLD_AS_DECIDED"


def crowded(make_engine: Any, **options: Any) -> Any:
    """An engine whose requests are preempted and load what they lost."""
    engine = make_engine(num_blocks=13, chunk_size=16, enable_prefix_caching=False, replays=False, **options)
    engine.add_crowd()
    return engine


def found(engine: Any) -> list[str]:
    """What the rule finds in the engine's log."""
    return [violation.detail for violation in engine.audit().violations if violation.rule == RULE]


def change_decisions(
    monkeypatch: pytest.MonkeyPatch,
    event_class: type[e.Event],
    change: Callable[[Journal, list[e.Event]], list[e.Event]],
) -> None:
    """What a hook learns of the decisions on such an observation is `change(journal, decisions)`."""
    observe = Journal.observe

    def observing(journal: Journal, event: e.Event) -> list[e.Event]:
        decisions = observe(journal, event)
        return change(journal, decisions) if isinstance(event, event_class) else decisions

    monkeypatch.setattr(Journal, "observe", observing)


def without_loads(_journal: Journal, decisions: list[e.Event]) -> list[e.Event]:
    """As if none had been issued, so that the hook refuses it."""
    return [decision for decision in decisions if not isinstance(decision, e.LoadIssued)]


def test_a_step_in_which_every_request_decodes_has_no_such_event(make_engine: Any) -> None:
    """The last one before the first of forty decoding steps is about the prefill, the next one about the end."""
    engine = make_engine(num_blocks=40, chunk_size=1024)
    engine.serve("a", range(20), 40)
    steps = [event for _, event in engine.events() if isinstance(event, e.StepScheduled | e.HooksExchanged)]
    assert [type(event) for event in steps[:2]] == [e.HooksExchanged, e.StepScheduled]
    assert all(isinstance(event, e.StepScheduled) for event in steps[2:40])


def test_counts_add_up_to_what_the_log_has(make_engine: Any) -> None:
    """Shutdown records what has passed since the last step, too."""
    engine = make_engine(num_blocks=13, chunk_size=16, enable_prefix_caching=False)
    engine.add_crowd()
    engine.run()
    engine.connector.shutdown()
    exchanged = engine.logged(e.HooksExchanged)
    answers = engine.logged(e.LookupAnswered)
    assert sum(event.num_tokens for event in exchanged) == sum(answer.num_external_tokens for answer in answers) > 0
    assert sum(event.num_finished for event in exchanged) == 3
    assert sum(event.num_handed_out for event in exchanged) >= sum(
        len(event.job_ids) for event in engine.logged(e.EffectsDelivered)
    )
    assert not any(event.differences for event in exchanged)


def test_an_answer_that_could_not_be_written_is_no_difference(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM gets the safe answer, and the log says so."""
    engine = crowded(make_engine)
    hits: list[Any] = []

    def look_up(journal: Journal, decisions: list[e.Event]) -> list[e.Event]:
        (answer,) = [decision for decision in decisions if isinstance(decision, e.LookupAnswered)]
        hits.extend([answer] if answer.num_external_tokens else [])
        journal.is_behind = lambda: bool(answer.num_external_tokens) and len(hits) < 3
        return decisions

    change_decisions(monkeypatch, e.LookupRequested, look_up)
    engine.run()
    withheld = engine.logged(e.DecisionWithheld)
    assert any(each.detail == "the event log could not be written" for each in withheld)
    assert found(engine) == []


def test_a_lookup_that_was_deferred_and_could_not_be_written_is_no_difference(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: in worlds with a full disk, the safe answer in the place of "ask again" was called a difference."""
    engine = make_engine(num_blocks=30, chunk_size=8, enable_prefix_caching=False, replays=False)
    engine.add_crowd()
    for _ in range(12):
        engine.step()
    engine.drain()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    take_reports = engine.worker._worker_side.take_reports
    monkeypatch.setattr(engine.worker._worker_side, "take_reports", lambda: None)

    def look_up(journal: Journal, decisions: list[e.Event]) -> list[e.Event]:
        is_deferred = any(isinstance(decision, e.LookupDeferred) for decision in decisions)
        journal.is_behind = lambda: is_deferred
        return decisions

    change_decisions(monkeypatch, e.LookupRequested, look_up)
    engine.step()
    monkeypatch.setattr(engine.worker._worker_side, "take_reports", take_reports)
    engine.run()
    assert engine.logged(e.LookupDeferred)
    assert engine.logged(e.DecisionWithheld)
    assert found(engine) == []


def test_a_hook_that_fails_is_no_difference(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had decided until then did not leave, and `hook.failed` says so."""
    engine = crowded(make_engine)
    is_asked = iter(range(1000))

    def fail(_journal: Journal, decisions: list[e.Event]) -> list[e.Event]:
        if next(is_asked) % 2:
            raise ValueError("broken")
        return decisions

    change_decisions(monkeypatch, e.LookupRequested, fail)
    engine.run()
    assert engine.logged(e.HookFailed)
    assert found(engine) == []


def test_a_comparison_that_fails_stops_nothing_but_itself(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recorded, and nothing is compared from there on."""
    engine = crowded(make_engine)

    def broken(*_: Any) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(Edge, "_compare_reports", broken)
    engine.run()
    assert found(engine) == ["edge failed of life 0: KeyError"]
    assert [event.differences[0][0] for event in engine.logged(e.HooksExchanged) if event.differences] == [
        "edge failed"
    ]


def test_a_request_that_vllm_has_finished_without_calling_the_hook_is_named(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays open in the log for ever. Its id comes with the next step."""
    engine = crowded(make_engine)
    engine.step()
    monkeypatch.setattr(type(engine.scheduler), "_connector_finished", lambda *_: (False, None))
    engine.abort("request 2")
    engine.step()
    monkeypatch.undo()
    engine.run()
    assert found(engine) == ["open of life 2: vLLM has finished the request"]


def test_blocks_that_are_not_reported_as_not_filled_are_named(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM would compute on them."""
    engine = crowded(make_engine)
    hand_out = SchedulerSide.hand_out

    def without_blocks(side: SchedulerSide, scheduler_output: Any) -> Any:
        return msgspec.structs.replace(hand_out(side, scheduler_output), undeliverable_block_ids=())

    change_decisions(monkeypatch, e.BlocksAllocated, without_loads)
    monkeypatch.setattr(SchedulerSide, "hand_out", without_blocks)
    engine.run()
    assert "recorded as handed out in undeliverable_block_ids, but was not" in found(engine)[0]


def test_a_hook_that_bypasses_the_comparison_is_named(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has its decisions, and nothing says what left."""
    engine = crowded(make_engine)
    engine.step()
    monkeypatch.setattr(Edge, "answered", lambda *_: None)
    engine.run()
    assert re.match(r"hooks.exchanged counts \d+ answers to lookups, the log has \d+$", found(engine)[0])


def test_a_connector_that_no_longer_counts_is_named(make_engine: Any) -> None:
    """A step is recorded, and what was decided since the last count has no count."""
    engine = crowded(make_engine)
    engine.step()
    engine.connector.scheduler_side.journal.before_step = lambda: None
    engine.run()
    assert "but no hooks.exchanged counts them" in found(engine)[0]


def _without_ends(field: str) -> Any:
    def results(connector: Any) -> Any:
        found = original(connector)
        setattr(found, field, set())
        return found

    original = KVLedgerConnector._transfer_results
    return results


def test_an_end_that_a_worker_does_not_give_vllm_is_named(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Incident: vLLM kept the blocks of ended requests for ever, the engine stood still, and the log was sound."""
    engine = make_engine(num_blocks=40, chunk_size=8, enable_prefix_caching=False, save_mode="async", replays=False)
    slow_down(engine, "save")
    monkeypatch.setattr(KVLedgerConnector, "_transfer_results", _without_ends("finished_sending"))
    engine.add("a", range(64), 2)
    with contextlib.suppress(AssertionError):
        engine.run(400)
    assert engine.logged(e.BlocksHeld)
    assert "rank 0 did not report the end in finished_sending" in found(engine)[0]


def test_an_end_that_a_worker_does_not_see_among_its_jobs_is_named(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: metadata that had only ends was taken for empty, the engine stood still, and the log was sound."""

    def has_copies(jobs: StepJobs) -> bool:
        return bool(jobs.saves_before_forward or jobs.loads or jobs.saves or jobs.async_loads or jobs.async_saves)

    engine = make_engine(num_blocks=40, chunk_size=8, save_mode="async", load_mode="async", replays=False)
    (copies,) = slow_down(engine, "save")
    monkeypatch.setattr(StepJobs, "__bool__", has_copies)
    engine.add("ends", range(40), 2)
    engine.add("goes on", range(100, 140), 200)
    while not engine.logged(e.BlocksHeld):
        engine.step()
    copies.slow.clear()
    for copy in copies.pending():
        copy.finish()
    with contextlib.suppress(AssertionError):
        engine.run(100)
    assert found(engine)[0] == "end of life 0: it was handed out, but no output of the next 64 steps reports it"


def test_a_failed_load_that_a_worker_reports_as_good_is_named(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: vLLM computed on blocks that were never filled, and the log was sound."""
    engine = crowded(make_engine, load_mode="async", offer="always")
    break_copies(engine, "load", 1)
    monkeypatch.setattr(KVLedgerConnector, "_transfer_results", _without_ends("failed_recving"))
    with contextlib.suppress(Exception):
        engine.run()
    assert engine.logged(e.LoadFailed)
    assert "rank 0 did not report the end in failed_recving" in found(engine)[0]


def test_a_failed_load_whose_blocks_vllm_is_not_told_is_named(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: a worker named the blocks of loads that had succeeded, and a client got a wrong token."""
    engine = crowded(make_engine, load_mode="sync", offer="always")
    break_copies(engine, "load", 1)
    monkeypatch.setattr(KVLedgerConnector, "get_block_ids_with_load_errors", lambda _: set())
    monkeypatch.setattr(HashedModel, "_check", lambda *_: None)  # it would end the test first
    with contextlib.suppress(Exception):
        engine.run()
    assert engine.logged(e.LoadFailed)
    assert "rank 0 neither filled it nor reported it as not filled" in found(engine)[0]


def reports_as_not_filled(engine: Any, change: Callable[[WorkerSide, set[int]], set[int]], rank: int = 0) -> None:
    """From now on this rank gives vLLM `change(side, blocks)` instead of the blocks that it could not fill."""
    side = engine.workers[rank]._worker_side
    take = side.take_failed_block_ids
    side.take_failed_block_ids = lambda: change(side, take())


def blocks_of_loads(side: WorkerSide) -> set[int]:
    """The blocks that the loads of the worker's step fill before it."""
    return set() if side._bound is None else {block_id for job in side._bound.loads for block_id in job.block_ids}


def told_errors(engine: Any) -> list[str]:
    """What the rule finds about blocks that were not filled."""
    return [detail for detail in found(engine) if detail.startswith("load error")]


def test_blocks_that_a_worker_reports_as_not_filled_at_every_step_are_named(make_engine: Any) -> None:
    """Incident: vLLM computed the same requests again for ever, the engine never came to an end, the log was sound."""
    engine = crowded(make_engine, load_mode="sync", offer="always")
    break_copies(engine, "load", 1)
    reported: set[int] = set()

    def again(_side: WorkerSide, block_ids: set[int]) -> set[int]:
        reported.update(block_ids)
        return set(reported)

    reports_as_not_filled(engine, again)
    with contextlib.suppress(AssertionError):
        engine.run(300)
    assert engine.logged(e.LoadFailed)
    assert "rank 0 reported it as not filled, but no load of that step was to fill it" in told_errors(engine)[0]


def test_blocks_that_a_worker_reports_as_not_filled_in_a_step_without_copies_are_named(make_engine: Any) -> None:
    """Nothing else is reported with that output."""
    engine = make_engine(num_blocks=40, chunk_size=1024, replays=False)
    engine.add("a", range(20), 10)
    for _ in range(3):
        engine.step()
    reports_as_not_filled(engine, lambda *_: {1})
    engine.step()
    del engine.worker._worker_side.take_failed_block_ids
    engine.run()
    assert "of block 1: rank 0 reported it as not filled" in told_errors(engine)[0]
    assert engine.logged(e.StepReported) == []


def test_blocks_of_a_load_that_has_succeeded_are_named(make_engine: Any) -> None:
    """VLLM computes them again, or ends the request with an error, although they are right."""
    engine = crowded(make_engine, load_mode="sync", offer="always")
    reports_as_not_filled(engine, lambda side, block_ids: block_ids | blocks_of_loads(side))
    with contextlib.suppress(AssertionError):
        engine.run(300)
    assert engine.logged(e.LoadCompleted)
    assert "rank 0 reported it as not filled, but its load as done" in told_errors(engine)[0]


def test_each_rank_is_compared_with_its_own_loads(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM gets the right blocks all the same, of the wrong rank: it merges what all ranks report."""
    monkeypatch.setattr(HashedModel, "_check", lambda *_: None)  # it asks each rank what is not filled
    engine = crowded(make_engine, load_mode="sync", offer="always", num_ranks=2)
    break_copies(engine, "load", 1)
    reports_as_not_filled(engine, lambda *_: set())
    reports_as_not_filled(engine, lambda side, _: blocks_of_loads(side), rank=1)
    with contextlib.suppress(AssertionError):
        engine.run(300)
    (failed, *_) = [report for report in engine.logged(e.TransferReported) if report.ranks_failed]
    assert (failed.ranks_done, failed.ranks_failed) == ((1,), (0,))
    assert {detail.partition(": ")[2] for detail in told_errors(engine)} == {
        "rank 0 neither filled it nor reported it as not filled",
        "rank 1 reported it as not filled, but its load as done",
    }


def test_a_worker_that_does_not_report_the_blocks_of_a_refused_load_is_named(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM counts on them, and no copy fills them."""
    engine = crowded(make_engine, load_mode="sync", offer="always")
    change_decisions(monkeypatch, e.BlocksAllocated, without_loads)
    monkeypatch.setattr(HashedModel, "_check", lambda *_: None)
    reports_as_not_filled(engine, lambda *_: set())
    with contextlib.suppress(Exception):
        engine.run()
    assert any(event.block_ids for event in engine.logged(e.EffectsDelivered))
    assert "rank 0 had to report it as not filled, but did not" in told_errors(engine)[0]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("is_refused", [False, True])
def test_blocks_of_failed_and_refused_loads_that_are_reported_are_no_difference(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, num_ranks: int, *, is_refused: bool
) -> None:
    """Each is reported once, with the output of its step."""
    engine = crowded(make_engine, load_mode="sync", offer="always", num_ranks=num_ranks)
    num_refused = itertools.count()

    def refuse(journal: Journal, decisions: list[e.Event]) -> list[e.Event]:
        others = without_loads(journal, decisions)
        return others if others != decisions and not next(num_refused) else decisions

    if is_refused:
        change_decisions(monkeypatch, e.BlocksAllocated, refuse)
    else:
        break_copies(engine, "load", 1)
    engine.run(1000)
    assert any(event.block_ids for event in engine.logged(e.EffectsDelivered)) == is_refused
    assert bool(engine.logged(e.LoadFailed)) != is_refused
    assert found(engine) == []


def test_an_engine_that_waits_for_blocks_that_do_not_come_is_named(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: vLLM waited for blocks instead of preempting a request, nobody kept any, and the log was sound."""
    engine = crowded(make_engine)
    monkeypatch.setattr(SchedulerSide, "has_pending_block_frees", lambda _: True)
    with contextlib.suppress(AssertionError):
        engine.run(100)
    assert found(engine)[0] == "pending frees: kvledger asked vLLM to wait for blocks, but none are kept"
