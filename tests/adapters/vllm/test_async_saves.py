"""An asynchronous save: until it is done nobody may write to the blocks that it reads, whatever its owner does.

The copies pend until a test finishes them, or until a step waits for them, and read the blocks only then: had anybody
written to those meanwhile, wrong KV would have been saved, and whoever loads it would raise `CorruptKV`.
"""

from __future__ import annotations

from typing import Any

import pytest
from sim.reported import note_reports
from sim.slow_copies import SlowCopies, slow_down
from vllm.v1.request import RequestStatus

from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

PROMPT = range(64)


def overlapping(make_engine: Any, **options: Any) -> Any:
    """An engine in which every save runs asynchronously."""
    defaults = {"num_blocks": 40, "chunk_size": 8, "enable_prefix_caching": False, "save_mode": "async"}
    return make_engine(**(defaults | options))


def step_until_unscheduled(engine: Any, request_id: str) -> None:
    """Step until a request has ended, and vLLM has heard its last output."""
    while request_id not in engine.finish_reasons:
        engine.step()
    engine.drain()


def num_free_blocks(engine: Any) -> int:
    """Blocks that vLLM may give to anybody."""
    free: int = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return free


def check_saved(engine: Any, request_id: str) -> None:
    """Everything that was settled of a request can be loaded, and is right."""
    for worker in engine.workers:
        worker._worker_side._async_engine.slow.clear()
    tokens = [*engine.prompts[request_id], *engine.outputs[request_id]]
    engine.serve(f"reader of {request_id}", tokens, 4)
    chunk_size = engine.replay_configuration.chunk_size
    (load,) = engine.logged(e.LoadIssued, request_id=f"reader of {request_id}")
    assert load.first_token + load.num_tokens == (len(tokens) - 1) // chunk_size * chunk_size


def finish_all(copies: list[SlowCopies]) -> None:
    """Every pending copy of every rank."""
    for of_rank in copies:
        for copy in of_rank.pending():
            copy.finish()


# --- the end of a request --------------------------------------------------------------------------


def test_the_blocks_of_a_finished_request_are_kept_until_nothing_reads_them(
    make_engine: Any, runner: dict[str, bool]
) -> None:
    """The client has its answer at once; the engine steps on until the copies are done, and frees the blocks once."""
    engine = overlapping(make_engine, **runner)
    reported = note_reports(engine)
    copies = slow_down(engine, "save")
    engine.add("only", PROMPT, 20)
    step_until_unscheduled(engine, "only")
    assert len(engine.outputs["only"]) == 20
    num_kept = 39 - num_free_blocks(engine)
    assert num_kept >= 5
    for _ in range(10):
        assert engine.scheduler.has_requests()
        assert engine.connector.has_pending_push_work()
        engine.step()
    assert 39 - num_free_blocks(engine) == num_kept
    assert reported.sent == []
    *early, last = copies[0].pending()
    for copy in early:
        copy.finish()
    for _ in range(3):
        engine.step()
    assert reported.sent == [], "one copy still reads"
    last.finish()
    engine.run(max_steps=10)
    assert reported.sent == ["only"]
    check_saved(engine, "only")


def test_somebody_who_needs_all_blocks_waits_for_the_copies(make_engine: Any, runner: dict[str, bool]) -> None:
    """A newcomer gets no block that is being copied out of, and runs when the copies are done."""
    engine = overlapping(make_engine, num_blocks=8, **runner)
    copies = slow_down(engine, "save")
    engine.add("first", PROMPT, 20)
    step_until_unscheduled(engine, "first")
    engine.add("newcomer", range(900, 1000), 6)
    for _ in range(6):
        engine.step()
    assert engine.scheduler.requests["newcomer"].status is RequestStatus.WAITING
    finish_all(copies)
    step_until_unscheduled(engine, "newcomer")
    finish_all(copies)
    engine.run()
    assert not any(copy.was_waited_for for copy in copies[0].started), "nobody had to take the blocks away"
    check_saved(engine, "first")


def test_nobody_is_preempted_for_blocks_that_are_coming_back(make_engine: Any, runner: dict[str, bool]) -> None:
    """A running request that needs a block waits for those of an ended one, and goes on where it was."""
    engine = overlapping(make_engine, num_blocks=9, **runner)
    copies = slow_down(engine, "save")
    engine.add("running", range(600, 620), 70)
    engine.add("ended", range(64), 2)
    step_until_unscheduled(engine, "ended")
    num_kept = 8 - num_free_blocks(engine)
    for _ in range(60):
        engine.step()
    assert engine.num_preemptions == 0
    assert engine.connector.has_pending_block_frees()
    assert len(engine.outputs["running"]) < 70
    assert 8 - num_free_blocks(engine) > num_kept
    finish_all(copies)
    step_until_unscheduled(engine, "running")
    finish_all(copies)
    engine.run()
    assert engine.num_preemptions == 0
    assert not engine.connector.has_pending_block_frees()


def test_an_aborted_request_keeps_its_blocks_as_well(make_engine: Any, runner: dict[str, bool]) -> None:
    """The client went away in the middle of its answer; what was settled is saved all the same."""
    engine = overlapping(make_engine, **runner)
    reported = note_reports(engine)
    copies = slow_down(engine, "save")
    engine.add("gone", PROMPT, 50)
    for _ in range(12):
        engine.step()
    engine.abort("gone")
    engine.add("other", range(500, 600), 20)
    step_until_unscheduled(engine, "other")
    assert "gone" in engine.scheduler.requests
    assert reported.sent == []
    finish_all(copies)
    engine.run()
    assert sorted(reported.sent) == ["gone", "other"]
    check_saved(engine, "other")


def test_a_request_out_of_whose_blocks_nothing_is_copied_is_freed_at_once(make_engine: Any) -> None:
    """Eight tokens and no whole chunk: there is nothing to keep, and nothing is told."""
    engine = overlapping(make_engine)
    reported = note_reports(engine)
    slow_down(engine)
    engine.add("short", range(4), 3)
    step_until_unscheduled(engine, "short")
    assert num_free_blocks(engine) == 39
    engine.run(max_steps=3)
    assert reported.sent == []


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_save_that_fails_frees_the_blocks_as_well(make_engine: Any, num_ranks: int) -> None:
    """What did not arrive on every rank is not offered; the blocks are free when the last rank is done."""
    engine = overlapping(make_engine, num_ranks=num_ranks)
    reported = note_reports(engine)
    copies = slow_down(engine, "save")
    engine.add("only", PROMPT, 20)
    step_until_unscheduled(engine, "only")
    for copy in copies[-1].pending():
        copy.fail()
    for _ in range(3):
        engine.step()
    assert reported.sent == ([] if num_ranks > 1 else ["only"])
    finish_all(copies)
    engine.run()
    assert reported.sent == ["only"]
    assert len(engine.projections.pool) == 0
    assert len(engine.logged(e.SaveFailed)) == len(engine.logged(e.SaveIssued)) > 1


def test_two_ranks_of_unlike_speed(make_engine: Any) -> None:
    """A chunk is offered and a block is free when the slower one is done, too."""
    engine = overlapping(make_engine, num_ranks=2)
    reported = note_reports(engine)
    _, slow = slow_down(engine)
    engine.workers[0]._worker_side._async_engine.slow.clear()
    engine.add("only", PROMPT, 20)
    step_until_unscheduled(engine, "only")
    engine.step()
    assert len(engine.projections.pool) == 0
    assert reported.sent == []
    finish_all([slow])
    engine.run()
    assert reported.sent == ["only"]
    assert {event.ranks_done for event in engine.logged(e.TransferReported)} == {(0,), (1,)}
    check_saved(engine, "only")


# --- blocks that are taken away --------------------------------------------------------------------


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_step_that_may_overwrite_blocks_waits_for_the_copies_out_of_them(
    make_engine: Any, runner: dict[str, bool], enable_prefix_caching: bool
) -> None:
    """Preemptions have no hook to refuse them in: the step that follows waits. Others' copies are not waited for."""
    engine = overlapping(make_engine, num_blocks=14, **runner, enable_prefix_caching=enable_prefix_caching)
    (copies,) = slow_down(engine, "save")
    engine.add_crowd()
    while not engine.num_preemptions:
        engine.step()
    (preempted,) = engine.logged(e.RequestPreempted)
    saves = {save.job_id: save.request_id for save in engine.logged(e.SaveIssued) if save.is_async}
    awaited = engine.logged(e.TransferAwaited)
    assert awaited
    assert all(event.before_forward for event in awaited)
    assert {saves[event.job_id] for event in awaited} == {preempted.request_id}
    assert sum(copy.was_waited_for for copy in copies.started) == len(awaited)
    assert copies.pending(), "copies out of other blocks go on asynchronously"
    while engine.scheduler.has_requests():
        engine.step()
        if not engine.scheduler.get_num_unfinished_requests():
            finish_all([copies])
    engine.run()
    check_saved(engine, preempted.request_id)


def test_the_next_turn_of_a_session_waits_for_the_copies(make_engine: Any, runner: dict[str, bool]) -> None:
    """The last token of a turn is dropped, and the next turn writes to its place in a block that is being copied."""
    engine = overlapping(make_engine, **runner)
    (copies,) = slow_down(engine, "save")
    engine.add("session", range(45), 13, resumable=True)
    step_until_unscheduled(engine, "session")
    pending = copies.pending()
    assert pending
    del engine.finish_reasons["session"]
    said, asked = engine.outputs["session"], engine.prompts["session"]
    engine.add("session", range(300, 340), 10, resumable=True)
    engine.outputs["session"], engine.prompts["session"] = said, asked
    engine.step()
    assert all(copy.was_waited_for for copy in pending)
    step_until_unscheduled(engine, "session")
    finish_all([copies])
    tokens = list(engine.scheduler.requests["session"].all_token_ids)
    engine.end_session("session")
    while engine.scheduler.has_requests():
        engine.step()
        finish_all([copies])
    engine.run()
    del engine.outputs["session"]
    copies.slow.clear()
    engine.serve("reader", tokens, 4)
    assert engine.logged(e.LoadIssued)[0].num_tokens == (len(tokens) - 1) // 8 * 8


# --- resets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("finishes_first", [False, True])
def test_a_reset_while_copies_are_under_way(make_engine: Any, runner: dict[str, bool], finishes_first: bool) -> None:
    """They were computed with old weights: they commit nothing, and still keep their blocks until they are done."""
    engine = overlapping(make_engine, **runner)
    reported = note_reports(engine)
    copies = slow_down(engine, "save")
    engine.add("only", PROMPT, 20)
    for _ in range(12):
        engine.step()
    if finishes_first:
        step_until_unscheduled(engine, "only")
    assert engine.connector.reset_cache() is True
    step_until_unscheduled(engine, "only")
    engine.step()
    assert reported.sent == []
    finish_all(copies)
    engine.run()
    assert reported.sent == ["only"]
    assert len(engine.projections.pool) == 0
    slots = engine.projections.slots
    assert slots.num_free == slots.num_slots


def test_vllm_cannot_reset_its_own_cache_before_the_copies_are_done(make_engine: Any) -> None:
    """Blocks in use: it says so and changes nothing. The next attempt, when they are done, succeeds."""
    engine = overlapping(make_engine, enable_prefix_caching=True)
    copies = slow_down(engine, "save")
    engine.add("only", PROMPT, 20)
    step_until_unscheduled(engine, "only")
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    finish_all(copies)
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert len(engine.projections.pool) == 0


@pytest.mark.parametrize("save_mode", ["sync", "async"])
def test_what_another_request_computes_in_this_step_is_copied_behind_it(make_engine: Any, save_mode: str) -> None:
    """VLLM's prefix cache gives a request blocks that another one fills in the same step. They count as settled."""
    engine = make_engine(num_blocks=60, chunk_size=16, save_mode=save_mode)
    engine.serve("writer", range(500, 548), 2)
    assert engine.scheduler.reset_prefix_cache()
    engine.add("loads in this step", range(500, 549), 2)  # so that the worker is called before the forward
    engine.add("computes", range(65), 2)
    engine.add("shares", [*range(64), 900], 2)
    output = engine.step()
    assert output.has_sync_kv_loads
    assert set(output.num_scheduled_tokens) == {"loads in this step", "computes", "shares"}
    assert output.num_scheduled_tokens["shares"] == 1
    assert engine.logged(e.SaveIssued, request_id="shares")
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.serve("later", range(70), 4)
    assert engine.logged(e.LoadCompleted, request_id="later")
