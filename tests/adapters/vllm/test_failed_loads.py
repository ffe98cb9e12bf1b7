"""A load within a step fails: nothing is left that anybody can hit, in vLLM's prefix cache or in our pool.

The KV of the hashed model tells whose it is: who would read a block that nobody filled raises `CorruptKV`, also when it
was saved and loaded again. vLLM 0.32 hashes the blocks of such a load before it has run.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from sim.broken_copies import break_copies
from sim.slow_copies import slow_down

from kvledger.adapters.lab.simulation.hashed_model import CorruptKV
from kvledger.adapters.vllm.async_copies import AsyncCopies
from kvledger.adapters.vllm.prefix_cache import PrefixCache
from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.jobs import Jobs

pytestmark = pytest.mark.scheduler

PREFIX = list(range(64))
policies = pytest.mark.parametrize("policy", ["fail", "recompute"])
runners = pytest.mark.parametrize("model_runner_v2", [False, True])
resets = pytest.mark.parametrize("resets_connector", [False, True])
modes = pytest.mark.parametrize("load_mode", ["sync", "async"])


def prompt(number: int, num_tokens: int = 40) -> list[int]:
    """The common beginning, and an end of its own."""
    return [*PREFIX, *range(1000 * number, 1000 * number + num_tokens)]


def saved_prefix(make_engine: Any, policy: str, **options: Any) -> Any:
    """An engine whose host pool has the common beginning, and whose next load fails."""
    engine = make_engine(
        **{"num_blocks": 60, "chunk_size": 16, **options}, kv_transfer={"kv_load_failure_policy": policy}
    )
    engine.serve("writer", PREFIX, 2)
    assert engine.scheduler.reset_prefix_cache()
    break_copies(engine, "load", 1)
    return engine


def step_with(engine: Any, *aborted: str) -> None:
    """One step, and aborts while it is computed, which vLLM processes before its output (`v1/engine/core.py`)."""
    engine.begin_step()
    for request_id in aborted:
        engine.abort(request_id)
    engine.update()


def check_everybody(engine: Any, prompts: dict[str, list[int]]) -> None:
    """Whoever asks for these prompts gets right answers: from vLLM's cache, and then from ours alone."""
    for round_number in range(2):
        for name, tokens in prompts.items():
            engine.serve(f"{name} again {round_number}", tokens, 3, max_steps=300)
            assert engine.finish_reasons[f"{name} again {round_number}"] == "length"
        assert engine.scheduler.reset_prefix_cache()
    for request_id in [name for name, reason in engine.finish_reasons.items() if reason != "length"]:
        engine.outputs.pop(request_id)
    engine.check_outputs()
    engine.check_released()


@policies
@runners
@modes
@pytest.mark.parametrize("sharer_is_aborted", [False, True])
def test_the_owner_is_aborted_in_the_failing_step(
    make_engine: Any, policy: str, model_runner_v2: bool, load_mode: str, sharer_is_aborted: bool
) -> None:
    """It does not run any more when vLLM looks for whom the failure concerns; what a sharer computed is as wrong."""
    engine = saved_prefix(make_engine, policy, model_runner_v2=model_runner_v2, load_mode=load_mode)
    engine.add("owner", prompt(1), 20)
    engine.add("sharer", prompt(2), 20)
    step_with(engine, "owner", *(["sharer"] if sharer_is_aborted else []))
    engine.outputs["owner"].clear()
    engine.add("late", prompt(1), 20)
    engine.serve("late sharer", prompt(2), 20, max_steps=300)
    assert engine.logged(e.LoadFailed)
    check_everybody(engine, {"first": prompt(1), "second": prompt(2)})


@policies
@runners
@modes
@pytest.mark.parametrize("num_tokens_a_step", [16, 24, 512])
def test_it_is_computed_again_in_pieces_while_others_come(
    make_engine: Any, policy: str, model_runner_v2: bool, load_mode: str, num_tokens_a_step: int
) -> None:
    """vllm#49250: a sharer that came with the owner, or while it computes, went on with what was not there yet."""
    engine = saved_prefix(make_engine, policy, model_runner_v2=model_runner_v2, load_mode=load_mode)
    engine.add("owner", prompt(1), 20)
    engine.add("sharer", prompt(2), 20)
    step_with(engine)
    engine.scheduler.scheduler_config.long_prefill_token_threshold = num_tokens_a_step
    for number in range(3, 6):
        engine.add(f"late {number}", prompt(number), 20)
        engine.add(f"late as {number}", prompt(1), 20)
        step_with(engine)
    engine.run(max_steps=300)
    ended = {"owner", "sharer"} if load_mode == "sync" else {"owner"}
    reason = "error" if policy == "fail" else "length"
    assert {engine.finish_reasons[request_id] for request_id in ended} == {reason}
    assert {engine.finish_reasons[f"late {number}"] for number in range(3, 6)} == {"length"}
    check_everybody(engine, {str(number): prompt(number) for number in range(1, 6)})


@runners
def test_a_sharer_that_is_scheduled_before_the_failure_is_known_ends_with_the_owner(
    make_engine: Any, model_runner_v2: bool
) -> None:
    """Two steps in flight, a load within the first, policy "fail": the second one's sharer hits what was not filled."""
    engine = saved_prefix(make_engine, "fail", model_runner_v2=model_runner_v2, load_mode="sync", async_scheduling=True)
    engine.add("owner", prompt(1), 20)
    engine.step()
    assert engine.is_computing
    engine.add("late sharer", prompt(2), 20)
    engine.add("somebody else", prompt(3)[64:], 20)
    engine.step()
    assert engine.logged(e.LoadFailed)
    hits = {asked.request_id: asked.num_computed_tokens for asked in engine.logged(e.LookupRequested)}
    assert hits["late sharer"] == len(PREFIX)
    engine.run(max_steps=300)
    assert [event.is_async for event in engine.logged(e.LoadIssued)] == [False]
    assert {name: engine.finish_reasons[name] for name in ("owner", "late sharer", "somebody else")} == {
        "owner": "error",
        "late sharer": "error",
        "somebody else": "length",
    }
    check_everybody(engine, {"first": prompt(1), "second": prompt(2)})


@policies
@runners
@resets
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_owner_is_preempted_by_a_reset_that_fails(
    make_engine: Any, policy: str, model_runner_v2: bool, resets_connector: bool, async_scheduling: bool
) -> None:
    """VLLM takes the blocks of all that run, finds others that are kept, and leaves its prefix cache as it is.

    With two steps in flight that comes before the failure is known, and nobody runs whom vLLM could find then. With one
    the failure is known: under the policy "fail" the owner has ended, and somebody else is preempted in its place.
    Two steps and "recompute" are what is warned of at start: vLLM itself delivers what the second step made of unfilled
    blocks, and those two answers alone are excused.
    """
    engine = saved_prefix(
        make_engine,
        policy,
        model_runner_v2=model_runner_v2,
        load_mode="sync",
        save_mode="async",
        async_scheduling=async_scheduling,
    )
    copies = slow_down(engine, "save")
    engine.add("kept", range(5000, 5040), 1)
    while "kept" not in engine.finish_reasons:
        engine.step()
    engine.drain()
    engine.add("owner", prompt(1), 20)
    engine.add("somebody else", prompt(3)[64:], 20)
    engine.step()
    assert engine.is_computing == async_scheduling
    assert bool(engine.logged(e.LoadFailed)) != async_scheduling
    assert engine.finish_reasons.get("owner") == (None if async_scheduling or policy == "recompute" else "error")
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=resets_connector)
    engine.add("late", prompt(2), 20)
    for _ in range(3):
        engine.step()
    for copy in copies[0].pending():
        copy.finish()
    copies[0].slow.clear()
    engine.run(max_steps=300)
    assert engine.logged(e.LoadFailed)
    assert engine.num_preemptions
    assert engine.finish_reasons["somebody else"] == "length"
    if async_scheduling and policy == "recompute":
        engine.outputs["owner"].clear()
        engine.outputs["late"].clear()
    check_everybody(engine, {"first": prompt(1), "second": prompt(2)})


@policies
@pytest.mark.parametrize(("async_scheduling", "model_runner_v2"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("preempts", "resets_connector"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("fails", [False, True])
def test_a_reset_is_refused_because_of_an_asynchronous_load(
    make_engine: Any,
    policy: str,
    async_scheduling: bool,
    model_runner_v2: bool,
    preempts: bool,
    resets_connector: bool,
    fails: bool,
) -> None:
    """What is loaded has blocks, and nobody preempts it. The load ends after that, well or not, as if nothing had been.

    Our pool forgets what it has only where vLLM comes to ask: not behind the error of a reset that preempts.
    """
    engine = saved_prefix(
        make_engine, policy, model_runner_v2=model_runner_v2, load_mode="async", async_scheduling=async_scheduling
    )
    copies = slow_down(engine, "load")
    copies[0]._inner = copies[0]._inner._inner  # they fail here, and nowhere else
    engine.add("somebody else", prompt(3)[64:], 20)
    engine.add("owner", prompt(1), 20)
    engine.step()
    engine.step()
    (load,) = copies[0].pending()
    if preempts:
        with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
            engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=resets_connector)
    else:
        assert not engine.scheduler.reset_prefix_cache(reset_connector=resets_connector)
    copies[0].slow.clear()
    engine.add("late", prompt(2), 20)
    engine.step()
    load.fail() if fails else load.finish()
    engine.run(max_steps=300)
    assert len(engine.logged(e.LoadFailed)) == fails
    assert bool(engine.num_preemptions) == preempts
    assert len(engine.logged(e.CacheReset)) == (resets_connector and not preempts)
    assert engine.finish_reasons == {
        "writer": "length",
        "somebody else": "length",
        "late": "length",
        "owner": "error" if fails and policy == "fail" else "length",
    }
    check_everybody(engine, {"first": prompt(1), "second": prompt(2)})


@pytest.mark.parametrize("num_outputs", [1, 20])
def test_where_vllm_keeps_its_hashes_nothing_wrong_is_saved(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, num_outputs: int
) -> None:
    """The pool stays clean by itself, whoever hits what was not filled, and whoever hits what was computed on it."""
    monkeypatch.setattr(PrefixCache, "evict", lambda *_: None)
    monkeypatch.setattr(PrefixCache, "take_back", lambda *_: None)
    engine = saved_prefix(make_engine, "recompute", load_mode="sync", replays=False)
    engine.model._check = lambda *_: None
    engine.add("owner", prompt(1), 20)
    engine.add("sharer", prompt(2), 20)
    step_with(engine, "owner", "sharer")
    for name in ("late", "later", "latest"):  # each one hits what the one before it computed
        engine.serve(name, prompt(2, 40 + len(name)), num_outputs, max_steps=300)
    engine.serve("longest", [*prompt(2), *engine.outputs["later"], *range(7000, 7100)], num_outputs, max_steps=300)
    del engine.model._check
    assert engine.scheduler.reset_prefix_cache()
    engine.outputs.clear()
    check_everybody(engine, {name: engine.prompts[name] for name in ("owner", "late", "latest", "longest")})
    broken = [violation for violation in engine.audit().violations if violation.rule == "FAILED_LOAD_TAINT"]
    assert {violation.request_id for violation in broken} >= {"late"}


@pytest.mark.parametrize("save_mode", ["sync", "async"])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("chunk_size", [8, 16, 64])
def test_a_request_that_ends_in_the_step_of_its_load_keeps_what_it_computed(
    make_engine: Any, save_mode: str, async_scheduling: bool, chunk_size: int
) -> None:
    """One token of output, as for scoring: the same prompt hits everything the next time, not the first 64 tokens."""
    engine = make_engine(
        num_blocks=60, chunk_size=chunk_size, load_mode="sync", save_mode=save_mode, async_scheduling=async_scheduling
    )
    engine.serve("writer", PREFIX, 2)
    for name in ("first", "second"):
        assert engine.scheduler.reset_prefix_cache()
        engine.serve(name, prompt(1, 200), 1)
    hits = [answer.num_external_tokens for name in ("first", "second") for answer in engine.check_answers(name)]
    assert hits == [64, 263 if chunk_size == 8 else 256]


@policies
@pytest.mark.parametrize("chunk_size", [8, 16])
@pytest.mark.parametrize("save_mode", ["sync", "async"])
def test_what_a_request_saves_at_its_end_goes_with_its_load(
    make_engine: Any, policy: str, chunk_size: int, save_mode: str
) -> None:
    """Aborted in the step of a load that fails: it was saved before the failure was known, and is not offered."""
    engine = saved_prefix(make_engine, policy, load_mode="sync", chunk_size=chunk_size, save_mode=save_mode)
    engine.add("owner", prompt(1, 200), 20)
    step_with(engine, "owner")
    engine.run()
    (failed,) = engine.logged(e.SaveFailed)
    assert failed.request_id == "owner"
    engine.outputs["owner"].clear()
    check_everybody(engine, {"first": prompt(1, 200)})


@pytest.mark.parametrize("save_mode", ["sync", "async"])
@pytest.mark.parametrize("aborted", [("sharer",), ("owner", "sharer")])
def test_what_somebody_saved_on_top_of_a_failed_load_and_is_offered_all_the_same_is_named(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, save_mode: str, aborted: tuple[str, ...]
) -> None:
    """Incident: it saved blocks of its own alone, whoever loaded them later read wrong KV, and the log was sound."""
    monkeypatch.setattr(Jobs, "_doubt_saves", lambda *_: None)
    engine = saved_prefix(make_engine, "recompute", load_mode="sync", save_mode=save_mode, replays=False)
    engine.add("owner", prompt(1), 20)
    engine.add("sharer", prompt(2), 20)
    step_with(engine, *aborted)
    engine.run(max_steps=300)
    engine.serve("somebody else", PREFIX, 2)
    assert engine.scheduler.reset_prefix_cache()
    engine.add("reader", prompt(2), 3)
    with pytest.raises(CorruptKV):
        engine.run()
    broken = [violation for violation in engine.audit().violations if violation.rule == "FAILED_LOAD_TAINT"]
    assert {violation.request_id for violation in broken} == {"sharer"}
    engine.outputs.clear()


def test_blocks_that_no_load_filled_are_recorded_although_vllms_prefix_cache_raises(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks cannot be taken back, but nothing that was computed on them may be saved or loaded."""

    def raising(*_arguments: Any) -> None:
        raise RuntimeError("vLLM's block manager has changed")

    monkeypatch.setattr(PrefixCache, "take_back", raising)
    engine = saved_prefix(make_engine, "fail", load_mode="sync", replays=False)
    engine.add("owner", prompt(1), 20)
    engine.run(max_steps=300)
    assert [failed.hook for failed in engine.logged(e.HookFailed)] == ["update_connector_output"]
    (observed,) = engine.logged(e.LoadErrorsObserved)
    assert set(observed.block_ids) <= set(engine.logged(e.LoadIssued)[0].block_ids)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_somebody_who_goes_on_behind_a_block_that_was_not_filled_is_named(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, *, async_scheduling: bool
) -> None:
    """Incident: vLLM rolls back one request of those that share the block; another one read it, the log was sound."""
    take_back = PrefixCache.take_back

    def take_back_too_little(cache: PrefixCache, requests: Any, block_ids: Any) -> None:
        requests = [request for request in requests if request.request_id != "sharer"]
        take_back(cache, requests, block_ids)

    monkeypatch.setattr(PrefixCache, "take_back", take_back_too_little)
    engine = saved_prefix(make_engine, "recompute", load_mode="sync", replays=False, async_scheduling=async_scheduling)
    engine.model._check = lambda *_: None
    engine.add("owner", prompt(1), 20)
    engine.add("sharer", prompt(2), 20)
    engine.run(max_steps=300)
    assert engine.logged(e.LoadErrorsObserved)
    broken = [violation for violation in engine.audit().violations if violation.rule == "ROLLBACK_OBSERVED"]
    assert {violation.request_id for violation in broken} == {"sharer"}
    engine.outputs.clear()


def test_a_load_that_failed_and_is_reported_as_done_is_named(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Incident: the request computed on blocks that were never filled, and the log was sound."""
    failed = AsyncCopies.failed
    monkeypatch.setattr(
        AsyncCopies, "failed", lambda *arguments, **more: attrs.evolve(failed(*arguments, **more), done=True)
    )
    engine = saved_prefix(make_engine, "recompute", load_mode="async", replays=False)
    engine.model._check = lambda *_: None
    engine.serve("owner", prompt(1), 20)
    broken = [violation.detail for violation in engine.audit().violations if violation.rule == "RANK_AGREEMENT"]
    assert broken == ["jobs [2] are reported as done, but with an error: RuntimeError: broken on purpose"]
    engine.outputs.clear()
