"""The smallest, the largest and the unforeseen: prompts of one token, prompts that never fit, ends nobody planned.

Aborts in the other states, ids used again and resets of everything stand in `test_hook_contract.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import RequestStatus

from kvledger.adapters.lab.simulation import engine as sim_engine
from kvledger.lifecycle import RequestState
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


def saved_chunks(engine: Any, request_id: str) -> list[int]:
    """Every chunk that was saved for a request."""
    return [chunk for save in engine.logged(e.SaveIssued, request_id=request_id) for chunk in save.chunks]


@pytest.mark.parametrize("chunk_size", [1, 2, 16])
@pytest.mark.parametrize("max_tokens", [1, 2, 33])
def test_a_prompt_of_one_token(make_engine: Any, runner: dict[str, bool], chunk_size: int, max_tokens: int) -> None:
    """It is all last token, so nothing can be loaded for it; what it says is saved like anything else."""
    engine = make_engine(num_blocks=20, chunk_size=chunk_size, enable_prefix_caching=False, **runner)
    for request_id in ("first", "second"):
        engine.serve(request_id, [5], max_tokens)
        assert [answer.num_external_tokens for answer in engine.check_answers(request_id)] == [0]
    assert saved_chunks(engine, "first") == list(range(max_tokens // chunk_size))
    assert engine.logged(e.LoadIssued) == []
    assert {len(output) for output in engine.outputs.values()} == {max_tokens}


@pytest.mark.parametrize("num_tokens", [2, 15, 16, 17])
def test_one_token_of_output(make_engine: Any, runner: dict[str, bool], num_tokens: int) -> None:
    """The prompt is all there is to save, down to its last token."""
    engine = make_engine(num_blocks=20, chunk_size=8, enable_prefix_caching=False, **runner)
    engine.serve("only", range(num_tokens), 1)
    assert saved_chunks(engine, "only") == list(range(num_tokens // 8))
    engine.serve("longer", [*range(num_tokens), 300, 301], 1)
    assert engine.check_answers("longer")[0].num_external_tokens == num_tokens // 8 * 8


def test_a_prompt_longer_than_all_blocks_waits_until_it_is_aborted(make_engine: Any, runner: dict[str, bool]) -> None:
    """VLLM refuses to start with a pool too small for `max_model_len`; without that check the request would wait.

    It is polled in every step, which changes nothing, and holds nothing when it goes.
    """
    engine = make_engine(num_blocks=10, chunk_size=16, enable_prefix_caching=False, **runner)
    engine.serve("writer", range(64), 2)
    engine.add("too long", range(300), 5)
    for _ in range(20):
        engine.step()
    answers = engine.check_answers("too long")
    assert len(answers) == 20
    assert {answer.num_external_tokens for answer in answers} == {64}
    assert engine.logged(e.BlocksAllocated, request_id="too long") == []
    engine.add("behind it", range(700, 740), 5)
    engine.step()
    engine.abort("too long")
    engine.run(max_steps=30)
    assert engine.projections.pool.promised == {}
    assert len(engine.outputs["behind it"]) == 5
    assert engine.logged(e.LoadIssued) == []


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_an_error_in_the_middle_of_a_chunked_prefill(make_engine: Any, runner: dict[str, bool], num_steps: int) -> None:
    """What was computed by then is saved and right; nothing behind it."""
    engine = make_engine(num_blocks=20, chunk_size=8, max_num_batched_tokens=30, enable_prefix_caching=False, **runner)
    engine.add("failing", range(150), 5)
    for _ in range(num_steps):
        engine.step()
    assert engine.projections.tracker.get("failing").state is RequestState.CHUNKED_PREFILL
    engine.scheduler.finish_requests("failing", RequestStatus.FINISHED_ERROR)
    engine.run(max_steps=10)
    (finished,) = engine.logged(e.RequestFinished)
    assert (finished.status, finished.num_settled_tokens) == ("FINISHED_ERROR", 30 * num_steps)
    assert saved_chunks(engine, "failing") == list(range(30 * num_steps // 8))
    engine.serve("again", range(150), 5)
    assert engine.check_answers("again")[0].num_hit_tokens == 30 * num_steps // 8 * 8


@pytest.mark.parametrize("num_output_tokens", [1, 7, 8, 9, 24])
def test_an_end_that_the_scheduler_could_not_foresee(
    make_engine: Any, runner: dict[str, bool], num_output_tokens: int
) -> None:
    """A stop token: with two steps in flight one more token is computed behind it, and its KV belongs to nobody."""
    probe = make_engine(num_blocks=20)
    probe.add("probe", range(40), num_output_tokens)
    probe.run()
    stop = probe.outputs["probe"][-1]
    expected = probe.outputs["probe"][: probe.outputs["probe"].index(stop) + 1]
    engine = make_engine(num_blocks=20, chunk_size=8, enable_prefix_caching=False, **runner)
    engine.add_with("only", range(40), SamplingParams(max_tokens=60, temperature=0, stop_token_ids=[stop]))
    engine.run()
    assert engine.outputs["only"] == expected
    assert saved_chunks(engine, "only") == list(range((40 + len(expected) - 1) // 8))
    engine.serve("reader", [*range(40), *expected, 3, 4], 3)


def test_a_reset_that_vllm_refuses_changes_nothing(make_engine: Any, runner: dict[str, bool]) -> None:
    """Blocks are in use, so the prefix cache is not reset; the host pool is only when the connector is asked."""
    engine = make_engine(num_blocks=20, chunk_size=8, **runner)
    engine.add("only", range(64), 20)
    for _ in range(5):
        engine.step()
    num_chunks = len(engine.projections.pool)
    assert not engine.scheduler.reset_prefix_cache()
    assert engine.logged(e.CacheReset, e.RequestPreempted) == []
    assert len(engine.projections.pool) == num_chunks
    engine.run()


def test_resets_of_an_idle_engine_back_to_back(make_engine: Any, runner: dict[str, bool]) -> None:
    """Any number of them is one; what comes after is saved and found again."""
    engine = make_engine(num_blocks=20, chunk_size=8, **runner)
    for round_number in range(3):
        engine.serve(f"writer {round_number}", range(64), 2)
        engine.serve(f"reader {round_number}", range(70), 2)
        assert [answer.num_hit_tokens for answer in engine.check_answers(f"reader {round_number}")] == [64]
        for _ in range(3):
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        assert len(engine.projections.pool) == 0
        slots = engine.projections.slots
        assert slots.num_free == slots.num_slots
    assert [engine.check_answers(f"writer {number}")[0].num_hit_tokens for number in range(3)] == [0, 0, 0]


def test_a_recovering_request_is_aborted(make_engine: Any, runner: dict[str, bool]) -> None:
    """Its load is in flight and part of it will be computed: neither is saved, everything is given back."""
    engine = make_engine(num_blocks=14, chunk_size=8, enable_prefix_caching=False, **runner)
    engine.add_crowd()
    aborted = ""
    while engine.scheduler.has_requests():
        output = engine.scheduler.schedule()
        recovering = [r.request_id for r in engine.projections.tracker if r.state is RequestState.RECOVERING]
        if recovering and not aborted:
            (aborted,) = recovering
            engine.abort(aborted)
        engine._in_flight.append((output, engine._execute(output)))
        if len(engine._in_flight) >= engine._max_in_flight or not output.total_num_scheduled_tokens:
            engine.update()
    engine.run()
    assert aborted
    position = next(index for index, (_, event) in enumerate(engine.events()) if isinstance(event, e.RequestFinished))
    later = [event for _, event in engine.events()[position:] if getattr(event, "request_id", "") == aborted]
    assert [type(event) for event in later if isinstance(event, e.SaveIssued | e.TailSaveIssued)] == []
    del engine.outputs[aborted]


# --- priorities ------------------------------------------------------------------------------------


@pytest.fixture
def make_prioritising(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Build engines whose scheduler preempts the least urgent request instead of the newest."""
    configure = sim_engine.vllm_config

    def by_priority(**options: Any) -> Any:
        configuration = configure(**options)
        configuration.scheduler_config.policy = "priority"
        return configuration

    def make(**options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(sim_engine, "vllm_config", by_priority)
            return make_engine(**options)

    return make


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_an_urgent_request_takes_the_blocks_of_the_least_urgent(
    make_prioritising: Callable[..., Any], runner: dict[str, bool], enable_prefix_caching: bool
) -> None:
    """The oldest request is the victim here, again and again; it loses nothing and is asked nothing twice."""
    engine = make_prioritising(num_blocks=14, chunk_size=8, enable_prefix_caching=enable_prefix_caching, **runner)
    engine.add("patient", range(40), 60, priority=9)
    for _ in range(10):
        engine.step()
    for number in range(4):
        engine.add(f"urgent {number}", range(100 * number + 100, 100 * number + 140), 50, priority=number)
        for _ in range(4):
            engine.step()
    engine.run()
    preempted = [event.request_id for event in engine.logged(e.RequestPreempted)]
    assert "patient" in preempted
    assert engine.figures.num_tokens_recomputed == 0
    assert engine.figures.num_tokens_recovered + engine.figures.num_tokens_retained > 0
    assert sorted(len(output) for output in engine.outputs.values()) == [50, 50, 50, 50, 60]


def test_a_request_that_is_preempted_after_it_was_scheduled_in_the_same_step(
    make_prioritising: Callable[..., Any], runner: dict[str, bool]
) -> None:
    """With priorities the victim may already have its tokens of this step; they are taken back before it is sent."""
    engine = make_prioritising(num_blocks=14, chunk_size=8, enable_prefix_caching=False, **runner)
    for number in range(5):
        engine.add(f"request {number}", range(100 * number, 100 * number + 36 + number), 50, priority=5 - number)
        engine.step()
    num_taken_back = 0
    while engine.scheduler.has_requests():
        before = [request.request_id for request in engine.scheduler.running]
        output = engine.step()
        victims = output.preempted_req_ids or set()
        assert victims.isdisjoint(output.num_scheduled_tokens)
        num_taken_back += any(before.index(victim) < len(before) - 1 for victim in victims if victim in before)
    assert num_taken_back
    assert {len(output) for output in engine.outputs.values()} == {50}
