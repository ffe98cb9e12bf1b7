"""What a step writes: nothing about requests that go on decoding, whatever their number."""

from __future__ import annotations

from typing import Any

import pytest

from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events

pytestmark = pytest.mark.scheduler


def decoding(make_engine: Any, num_requests: int, **options: Any) -> Any:
    """Requests of 20 tokens each, all of them decoding, no two with the same prompt."""
    engine = make_engine(
        **(
            {
                "num_blocks": 8 * num_requests + 1,
                "max_num_seqs": num_requests,
                "max_num_batched_tokens": 20 * num_requests,
                "chunk_size": 256,
            }
            | options
        )
    )
    for number in range(num_requests):
        engine.add(f"request-{number:032d}", [number, *range(19)], 40)
    for _ in range(4):
        engine.step()
    assert len(engine.scheduler.running) == num_requests
    return engine


def is_empty(step: e.StepScheduled) -> bool:
    """Whether it says nothing about any request."""
    return not (step.advanced or step.paused or step.extended or step.settled)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("model_runner_v2", [False, True])
def test_a_steady_step_is_empty(make_engine: Any, async_scheduling: bool, model_runner_v2: bool) -> None:
    """From the second decoding step on, except where a block is appended."""
    engine = decoding(make_engine, 3, async_scheduling=async_scheduling, model_runner_v2=model_runner_v2)
    num_before = len(engine.logged(e.StepScheduled))
    for _ in range(20):
        engine.step()
    steps = engine.logged(e.StepScheduled)[num_before:]
    assert len(steps) == 20
    assert all(not step.advanced and not step.paused for step in steps)
    assert sum(is_empty(step) for step in steps) == 19, "all but the one in which everybody got a block"
    assert {step.num_scheduled_tokens for step in steps} == {3}
    engine.run()


def test_a_steady_step_of_256_requests_is_less_than_64_bytes(make_engine: Any) -> None:
    """The frame's payload, as it is written."""
    engine = decoding(make_engine, 256)
    store = engine.connector.scheduler_side.log.store
    before = store.next_sequence
    for _ in range(4):
        engine.step()
    frames = [frame for frame in store.read(before) if frame.num_events == 1]
    assert len(frames) >= 3
    steps = engine.logged(e.StepScheduled)[-4:]
    assert {step.num_scheduled_tokens for step in steps} == {256}
    assert any(is_empty(step) for step in steps)
    for step in steps:
        if is_empty(step):
            assert len(encode_events([step])) < 64
    assert min(len(frame.payload) for frame in frames) < 64
    for number in range(256):
        engine.abort(f"request-{number:032d}")
    engine.run()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_folded_count_is_the_scheduler_s(make_engine: Any, async_scheduling: bool) -> None:
    """Although no step says so: joining, leaving, aborting and finishing in between."""
    engine = decoding(make_engine, 3, async_scheduling=async_scheduling, num_blocks=60, max_num_seqs=6)
    tracker = engine.projections.tracker
    num_compared = 0
    for number in range(60):
        if number in (5, 6, 20):
            engine.add(f"late {number}", range(100, 100 + 7 * number), 15)
        if number == 12:
            engine.abort("request-" + "1".zfill(32))
        if not engine.scheduler.has_requests():
            break
        engine.step()
        for request in engine.scheduler.running:
            record = tracker.get(request.request_id)
            assert record is not None
            assert tracker.num_computed_tokens(record) == request.num_computed_tokens
            num_compared += 1
    assert num_compared > 100
    engine.run()


def test_a_request_that_joins_is_written_and_the_others_are_not(make_engine: Any) -> None:
    """One tuple for the newcomer; the steady ones stay steady."""
    engine = decoding(make_engine, 3, num_blocks=60, max_num_seqs=6)
    engine.add("newcomer", range(500, 540), 10)
    engine.step()
    step = engine.logged(e.StepScheduled)[-1]
    assert step.advanced == ((3, 0, 40, 40),)
    assert step.paused == ()
    engine.run()


def test_a_steady_request_that_is_not_scheduled_is_paused(make_engine: Any) -> None:
    """The step's budget is spent on others: it must not be counted on."""
    engine = decoding(make_engine, 3, num_blocks=60)
    engine.scheduler.max_num_scheduled_tokens = 2
    engine.step()
    step = engine.logged(e.StepScheduled)[-1]
    assert step.num_scheduled_tokens == 2
    assert len(step.paused) == 1
    engine.scheduler.max_num_scheduled_tokens = 60
    engine.run()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 16, 64])
def test_every_settled_chunk_is_noticed_in_its_time(make_engine: Any, chunk_size: int, async_scheduling: bool) -> None:
    """A steady request is looked at only when its next chunk must have filled: in the first step after it has."""
    engine = make_engine(num_blocks=30, chunk_size=chunk_size, async_scheduling=async_scheduling)
    request = engine.add("request", range(20), 130)
    num_settled_tokens = 0
    while request.num_output_tokens < 125:
        num_settled_tokens = request.num_computed_tokens - request.num_in_flight_tokens
        engine.step()
        num_saved = sum(len(save.chunks) for save in engine.logged(e.SaveIssued))
        assert num_saved == num_settled_tokens // chunk_size
    assert num_settled_tokens > 140
    engine.run()
    saved = [chunk for save in engine.logged(e.SaveIssued) for chunk in save.chunks]
    assert saved == list(range(149 // chunk_size))


def test_a_chunk_that_ends_with_a_part_of_a_prompt_is_noticed_in_the_next_step(make_engine: Any) -> None:
    """All that is computed by then has settled, to the last token."""
    engine = make_engine(num_blocks=30, chunk_size=16, max_num_batched_tokens=16, max_num_seqs=1)
    engine.add("request", range(64), 2)
    for num_chunks in range(4):
        engine.step()
        saved = [chunk for save in engine.logged(e.SaveIssued) for chunk in save.chunks]
        assert saved == list(range(num_chunks))
    engine.run()


@pytest.mark.parametrize("model_runner_v2", [False, True])
def test_a_new_request_that_is_skipped_in_the_next_step_is_paused(make_engine: Any, model_runner_v2: bool) -> None:
    """A prompt of one token is steady at once; with two steps in flight its last token leaves nothing to schedule.

    The step in which nothing is scheduled looks like the one before, in which nothing was scheduled *again*.
    """
    engine = make_engine(num_blocks=20, async_scheduling=True, model_runner_v2=model_runner_v2)
    engine.add("one", [7], 1)
    engine.step()
    engine.scheduler.schedule()
    first, second = engine.logged(e.StepScheduled)
    assert first.advanced == ((0, 0, 1, 1),)
    assert second.num_scheduled_tokens == 0
    assert second.paused == (0,)
    tracker = engine.projections.tracker
    assert tracker.num_computed_tokens(tracker.get("one")) == 1
    engine.run()
