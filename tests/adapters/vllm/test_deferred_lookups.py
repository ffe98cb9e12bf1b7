"""A preempted request whose own save is under way is worth waiting for: vLLM is told to ask again, for a while.

What a request has computed is being copied out when it is looked up for the first time after its preemption. An answer
then would let it compute again what arrives a step later.
"""

from __future__ import annotations

from typing import Any

import pytest
from sim.slow_copies import slow_down

from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

modes = pytest.mark.parametrize("mode", ["sync", "async"])


def crowded(make_engine: Any, **options: Any) -> Any:
    """Three requests, of which one is preempted and could come back at once: the others are short of nothing."""
    defaults = {"num_blocks": 30, "chunk_size": 8, "enable_prefix_caching": False}
    engine = make_engine(**(defaults | options))
    engine.add_crowd()
    return engine


def preempt_all(engine: Any) -> None:
    """Everybody loses its blocks, and there is room for everybody."""
    for _ in range(12):
        engine.step()
    engine.drain()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)


def hold_reports(engine: Any) -> list[bool]:
    """The worker's reports are kept back as long as the returned list is not empty."""
    side = engine.worker._worker_side
    take = side.take_reports
    held = [True]
    side.take_reports = lambda: None if held else take()
    return held


def polls_of(engine: Any, request_id: str) -> list[Any]:
    """How the lookups since its preemption were answered."""
    life = engine.logged(e.RequestPreempted, e.LookupDeferred, e.LookupAnswered, request_id=request_id)
    preemptions = [index for index, event in enumerate(life) if isinstance(event, e.RequestPreempted)]
    return life[preemptions[-1] + 1 :]


@modes
def test_it_waits_for_its_own_save_and_recovers_all_of_it(make_engine: Any, mode: str, runner: dict[str, bool]) -> None:
    """A step or two later everything that was settled is there, the part-filled chunk included."""
    engine = crowded(make_engine, load_mode=mode, save_mode=mode, **runner)
    preempt_all(engine)
    engine.run()
    for request_id in engine.outputs:
        *deferred, answer = polls_of(engine, request_id)
        assert 1 <= len(deferred) <= 4
        assert all(isinstance(event, e.LookupDeferred) for event in deferred)
        (preempted,) = engine.logged(e.RequestPreempted, request_id=request_id)
        assert answer.num_external_tokens == preempted.num_settled_tokens > 40
    assert engine.figures.num_tokens_recomputed == 0


@modes
@pytest.mark.parametrize("max_deferred_lookups", [0, 1, 8])
def test_it_waits_a_bounded_number_of_times(make_engine: Any, mode: str, max_deferred_lookups: int) -> None:
    """The reports do not come: it takes up what is there, and each time it waited the log names a job under way."""
    engine = crowded(make_engine, load_mode=mode, save_mode=mode, max_deferred_lookups=max_deferred_lookups)
    held = hold_reports(engine)
    preempt_all(engine)
    for _ in range(max_deferred_lookups + 3):
        engine.step()
    for request_id in engine.outputs:
        polls = polls_of(engine, request_id)
        assert [type(poll) for poll in polls] == [*[e.LookupDeferred] * max_deferred_lookups, e.LookupAnswered]
        assert polls[-1].num_external_tokens == 0
        assert [poll.num_deferred for poll in polls[:-1]] == list(range(1, max_deferred_lookups + 1))
        saves = engine.logged(e.SaveIssued, e.TailSaveIssued, request_id=request_id)
        assert {poll.job_id for poll in polls[:-1]} <= {save.job_id for save in saves}
    assert engine.logged(e.SaveCompleted, e.SaveFailed) == []
    held.clear()
    engine.run()


@modes
def test_a_save_that_fails_is_not_waited_for(make_engine: Any, mode: str) -> None:
    """The next answer says that there is nothing."""
    engine = crowded(make_engine, load_mode=mode, save_mode=mode)
    side = engine.worker._worker_side
    side._engine.start_save = lambda *_arguments: 1 / 0
    side._async_engine = side._async_engine and slow_down(engine, "load")[0]
    if side._async_engine:
        side._async_engine.start_save = lambda *_arguments: 1 / 0
    preempt_all(engine)
    engine.run()
    for request_id in engine.outputs:
        *deferred, answer = polls_of(engine, request_id)
        assert len(deferred) <= 2
        assert answer.num_external_tokens == 0
    assert engine.logged(e.LoadIssued) == []


def test_a_new_request_does_not_wait_for_what_others_save(make_engine: Any) -> None:
    """Its own work is not at stake, and the save of a stranger may take long: it is answered at once."""
    engine = make_engine(num_blocks=40, chunk_size=8, enable_prefix_caching=False, save_mode="async")
    (copies,) = slow_down(engine, "save")
    engine.add("writer", range(64), 30)
    for _ in range(4):
        engine.step()
    assert copies.pending()
    engine.add("reader", range(64), 6)
    engine.step()
    assert engine.logged(e.LookupDeferred) == []
    (answer,) = engine.check_answers("reader")
    assert (answer.num_external_tokens, answer.miss_reason) == (0, "saving")
    copies.slow.clear()
    for copy in copies.pending():
        copy.finish()
    engine.run()


def test_others_are_served_while_one_waits(make_engine: Any) -> None:
    """Telling vLLM to ask again skips one request, not the queue behind it."""
    engine = crowded(make_engine)
    hold_reports(engine).append(True)
    preempt_all(engine)
    engine.add("newcomer", range(900, 930), 4)
    output = engine.step()
    assert set(output.num_scheduled_tokens) == {"newcomer"}
    engine.run()
    assert {violation.rule for violation in engine.logged(e.InvariantViolated)} == {"LIVENESS"}
