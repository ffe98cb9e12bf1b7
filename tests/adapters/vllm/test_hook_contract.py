"""What vLLM may do with the hooks: both shapes of its output, aborts at every moment, resets, ids used again."""

from __future__ import annotations

from typing import Any

import pytest
from sim.modes import runners
from vllm.sampling_params import SamplingParams
from vllm.v1.request import RequestStatus

from kvledger.adapters.lab.simulation import expected
from kvledger.adapters.vllm import versions
from kvledger.lifecycle import RequestState
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


def small(make_engine: Any, **options: Any) -> Any:
    """Thirteen usable blocks of 16: three requests of 90 tokens do not fit."""
    return make_engine(**({"num_blocks": 14, "chunk_size": 8} | options))


def state_of(engine: Any, request_id: str) -> RequestState | None:
    """The ledger's word."""
    record = engine.projections.tracker.get(request_id)
    return None if record is None else record.state


def step_until(engine: Any, request_id: str, state: RequestState) -> None:
    """Step until the ledger says so."""
    for _ in range(500):
        if state_of(engine, request_id) is state:
            return
        engine.step()
    message = f"{request_id} was never {state}"
    raise AssertionError(message)


@runners
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("chunk_size", [8, 16, 32])
def test_a_crowd_that_does_not_fit_is_served_without_trouble(
    make_engine: Any, runner: dict[str, bool], enable_prefix_caching: bool, chunk_size: int
) -> None:
    """Several preemptions; every request says what it says alone, and nothing is left of any of them."""
    engine = small(make_engine, chunk_size=chunk_size, **runner, enable_prefix_caching=enable_prefix_caching)
    engine.add_crowd(5)
    engine.run()
    assert engine.num_preemptions >= 2
    assert len(engine.logged(e.RequestPreempted)) == engine.num_preemptions
    assert engine.logged(e.LoadIssued) or enable_prefix_caching
    assert all(len(output) == 50 for output in engine.outputs.values())
    for request_id in engine.outputs:
        engine.check_answers(request_id)


@runners
def test_both_shapes_of_a_resumption_replace_the_table(make_engine: Any, runner: dict[str, bool]) -> None:
    """V1 sends a resumed request among the cached ones, V2 among the new; the folded table is the scheduler's."""
    engine = small(make_engine, **runner)
    engine.add_crowd()
    num_compared = 0
    while engine.scheduler.has_requests():
        engine.step()
        for request in engine.scheduler.running:
            if request.num_preemptions:
                (table,) = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
                assert list(engine.projections.tracker.get(request.request_id).block_ids or ()) == table
                num_compared += 1
    assert num_compared > 10
    assert engine.logged(e.BlockTableObserved) == []


# --- answers that are not taken up -----------------------------------------------------------------


@runners
@pytest.mark.parametrize("why", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 1}])
def test_a_positive_answer_that_is_not_claimed(make_engine: Any, runner: dict[str, bool], why: dict[str, Any]) -> None:
    """A request that must not read caches is looked up all the same; vLLM allocates with 0 and nothing is loaded."""
    engine = make_engine(num_blocks=30, chunk_size=8, enable_prefix_caching=False, **runner)
    engine.serve("writer", range(64), 4)
    parameters = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0, **why)
    engine.add_with("shy", range(64), parameters)
    engine.run()
    (answer,) = engine.check_answers("shy")
    assert answer.num_external_tokens == 63
    (allocated,) = engine.logged(e.BlocksAllocated, request_id="shy")
    assert allocated.num_external_tokens == 0
    assert engine.logged(e.LoadIssued) == []
    assert engine.projections.pool.promised == {}


# --- aborts ----------------------------------------------------------------------------------------


@runners
@pytest.mark.parametrize(
    "state", [RequestState.NEW, RequestState.CHUNKED_PREFILL, RequestState.RUNNING, RequestState.PREEMPTED]
)
def test_an_abort_in_every_state(make_engine: Any, runner: dict[str, bool], state: RequestState) -> None:
    """The client goes away; the others finish, and nothing of the request is left."""
    engine = small(make_engine, **runner, max_num_batched_tokens=30 if state is RequestState.CHUNKED_PREFILL else 512)
    engine.add_crowd()
    step_until(engine, "request 2", state)
    engine.abort("request 2")
    assert state_of(engine, "request 2") in (None, RequestState.FINISHED)
    engine.run()
    (finished,) = engine.logged(e.RequestFinished, request_id="request 2")
    assert finished.status == "FINISHED_ABORTED"
    assert [len(engine.outputs[f"request {number}"]) for number in (0, 1)] == [50, 50]


@runners
def test_an_abort_after_many_polls(make_engine: Any, runner: dict[str, bool]) -> None:
    """What the polls promised is let go: no chunk stays bound to a request that is gone."""
    engine = small(make_engine, **runner, enable_prefix_caching=False)
    engine.add_crowd()
    step_until(engine, "request 2", RequestState.PREEMPTED)
    for _ in range(6):
        engine.step()
    assert state_of(engine, "request 2") is RequestState.PREEMPTED
    assert engine.check_answers("request 2")[-1].num_external_tokens > 0
    assert "request 2" in engine.projections.pool.promised
    engine.abort("request 2")
    assert engine.projections.pool.promised == {}
    engine.run()


@runners
def test_an_abort_right_after_allocation(make_engine: Any, runner: dict[str, bool]) -> None:
    """The load is on its way when the request goes; its report finds nobody and harms nobody."""
    engine = small(make_engine, **runner, enable_prefix_caching=False)
    engine.add_crowd()
    while not engine.logged(e.LoadIssued):
        if not engine.scheduler.has_requests():
            pytest.fail("no load was issued")
        output = engine.scheduler.schedule()
        engine.num_preemptions += len(output.preempted_req_ids or ())
        loads = engine.logged(e.LoadIssued)
        if loads:
            engine.abort(loads[0].request_id)
        engine._in_flight.append((output, engine._execute(output)))
        if len(engine._in_flight) >= engine._max_in_flight or not output.total_num_scheduled_tokens:
            engine.update()
    aborted = engine.logged(e.LoadIssued)[0].request_id
    engine.run()
    assert engine.logged(e.RequestFinished, request_id=aborted)[0].status == "FINISHED_ABORTED"
    assert engine.logged(e.LoadCompleted, request_id=aborted)
    del engine.outputs[aborted]


def test_an_abort_of_everything_at_once(make_engine: Any) -> None:
    """The engine drains although nobody is left to step for."""
    engine = small(make_engine)
    engine.add_crowd()
    step_until(engine, "request 2", RequestState.PREEMPTED)
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.run(max_steps=5)
    assert len(engine.logged(e.RequestReleased)) == 3


@pytest.mark.parametrize("model_runner_v2", [False, True])
def test_a_preempted_request_finishes(make_engine: Any, model_runner_v2: bool) -> None:
    """Two steps in flight: the output of the step before its preemption is its last one. It ends without blocks.

    As a consumer of KV, vLLM would not preempt a request whose step is in flight, so here it is a producer.
    """
    engine = small(
        make_engine,
        kv_transfer={"kv_role": "kv_producer"},
        num_blocks=8,
        async_scheduling=True,
        model_runner_v2=model_runner_v2,
        enable_prefix_caching=False,
        load_mode="sync",
    )
    engine.add("holder", range(43), 60)
    engine.serve("last", range(200, 244), 6)
    assert len(engine.logged(e.RequestPreempted, request_id="last")) == 1
    assert len(engine.logged(e.BlocksAllocated, request_id="last")) == 1, "it never had blocks again"
    (finished,) = engine.logged(e.RequestFinished, request_id="last")
    assert finished.status == "FINISHED_LENGTH_CAPPED"
    assert len(engine.outputs["last"]) == 6


# --- resets ----------------------------------------------------------------------------------------


@runners
@pytest.mark.parametrize("num_resets", [1, 3])
def test_a_reset_makes_everything_saved_stale(make_engine: Any, runner: dict[str, bool], num_resets: int) -> None:
    """As after new weights: preempted and resumed in one step, nothing saved before is ever loaded again."""
    engine = make_engine(
        num_blocks=30,
        chunk_size=8,
        **runner,
        enable_prefix_caching=False,
        load_mode="sync",  # vLLM refuses to reset running requests while one waits for its load
    )
    engine.add_crowd()
    for _ in range(20):
        engine.step()
    engine.drain()  # vLLM keeps the blocks of steps in flight, and refuses to reset while they are in use
    for _ in range(num_resets):
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert len(engine.projections.pool) == 0
    engine.run()
    assert len(engine.logged(e.CacheReset)) == num_resets
    assert len(engine.logged(e.RequestPreempted)) == 3
    for request_id in engine.outputs:
        assert engine.check_answers(request_id)[1].num_hit_tokens == 0
    assert engine.logged(e.LoadIssued) == []


def load_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the model computes other KV for the same tokens, and says something else."""
    monkeypatch.setattr(expected, "chained_hash", lambda previous, token: (previous * 31 + token + 1) % (1 << 40))


@runners
def test_kv_of_old_weights_never_comes_back(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, runner: dict[str, bool]
) -> None:
    """Everybody is preempted, the caches are reset, weights change: whoever asks for the prompts reads new KV.

    vLLM preempts first and resets then, but the connector hears of the reset first.
    """
    engine = make_engine(num_blocks=30, chunk_size=8, **runner, enable_prefix_caching=False)
    engine.add_crowd()
    for _ in range(20):
        engine.step()
    while engine._in_flight:
        engine.update()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    load_new_weights(monkeypatch)
    engine.run()
    for number in range(3):
        engine.serve(f"reader {number}", engine.prompts[f"request {number}"], 4)
    engine.outputs.clear()  # some was said with other weights than the rest


def test_what_ran_through_a_reset_is_not_saved(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running requests may go on with KV of old weights, but nobody else must get it from the cache."""
    engine = make_engine(num_blocks=30, chunk_size=8, enable_prefix_caching=False)
    engine.add_crowd()
    for _ in range(20):
        engine.step()
    assert engine.connector.reset_cache()
    load_new_weights(monkeypatch)
    engine.run()
    for number in range(3):
        engine.serve(f"reader {number}", engine.prompts[f"request {number}"], 4)
    engine.outputs.clear()  # some was said with other weights than the rest


@runners
def test_preempted_and_resumed_in_the_same_step(make_engine: Any, runner: dict[str, bool]) -> None:
    """Without a reset of the connector, everything settled comes back from the host at once, and again, and again."""
    engine = make_engine(
        num_blocks=30, chunk_size=8, **runner, enable_prefix_caching=False, max_deferred_lookups=0, load_mode="sync"
    )
    engine.add_crowd()
    for round_number in range(1, 4):
        for _ in range(9):
            engine.step()
        engine.drain()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        output = engine.step()
        assert output.preempted_req_ids == set(engine.outputs)
        assert set(output.num_scheduled_tokens) == set(engine.outputs)
        assert len(engine.logged(e.RequestPreempted)) == 3 * round_number
    engine.run()
    loads = engine.logged(e.LoadIssued)
    assert loads
    assert all(load.num_tokens % 8 == 0 and load.first_token == 0 for load in loads)


def test_whoever_a_reset_preempted_has_lost_its_blocks_before_they_are_given_away(make_engine: Any) -> None:
    """An urgent newcomer takes them first; the log must not show two requests that hold one block."""
    engine = make_engine(num_blocks=30, chunk_size=8, enable_prefix_caching=False, policy="priority")
    engine.add_crowd()
    for _ in range(20):
        engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.serve("newcomer", range(900, 960), 4, priority=-1)
    events = [event for _, event in engine.events()]
    places = [place for place, event in enumerate(events) if isinstance(event, e.RequestPreempted)]
    given = next(
        place
        for place, event in enumerate(events)
        if isinstance(event, e.BlocksAllocated) and event.request_id == "newcomer"
    )
    assert len(places) == 3
    assert max(places) < given


def test_a_save_in_flight_at_a_reset_is_not_offered(make_engine: Any) -> None:
    """Its pages were computed with the old weights; its report frees the slots and commits nothing."""
    engine = make_engine(num_blocks=30, chunk_size=8, enable_prefix_caching=False, async_scheduling=True)
    engine.add("writer", range(64), 40)
    while not engine.projections.jobs:
        engine.step()
    assert len(engine.projections.jobs) > 0
    assert engine.connector.reset_cache() is True
    engine.update()
    assert len(engine.projections.pool) == 0
    engine.run()


# --- identity --------------------------------------------------------------------------------------


@runners
def test_an_id_used_again_right_after_its_end(make_engine: Any, runner: dict[str, bool]) -> None:
    """Same id, other prompt, before the engine has stepped once: another life, with keys of its own."""
    engine = small(make_engine, **runner, load_mode="sync")
    for life in range(4):
        engine.add("again", range(100 * life, 100 * life + 40), 12)
        while "again" in engine.scheduler.requests:
            engine.step()
        assert len(engine.outputs["again"]) == 12
        engine.check_outputs()
    engine.add("again", range(40), 12)
    for _ in range(3):
        engine.step()
    engine.abort("again")
    # vLLM itself would hand the new life the tokens of a step still in flight; it makes ids unique for that reason.
    engine.update()
    engine.serve("again", range(700, 740), 12)
    arrivals = engine.logged(e.RequestArrived)
    assert [arrival.ordinal for arrival in arrivals] == list(range(6))
    assert len(engine.logged(e.RequestReleased)) == 6


@pytest.mark.parametrize("chunk_size", [8, 16, 32])
def test_two_tenants_never_share_a_chunk(make_engine: Any, chunk_size: int) -> None:
    """The same prompt under another salt is another prompt; under the same salt it hits."""
    engine = make_engine(num_blocks=40, chunk_size=chunk_size, enable_prefix_caching=False)
    for request_id, cache_salt in (("one", "tenant one"), ("two", "tenant two"), ("none", None)):
        engine.serve(request_id, range(64), 4, cache_salt=cache_salt)
        assert engine.check_answers(request_id)[0].num_hit_tokens == 0, request_id
    keys = [
        set(engine.logged(e.ChunkKeysObserved, request_id=request_id)[0].keys) for request_id in ("one", "two", "none")
    ]
    assert len(keys[0] | keys[1] | keys[2]) == sum(map(len, keys))
    engine.serve("one again", range(64), 4, cache_salt="tenant one")
    assert engine.check_answers("one again")[0].num_hit_tokens == 64


# --- the end ---------------------------------------------------------------------------------------


@runners
def test_the_engine_drains_and_then_stands_still(make_engine: Any, runner: dict[str, bool]) -> None:
    """A copy that the last request leaves behind is made and settled in a few steps; then nothing is asked."""
    engine = small(make_engine, **runner)
    engine.add("only", range(40), 24)
    while engine.scheduler.get_num_unfinished_requests():
        engine.step()
    engine.run(max_steps=5)
    assert not engine.connector.has_pending_push_work()
    num_committed = len(engine.projections.pool)
    assert num_committed == 63 // 8


def test_a_copy_that_waits_for_a_step_keeps_the_engine_stepping(make_engine: Any) -> None:
    """The tail is saved when the request ends; without one more step it would never be copied."""
    engine = small(make_engine, chunk_size=16)
    request = engine.add("only", range(40), 24)
    while request.num_tokens < 49:
        engine.step()
    engine.abort("only")
    assert engine.logged(e.SaveIssued)[-1].before_forward
    assert engine.connector.has_pending_push_work()
    engine.run(max_steps=3)
    assert not engine.connector.has_pending_push_work()
    assert engine.logged(e.SaveCompleted)[-1].job_id == engine.logged(e.SaveIssued)[-1].job_id


def test_nobody_has_to_wait_for_a_delivery(make_engine: Any) -> None:
    """A cache may drop what it likes: stale output is delivered, blocks are freed at once."""
    engine = small(make_engine)
    assert engine.connector.requires_kv_delivery is False
    request = engine.add("only", range(40), 4)
    engine.step()
    assert engine.connector.request_finished(request, [1, 2, 3]) == (False, None)


def test_the_worker_s_connector_has_no_ledger(make_engine: Any) -> None:
    """Asking it for one is a mistake that is named."""
    engine = small(make_engine)
    with pytest.raises(RuntimeError, match="built for a worker"):
        _ = engine.worker.scheduler_side


def test_a_second_shutdown_does_nothing(make_engine: Any) -> None:
    """Both sides."""
    engine = small(make_engine)
    engine.serve("only", range(40), 4)
    for _ in range(2):
        engine.connector.shutdown()
        engine.worker.shutdown()


def test_nothing_is_saved_from_blocks_that_vllm_may_zero_first(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches of mixed precision: model runner V2 zeroes new blocks before a copy out of them could run."""
    monkeypatch.setattr(versions, "zeroes_new_blocks", lambda _kv_cache_config: True)
    engine = make_engine(num_blocks=30, chunk_size=8, enable_prefix_caching=False)
    engine.add_crowd()
    for _ in range(9):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    lost = engine.logged(e.RequestPreempted, e.RequestFinished)
    assert all(event.blocks_zeroed and event.num_settled_tokens > 0 for event in lost), "it says what was seen"
    assert engine.logged(e.TailSaveIssued) == []
    saves = engine.logged(e.SaveIssued)
    assert saves, "what settles while a request runs is saved as ever"
    assert not any(save.before_forward for save in saves)
