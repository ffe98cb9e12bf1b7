"""An asynchronous load: its request waits in vLLM's own state, everybody else goes on, one end of it is told.

The copies pend until a test finishes them. Whoever ran before its load had arrived would read blocks that are not
filled, and the model would raise `CorruptKV`; vLLM itself asserts on a second end of a load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sim.broken_copies import BROKEN, break_copies
from sim.broken_ledger import fail_to_observe_once
from sim.reported import Reported, note_reports
from sim.slow_copies import SlowCopies, SlowCopy, slow_down
from vllm.v1.request import RequestStatus

from kvledger.adapters.vllm import configuration
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

PROMPT = range(64)
policies = pytest.mark.parametrize("policy", ["recompute", "fail"])


def overlapping(make_engine: Any, **options: Any) -> Any:
    """An engine in which every load runs asynchronously, and the prompt has been saved."""
    defaults = {"num_blocks": 40, "chunk_size": 8, "enable_prefix_caching": False, "load_mode": "async"}
    engine = make_engine(**(defaults | options))
    engine.serve("writer", PROMPT, 2)
    return engine


def start_load(engine: Any, **options: Any) -> list[SlowCopies]:
    """Let "reader" ask for the saved prompt, and step until its load has begun on every rank."""
    copies = slow_down(engine, "load")
    engine.add("reader", PROMPT, 6, **options)
    engine.step()
    assert [len(of_rank.pending()) for of_rank in copies] == [1] * len(copies)
    return copies


def start_recovery(engine: Any) -> list[SlowCopies]:
    """Let "reader" compute a prompt of its own, lose its blocks, and step until its load has begun."""
    engine.add("reader", range(200, 264), 40)
    for _ in range(12):
        engine.step()
    engine.drain()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    copies = slow_down(engine, "load")
    while not copies[0].pending():
        engine.step()
    return copies


def the_load(copies: list[SlowCopies], rank: int = 0) -> SlowCopy:
    """The only load that was begun."""
    (load,) = copies[rank].started
    return load


def first_step_of(engine: Any, request_id: str) -> tuple[int, int]:
    """Tokens computed before the first step that a request is in, and tokens scheduled in it."""
    ordinal = engine.logged(e.RequestArrived, request_id=request_id)[-1].ordinal
    return next(
        (num_computed, num_scheduled)
        for step in engine.logged(e.StepScheduled)
        for other, num_computed, num_scheduled, _ in step.advanced
        if other == ordinal
    )


def check_reported_once(reported: Reported, *, failed: bool) -> None:
    """One end of the one load."""
    assert (reported.received, reported.failed) == (["reader"], ["reader"] if failed else [])


def test_a_loading_request_is_in_no_step_and_others_go_on(make_engine: Any, runner: dict[str, bool]) -> None:
    """It waits in vLLM's own state while somebody else decodes; when the load is there it computes one token."""
    engine = overlapping(make_engine, **runner)
    engine.add("other", range(500, 530), 30)
    engine.step()
    reported = note_reports(engine)
    copies = start_load(engine)
    for _ in range(10):
        num_said = len(engine.outputs["other"])
        output = engine.step()
        assert set(output.num_scheduled_tokens) == {"other"}
        assert engine.scheduler.requests["reader"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert len(engine.outputs["other"]) == num_said + 1
    assert reported.received == []
    the_load(copies).finish()
    engine.run()
    check_reported_once(reported, failed=False)
    assert first_step_of(engine, "reader") == (63, 1)


def test_alone_it_keeps_the_engine_stepping(make_engine: Any) -> None:
    """There is nothing to compute, but without steps nobody would hear of the load."""
    engine = overlapping(make_engine)
    copies = start_load(engine)
    for _ in range(5):
        assert engine.scheduler.has_requests()
        assert engine.connector.has_pending_push_work()
        assert not engine.step().total_num_scheduled_tokens
    the_load(copies).finish()
    engine.run()


def test_a_loaded_request_waits_long_for_the_rest_of_its_blocks(make_engine: Any, runner: dict[str, bool]) -> None:
    """It holds what was loaded for dozens of steps, is not looked up again, and runs when there is room."""
    engine = overlapping(make_engine, num_blocks=14, **runner)
    engine.scheduler.scheduler_reserve_full_isl = False
    engine.add("holder", range(500, 590), 52)
    for _ in range(3):
        engine.step()
    copies = slow_down(engine, "load")
    reported = note_reports(engine)
    engine.add("reader", [*PROMPT, *range(700, 740)], 6)
    while engine.projections.tracker.num_computed_tokens(engine.projections.tracker.get("holder")) < 114:
        engine.step()
    the_load(copies).finish()
    num_steps_waited = 0
    while engine.scheduler.requests["reader"].status is not RequestStatus.RUNNING:
        engine.step()
        num_steps_waited += 1
    assert num_steps_waited > 20
    assert reported.received == ["reader"]
    engine.run()
    allocated = engine.logged(e.BlocksAllocated, request_id="reader")
    assert [event.num_external_tokens for event in allocated] == [64, 0]
    assert len(engine.logged(e.LookupAnswered, request_id="reader")) == 1
    assert first_step_of(engine, "reader") == (64, 40)


# --- failures --------------------------------------------------------------------------------------


@policies
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_load_that_fails_on_one_rank(make_engine: Any, policy: str, runner: dict[str, bool], num_ranks: int) -> None:
    """Recompute: the request computes all of it, once; fail: one error. Nobody hears of it before every rank is done.

    What a rank still writes must not go into blocks that somebody else has by then.
    """
    engine = overlapping(make_engine, **runner, num_ranks=num_ranks, kv_transfer={"kv_load_failure_policy": policy})
    reported = note_reports(engine)
    copies = start_load(engine)
    the_load(copies, num_ranks - 1).fail()
    if num_ranks > 1:
        for _ in range(5):
            engine.step()
        assert reported.received == []
        the_load(copies).finish()
    engine.run()
    check_reported_once(reported, failed=True)
    (failed,) = engine.logged(e.LoadFailed)
    assert BROKEN in failed.error
    assert sum(len(event.keys) for event in engine.logged(e.ChunksTainted)) == 8
    assert engine.finish_reasons["reader"] == ("length" if policy == "recompute" else "error")
    if policy == "recompute":
        assert first_step_of(engine, "reader") == (0, 64)


@policies
def test_a_promised_load_that_cannot_be_issued_is_reported_as_failed(
    make_engine: Any, policy: str, runner: dict[str, bool]
) -> None:
    """The scheduler waits for a load that nobody makes; it hears so once, and the request goes on or fails."""
    engine = overlapping(make_engine, replays=False, **runner, kv_transfer={"kv_load_failure_policy": policy})
    reported = note_reports(engine)
    fail_to_observe_once(engine, lambda event: isinstance(event, e.BlocksAllocated))
    engine.serve("reader", PROMPT, 6, max_steps=100)
    check_reported_once(reported, failed=True)
    assert engine.logged(e.LoadIssued) == []
    assert engine.finish_reasons["reader"] == ("length" if policy == "recompute" else "error")
    engine.check_released()


def test_a_request_whose_load_failed_too_often_gets_no_more_of_them(make_engine: Any) -> None:
    """The host or the way to it is broken for this request; it computes, and the log says why."""
    engine = make_engine(
        num_blocks=14, chunk_size=8, enable_prefix_caching=False, load_mode="async", max_failed_loads=1
    )
    (copies,) = slow_down(engine, "load")
    engine.add_crowd()
    while engine.scheduler.has_requests():
        engine.step()
        for load in copies.pending():
            load.fail()
    engine.run()
    failed = [event.request_id for event in engine.logged(e.LoadFailed)]
    assert failed
    assert len(failed) == len(set(failed))
    assert {event.reason for event in engine.logged(e.RequestQuarantined)} == {"1 loads failed"}
    assert engine.logged(e.InvariantViolated, e.HookFailed) == []


# --- aborts ----------------------------------------------------------------------------------------


def while_it_copies(engine: Any, copies: list[SlowCopies]) -> None:
    """Nothing has arrived; it does after the abort."""
    engine.step()
    engine.abort("reader")
    for _ in range(3):
        engine.step()
    assert "reader" in engine.scheduler.requests, "its blocks are still written to"
    the_load(copies).finish()


def while_it_copies_in_vain(engine: Any, copies: list[SlowCopies]) -> None:
    """As before, but the copy fails after the abort."""
    engine.abort("reader")
    engine.step()
    the_load(copies).fail()


def when_it_is_copied(engine: Any, copies: list[SlowCopies]) -> None:
    """The bytes are there, the worker has not told."""
    the_load(copies).finish()
    engine.abort("reader")


def when_it_is_reported(engine: Any, copies: list[SlowCopies]) -> None:
    """The worker has told in a step whose output vLLM has not taken up."""
    the_load(copies).finish()
    engine.begin_step()
    engine.abort("reader")


def when_vllm_knows(engine: Any, copies: list[SlowCopies]) -> None:
    """The end was told, the request is not scheduled yet."""
    the_load(copies).finish()
    while not engine.scheduler.finished_recving_kv_req_ids:
        engine.begin_step()
        engine.update()
    engine.abort("reader")


def when_it_has_failed(engine: Any, copies: list[SlowCopies]) -> None:
    """The worker has not told."""
    the_load(copies).fail()
    engine.abort("reader")


def when_its_failure_is_decided(engine: Any, copies: list[SlowCopies]) -> None:
    """The ledger knows; the next step is to tell vLLM."""
    the_load(copies).fail()
    while not engine.logged(e.LoadFailed):
        engine.begin_step()
        engine.update()
    engine.abort("reader")


def when_its_failure_is_on_its_way(engine: Any, copies: list[SlowCopies]) -> None:
    """A step has told, vLLM has not taken up its output."""
    the_load(copies).fail()
    while not engine.logged(e.LoadFailed):
        engine.begin_step()
        engine.update()
    engine.begin_step()
    engine.abort("reader")


def when_vllm_knows_of_its_failure(engine: Any, copies: list[SlowCopies]) -> None:
    """The end was told, the request waits for its second try."""
    the_load(copies).fail()
    while not engine.scheduler.finished_recving_kv_req_ids:
        engine.begin_step()
        engine.update()
    engine.abort("reader")


IN_TIME = [while_it_copies, when_it_is_copied, when_it_is_reported, when_vllm_knows]
IN_VAIN = [
    while_it_copies_in_vain,
    when_it_has_failed,
    when_its_failure_is_decided,
    when_its_failure_is_on_its_way,
    when_vllm_knows_of_its_failure,
]


@pytest.mark.parametrize(("async_scheduling", "model_runner_v2"), [(False, True), (True, False)])
@pytest.mark.parametrize("recovers", [False, True])
@pytest.mark.parametrize("abort", [*IN_TIME, *IN_VAIN])
def test_an_abort_around_the_end_of_a_load(
    make_engine: Any,
    abort: Callable[[Any, list[SlowCopies]], None],
    recovers: bool,
    async_scheduling: bool,
    model_runner_v2: bool,
) -> None:
    """VLLM keeps the blocks until it hears of an end and asserts on a second one: it hears of exactly one.

    Nothing is saved from blocks that were promised and not filled, whatever the request had computed in another life.
    """
    engine = overlapping(make_engine, async_scheduling=async_scheduling, model_runner_v2=model_runner_v2)
    reported = note_reports(engine)
    copies = start_recovery(engine) if recovers else start_load(engine)
    engine.drain()
    abort(engine, copies)
    engine.run(max_steps=50)
    check_reported_once(reported, failed=abort in IN_VAIN)
    (finished,) = engine.logged(e.RequestFinished, request_id="reader")
    assert finished.status == "FINISHED_ABORTED"
    assert len(engine.logged(e.RequestReleased, request_id="reader")) == 1
    engine.add("reader after it", [*engine.prompts["reader"], *engine.outputs["reader"]], 6)
    copies[0].slow.clear()
    engine.run()


def test_the_blocks_of_an_aborted_request_are_nobody_else_s_while_its_load_writes(make_engine: Any) -> None:
    """A newcomer that needs the whole pool waits for the copy, and is not overwritten by it."""
    engine = overlapping(make_engine, num_blocks=8)
    copies = start_load(engine)
    engine.abort("reader")
    engine.add("newcomer", range(900, 1000), 6)
    for _ in range(6):
        engine.step()
    assert engine.scheduler.requests["newcomer"].status is RequestStatus.WAITING
    the_load(copies).finish()
    engine.run()
    assert len(engine.outputs["newcomer"]) == 6


# --- resets ----------------------------------------------------------------------------------------


def test_a_reset_while_it_loads(make_engine: Any, runner: dict[str, bool]) -> None:
    """What is under way arrives and is told of; nobody is offered these chunks again."""
    engine = overlapping(make_engine, **runner)
    reported = note_reports(engine)
    copies = start_load(engine)
    assert engine.connector.reset_cache() is True
    the_load(copies).finish()
    engine.run()
    check_reported_once(reported, failed=False)
    engine.serve("later", PROMPT, 6)
    assert engine.check_answers("later")[0].num_hit_tokens == 0


def test_a_load_whose_slots_a_reset_freed_is_not_written_over(make_engine: Any) -> None:
    """The pool holds the prompt and nothing more; whoever saves during the load must not use the slots it reads."""
    engine = overlapping(make_engine, chunk_size=16, host_bytes=4 * 2 * 8 * 16 * 2)
    copies = start_load(engine)
    assert engine.connector.reset_cache() is True
    engine.add("other", range(500, 564), 4)
    for _ in range(3):
        engine.step()
    assert engine.logged(e.SaveIssued, request_id="other") == []
    the_load(copies).finish()
    engine.run()


# --- which loads -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("async_scheduling", "policy", "are_async"),
    [
        (False, "recompute", [False, True]),
        (False, "fail", [False, True]),
        (True, "fail", [True, True]),
        (True, "recompute", [True, True]),
    ],
)
def test_auto_makes_large_loads_asynchronous_and_all_where_only_that_is_safe(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, async_scheduling: bool, policy: str, are_async: list[bool]
) -> None:
    """Three blocks count as large here. With two steps in flight, vLLM delivers a token that was computed on top of a
    failed synchronous load before it recomputes; a child of MultiConnector is shown a policy that does not count.
    """
    monkeypatch.setattr(configuration, "LARGE_LOAD_BYTES", 3 * 2 * 8 * 16 * 2)
    engine = overlapping(
        make_engine,
        load_mode="auto",
        async_scheduling=async_scheduling,
        kv_transfer={"kv_load_failure_policy": policy},
    )
    for request_id, num_tokens in (("small", 33), ("large", 64)):
        engine.serve(request_id, PROMPT[:num_tokens], 4)
    assert [load.is_async for load in engine.logged(e.LoadIssued)] == are_async


@pytest.mark.parametrize("model_runner_v2", [False, True])
@pytest.mark.parametrize("num_local_tokens", [0, 16])
def test_a_request_that_waits_for_its_load_shares_blocks_whose_load_failed(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, num_local_tokens: int, model_runner_v2: bool
) -> None:
    """VLLM takes back what it counted on, without a word; the log is sound all the same, and so is the output."""
    monkeypatch.setattr(configuration, "LARGE_LOAD_BYTES", 3 * 2 * 8 * 16 * 2)
    engine = make_engine(num_blocks=60, chunk_size=16, load_mode="auto", model_runner_v2=model_runner_v2)
    engine.serve("writer", range(96), 4)
    assert engine.scheduler.reset_prefix_cache()
    if num_local_tokens:
        engine.serve("local", range(num_local_tokens + 1), 1)
    break_copies(engine, "load", 1)
    engine.add("small", [*range(num_local_tokens + 32), *range(700, 740)], 20)
    engine.serve("large", [*range(96), *range(800, 810)], 20)
    loads = [
        (load.request_id, load.first_token, load.is_async)
        for load in engine.logged(e.LoadIssued)
        if load.num_tokens > 16
    ]
    assert loads[:2] == [("small", num_local_tokens, False), ("large", num_local_tokens + 32, True)]
    assert [failed.request_id for failed in engine.logged(e.LoadFailed)] == ["small"]
    assert {len(output) for request_id, output in engine.outputs.items() if request_id != "local"} == {4, 20}
