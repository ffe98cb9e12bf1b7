"""Whatever fails in a hook, the engine serves on with right outputs, and the log tells.

After every failure the same conversations are asked for again: if anything wrong had been saved, it would be loaded
now, and the model would raise `CorruptKV`.
"""

from __future__ import annotations

import errno
import os
import sys
import types
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from sim.broken_copies import BROKEN, break_copies
from sim.broken_ledger import fail_in_a_fold, fail_to_observe_once, raise_once
from sim.modes import transfers_sync_and_async
from sim.slow_copies import delay, slow_down

from kvledger.adapters.vllm import scheduler_side
from kvledger.lifecycle import Core, StateHandler
from kvledger.lifecycle import events as e
from kvledger.lifecycle.handlers import ChunkedPrefill, New, Preempted, Running
from kvledger.storage.events import segments as segments_module

pytestmark = pytest.mark.scheduler

NUM_OUTPUT_TOKENS = 50


def small(make_engine: Any, **options: Any) -> Any:
    """An engine for the crowd in which every recovery needs a load."""
    return make_engine(**({"num_blocks": 14, "chunk_size": 8, "enable_prefix_caching": False} | options))


def serve(engine: Any) -> None:
    """Serve the crowd and everybody's continuation: all outputs are whole and right."""
    engine.run()
    said = {request_id: engine.prompts[request_id] + output for request_id, output in engine.outputs.items()}
    for request_id, tokens in said.items():
        engine.serve(f"{request_id} continued", tokens[:88], 6)
    assert {request_id: len(output) for request_id, output in engine.outputs.items()} == {
        request_id: 6 if request_id.endswith("continued") else NUM_OUTPUT_TOKENS for request_id in engine.outputs
    }
    engine.check_outputs()


def preempt(engine: Any) -> None:
    """Step until somebody is preempted."""
    while not engine.num_preemptions:
        engine.step()


@transfers_sync_and_async
def test_without_any_failure_there_is_nothing_to_report(make_engine: Any) -> None:
    """The measure for all other tests here."""
    engine = small(make_engine)
    engine.add_crowd()
    serve(engine)
    assert engine.logged(e.HookFailed, e.InvariantViolated, e.SaveFailed, e.LoadFailed, e.RequestQuarantined) == []
    assert len(engine.logged(e.LoadIssued)) > 3


# --- the log ---------------------------------------------------------------------------------------


def test_while_the_disk_is_full_requests_are_served_without_the_cache(
    make_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is promised and nothing is copied of which the log cannot tell. Where there is room again, it has all."""
    engine = small(make_engine, log_dir=str(tmp_path))
    store = engine.connector.scheduler_side.log.store
    real_write = os.write
    disk_is_full = True

    def write(descriptor: int, data: bytes) -> int:
        if disk_is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(descriptor, data)

    engine.add_crowd()
    for _ in range(10):
        engine.step()
    first_full = engine.connector.scheduler_side.ledger.next_sequence
    monkeypatch.setattr(segments_module.os, "write", write)
    serve(engine)
    assert engine.num_preemptions
    assert store.num_events_backlogged > 0
    next_sequence = engine.connector.scheduler_side.ledger.next_sequence
    disk_is_full = False
    store.flush()
    assert (store.num_events_backlogged, store.num_events_lost) == (0, 0)
    events = engine.events()
    assert events[-1][0] == next_sequence - 1
    while_full = [event for sequence, event in events if sequence >= first_full]
    assert not any(isinstance(event, e.BlocksAllocated) and event.num_external_tokens for event in while_full)
    reports = [event for event in while_full if isinstance(event, e.TransferReported) and event.ranks_done]
    assert {job_id for report in reports for job_id in report.job_ids} <= {
        event.job_id for sequence, event in events if sequence < first_full and isinstance(event, e.SaveIssued)
    }
    assert any(isinstance(event, e.SaveFailed) and "could not be written" in event.error for event in while_full)
    engine.add_crowd()
    engine.run()
    assert engine.logged(e.LoadIssued)[-1].job_id > max(reports[-1].job_ids) if reports else engine.logged(e.LoadIssued)


# --- hooks that raise ------------------------------------------------------------------------------


@transfers_sync_and_async
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize(
    ("event_class", "hook"),
    [
        (e.RequestArrived, "on_new_request"),
        (e.ChunkKeysObserved, "get_num_new_matched_tokens"),
        (e.LookupRequested, "get_num_new_matched_tokens"),
        (e.BlocksAllocated, "claim"),
        (e.RequestPreempted, "record_step"),
        (e.StepScheduled, "record_step"),
        (e.TransferReported, "update_connector_output"),
        (e.RequestFinished, "request_finished"),
    ],
)
@pytest.mark.parametrize("moment", ["first", "after a preemption"])
def test_a_hook_that_raises_once(
    make_engine: Any, event_class: type[e.Event], hook: str, moment: str, enable_prefix_caching: bool
) -> None:
    """Whatever observation cannot be made, outputs are right, nothing wrong is saved, and the log names the hook."""
    engine = small(make_engine, replays=False, enable_prefix_caching=enable_prefix_caching)
    engine.add_crowd()
    if moment == "after a preemption" and event_class not in (e.RequestArrived, e.RequestPreempted):
        preempt(engine)
    fail_to_observe_once(engine, lambda event: isinstance(event, event_class))
    if event_class is e.RequestArrived:
        engine.add("late", range(800, 840), NUM_OUTPUT_TOKENS)
    serve(engine)
    assert len([failed for failed in engine.logged(e.HookFailed) if "RuntimeError in" in failed.error]) == 1
    failed = engine.logged(e.HookFailed)[0]
    assert failed.hook == hook or event_class is e.ChunkKeysObserved
    assert not engine.connector.scheduler_side._requests, "no request of vLLM's is kept for ever"


@transfers_sync_and_async
def test_a_step_that_cannot_be_read_while_a_block_is_appended(make_engine: Any) -> None:
    """The folded block table misses a block from then on; nothing may be saved from the blocks in the wrong places."""
    for number in range(4):
        engine = small(make_engine, replays=False, num_blocks=40)
        reader = engine.connector.scheduler_side._step_reader
        engine.add_crowd()
        seen: list[int] = []

        def appends(output: Any, _time_ns: int, number: int = number, seen: list[int] = seen) -> bool:
            seen.extend(1 for entry in output.scheduled_cached_reqs.new_block_ids if entry)
            return len(seen) > number

        reader.read = raise_once(reader.read, appends)
        serve(engine)
        assert [failed.hook for failed in engine.logged(e.HookFailed)] == ["record_step"]


@transfers_sync_and_async
def test_a_preemption_that_is_noticed_too_late(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that took the blocks failed to say so; by the next hook they are overwritten and not saved any more."""
    engine = small(make_engine, replays=False)
    side = engine.connector.scheduler_side
    engine.add_crowd()
    reader = side.request_reader
    fails = raise_once(reader.preemption, lambda request, *_: request.num_preemptions > 0)
    monkeypatch.setattr(reader, "preemption", fails)
    serve(engine)
    assert engine.num_preemptions
    assert [failed.hook for failed in engine.logged(e.HookFailed)] == ["record_step"]


@pytest.mark.parametrize("first_failing_call", [0, 1, 4, 9])
@pytest.mark.parametrize("num_failing_calls", [1, 3, 10_000])
def test_a_chunk_key_source_that_raises(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, first_failing_call: int, num_failing_calls: int
) -> None:
    """Without keys there is no cache for a request; it is served all the same."""
    engine = small(make_engine, replays=False)
    source = engine.connector.scheduler_side.request_reader._keys
    original, calls = source.keys, []

    def keys(*arguments: Any) -> Any:
        calls.append(1)
        if first_failing_call < len(calls) <= first_failing_call + num_failing_calls:
            raise RuntimeError(BROKEN)
        return original(*arguments)

    monkeypatch.setattr(source, "keys", keys)
    engine.add_crowd()
    serve(engine)
    error = engine.logged(e.HookFailed)[0].error
    assert "RuntimeError in keys, test_failures.py:" in error
    assert BROKEN not in error, "a message may quote a prompt: it is for the messages to people, not for the log"
    assert not engine.connector.scheduler_side._requests


def test_a_load_that_was_promised_and_cannot_be_issued(make_engine: Any) -> None:
    """The scheduler believes in the promise; it is told that the blocks are not filled, and computes them."""
    engine = small(make_engine, replays=False)
    engine.add_crowd()
    preempt(engine)
    fail_to_observe_once(engine, lambda event: isinstance(event, e.BlocksAllocated) and event.num_external_tokens > 0)
    told: list[Any] = []
    update = engine.scheduler.update_from_output

    def watch(output: Any, model_output: Any) -> Any:
        if model_output.kv_connector_output.invalid_block_ids:
            told.append(model_output.kv_connector_output.invalid_block_ids)
        return update(output, model_output)

    engine.scheduler.update_from_output = watch
    serve(engine)
    assert len(told) == 1
    assert engine.logged(e.HookFailed)[0].hook == "claim"
    assert engine.logged(e.RequestQuarantined)[0].reason == "claim failed"


@transfers_sync_and_async
def test_a_load_is_delivered_although_its_step_cannot_be_recorded(make_engine: Any) -> None:
    """Jobs that were decided before the step failed go out with it; their reports are taken up."""
    engine = small(make_engine, replays=False)
    engine.add_crowd()
    preempt(engine)
    fail_to_observe_once(
        engine,
        lambda event: isinstance(event, e.StepScheduled) and any(job.kind == "load" for job in engine.projections.jobs),
    )
    serve(engine)
    assert engine.logged(e.HookFailed)[0].hook == "record_step"
    assert {load.job_id for load in engine.logged(e.LoadIssued)} == {
        done.job_id for done in engine.logged(e.LoadCompleted)
    }


def test_under_the_policy_fail_only_the_promised_request_fails(make_engine: Any) -> None:
    """It shares its beginning with a running request, whose KV is untouched and who must not pay for it."""
    engine = make_engine(replays=False, num_blocks=40, chunk_size=16, kv_transfer={"kv_load_failure_policy": "fail"})
    engine.serve("writer", range(96), 4)
    assert engine.scheduler.reset_prefix_cache()
    engine.add("sharer", range(48), 30)
    for _ in range(3):
        engine.step()
    fail_to_observe_once(engine, lambda event: isinstance(event, e.BlocksAllocated) and event.num_external_tokens > 0)
    engine.serve("promised", range(96), 10)
    assert engine.check_answers("promised")[0].num_external_tokens == 47
    assert engine.finish_reasons["promised"] == "error"
    assert engine.finish_reasons["sharer"] == "length"
    assert len(engine.outputs["sharer"]) == 30


# --- a corrupt ledger ------------------------------------------------------------------------------


def private_state(engine: Any) -> list[tuple[str, str]]:
    """(owner, attribute) of what projections keep: their states, and what follows; but for what is owed outside.

    Nobody else remembers that, so nobody could make up for it.
    """
    found = []
    for name, projection in engine.projections.named().items():
        if name == "owed":
            continue
        kept = {key for key, value in vars(projection).items() if isinstance(value, dict | list | int)}
        found += [(name, attribute) for attribute in sorted(kept)]
        found += [
            (f"{name}.state", attribute)
            for attribute in getattr(getattr(projection, "state", None), "__struct_fields__", ())
        ]
    return found


@pytest.mark.parametrize(
    ("num_steps", "transfers"),
    [
        (6, "auto"),
        (40, "async"),
        pytest.param(0, "auto", marks=pytest.mark.long),
        pytest.param(40, "auto", marks=pytest.mark.long),
    ],
)
def test_a_projection_that_has_lost_its_state(make_engine: Any, num_steps: int) -> None:
    """Each attribute of each projection is taken away in its turn: the engine serves on."""
    escaped = []
    for name, attribute in private_state(small(make_engine)):
        engine = small(make_engine, replays=False)
        engine.add_crowd()
        for _ in range(num_steps):
            engine.step()
        delattr(attrgetter(name)(engine.projections), attribute)
        try:
            engine.run()
            engine.check_outputs()
            assert all(len(output) == NUM_OUTPUT_TOKENS for output in engine.outputs.values())
            assert not engine.connector.has_pending_push_work()
        except AttributeError as error:
            escaped.append(f"{name}.{attribute}: {error}")
        engine.connector.shutdown()
    assert escaped == []


@transfers_sync_and_async
@pytest.mark.parametrize(
    "event_class", [e.LoadIssued, e.SaveIssued, e.SaveCompleted, e.StepScheduled, e.RequestFinished]
)
def test_a_fold_that_raises_turns_caching_off(make_engine: Any, event_class: type[e.Event]) -> None:
    """What the ledger believes cannot be trusted any more: no hits, no saves, and the last events say why."""
    engine = small(make_engine, replays=False)
    engine.add_crowd()
    preempt(engine)
    fail_in_a_fold(engine, event_class)
    serve(engine)
    assert engine.connector.scheduler_side.journal.is_disabled
    failed = engine.logged(e.HookFailed)
    assert "LedgerCorrupt" in failed[0].error
    assert BROKEN in failed[0].error
    position = next(index for index, (_, event) in enumerate(engine.events()) if isinstance(event, e.HookFailed))
    assert not [event for _, event in engine.events()[position:] if event.is_decision]
    assert not engine.connector.scheduler_side._requests


@pytest.mark.parametrize("save_mode", ["sync", "async"])
def test_a_load_that_nobody_reports_ends_although_nothing_is_decided_any_more(make_engine: Any, save_mode: str) -> None:
    """After `max_silent_steps` it is reported as failed, and its request computes; held blocks are free again."""
    engine = small(make_engine, replays=False, load_mode="async", save_mode=save_mode, max_silent_steps=8)
    delay(engine)
    engine.add_crowd()
    preempt(engine)
    for _ in range(100):
        engine.step()
        if any(job.kind == "load" for job in engine.projections.jobs):
            break
    engine.worker._worker_side.take_reports = lambda: None
    fail_in_a_fold(engine, e.StepScheduled)
    engine.run(max_steps=1000)
    assert engine.connector.scheduler_side.journal.is_disabled
    (report,) = [report for report in engine.logged(e.TransferReported) if report.withheld == e.Withheld.OVERDUE]
    assert report.job_ids == (engine.logged(e.LoadIssued)[-1].job_id,)
    assert [len(output) for output in engine.outputs.values()] == [NUM_OUTPUT_TOKENS] * len(engine.outputs)
    engine.check_outputs()
    owed = engine.projections.owed
    assert [owed.is_owing, owed.is_waiting, owed.is_freeing] == [False, False, False]


# --- handlers --------------------------------------------------------------------------------------


def raising_handler(base: type[StateHandler], method: str) -> StateHandler:
    """A handler of the same state whose `method` raises."""

    def raising(*_arguments: Any) -> Any:
        raise RuntimeError(BROKEN)

    handler = type(f"Raising{base.__name__}", (base,), {method: raising})()
    assert isinstance(handler, StateHandler)
    return handler


@transfers_sync_and_async
@pytest.mark.parametrize(
    ("base", "method"),
    [
        (New, "lookup_requested"),
        (New, "blocks_allocated"),
        (New, "tokens_scheduled"),
        (ChunkedPrefill, "tokens_settled"),
        (Running, "tokens_settled"),
        (Running, "request_preempted"),
        (Running, "request_finished"),
        (Preempted, "lookup_requested"),
        (Preempted, "blocks_allocated"),
    ],
)
def test_a_handler_that_raises(
    make_engine: Any, base: type[StateHandler], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request is quarantined, everybody is served, and the log replays: the failure is a decision like others.

    Where the end of a request fails to be decided while a copy reads its blocks, they are held all the same.
    """
    handler = raising_handler(base, method)
    module = types.ModuleType("broken_handlers")
    module.__dict__["Broken"] = type(handler)
    monkeypatch.setitem(sys.modules, "broken_handlers", module)
    # The log replays with the broken handler in its place only, see the end.
    engine = small(make_engine, replays=False, handlers=["broken_handlers:Broken"], max_num_batched_tokens=16)
    engine.add_crowd()
    serve(engine)
    violations = engine.logged(e.InvariantViolated)
    assert {violation.rule for violation in violations} - {"VLLM_CONTRACT"} == {"HANDLER_RAISED"}
    assert all(BROKEN in violation.detail or "were not held" in violation.detail for violation in violations)
    assert "HANDLER_RAISED" in {quarantined.reason for quarantined in engine.logged(e.RequestQuarantined)}
    engine.check_replay(Core.standard().replacing(handler))


# --- copies ----------------------------------------------------------------------------------------


@transfers_sync_and_async
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("num_failures", [1, 5, 10_000])
def test_saves_that_fail(make_engine: Any, num_failures: int, enable_prefix_caching: bool) -> None:
    """What was not copied is not offered; its slots are free again."""
    engine = small(make_engine, enable_prefix_caching=enable_prefix_caching)
    break_copies(engine, "save", num_failures)
    engine.add_crowd()
    serve(engine)
    failed = engine.logged(e.SaveFailed)
    assert 1 <= len([report for report in engine.logged(e.TransferReported) if report.ranks_failed]) <= num_failures
    assert all(BROKEN in event.error for event in failed)
    if num_failures == 10_000:
        assert len(engine.projections.pool) == 0
        assert engine.projections.slots.num_free == engine.projections.slots.num_slots
        assert engine.logged(e.LoadIssued) == []
    assert engine.figures.num_saves_failed == len(failed)


@transfers_sync_and_async
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("model_runner_v2", [False, True])
@pytest.mark.parametrize("num_failures", [1, 3, 10_000])
def test_loads_that_fail_are_computed(
    make_engine: Any, num_failures: int, model_runner_v2: bool, enable_prefix_caching: bool
) -> None:
    """Policy recompute: the request computes what was promised; the chunks are not offered again."""
    engine = small(make_engine, model_runner_v2=model_runner_v2, enable_prefix_caching=enable_prefix_caching)
    break_copies(engine, "load", num_failures)
    engine.add_crowd()
    serve(engine)
    failed = engine.logged(e.LoadFailed)
    assert 1 <= len(failed) <= num_failures
    assert engine.logged(e.ChunksTainted)
    assert engine.logged(e.InvariantViolated, e.HookFailed) == []
    assert engine.figures.num_loads_failed == len(failed)
    for request_id in engine.outputs:
        engine.check_answers(request_id)


@transfers_sync_and_async
def test_under_the_policy_fail_only_the_request_whose_load_failed_fails(make_engine: Any) -> None:
    """VLLM's default policy: an error for one client, right outputs for all others."""
    engine = small(make_engine, kv_transfer={"kv_load_failure_policy": "fail"})
    break_copies(engine, "load", 1)
    engine.add_crowd()
    engine.run()
    (failed,) = engine.logged(e.LoadFailed)
    assert [request_id for request_id, reason in engine.finish_reasons.items() if reason == "error"] == [
        failed.request_id
    ]
    assert engine.logged(e.RequestFinished, request_id=failed.request_id)[0].status == "FINISHED_ERROR"
    others = set(engine.outputs) - {failed.request_id}
    assert {engine.finish_reasons[request_id] for request_id in others} == {"length"}


@transfers_sync_and_async
@pytest.mark.parametrize("model_runner_v2", [False, True])
@pytest.mark.parametrize(
    "policy",
    [
        "fail",
        "recompute",
    ],
)
def test_a_load_that_fails_with_two_steps_in_flight(make_engine: Any, model_runner_v2: bool, policy: str) -> None:
    """The next step is scheduled before the failure is known. Whoever gets an answer must get a right one."""
    engine = small(
        make_engine,
        replays=False,
        async_scheduling=True,
        model_runner_v2=model_runner_v2,
        load_mode="auto",
        kv_transfer={"kv_load_failure_policy": policy},
    )
    if policy == "fail":
        # What the step on top of it reads is wrong, but its output goes nowhere.
        engine.model._check = lambda *_arguments: None
    break_copies(engine, "load", 1)
    engine.add_crowd()
    engine.run()
    (failed,) = engine.logged(e.LoadFailed)
    assert engine.finish_reasons[failed.request_id] == ("error" if policy == "fail" else "length")
    others = set(engine.outputs) - {failed.request_id}
    assert {engine.finish_reasons[request_id] for request_id in others} == {"length"}
    engine.check_outputs()
    vars(engine.model).pop("_check", None)
    for request_id, tokens in [(request_id, engine.prompts[request_id]) for request_id in engine.outputs]:
        engine.serve(f"{request_id} again", tokens, 6)


@transfers_sync_and_async
def test_a_worker_that_never_reports(make_engine: Any) -> None:
    """A copy that nobody reports counts as failed after a while, so that nothing waits for ever."""
    engine = small(make_engine, max_silent_steps=8)
    engine.worker._worker_side.take_reports = lambda: None
    engine.add_crowd()
    engine.run(max_steps=1000)
    assert {violation.rule for violation in engine.logged(e.InvariantViolated)} == {"LIVENESS"}
    assert len(engine.logged(e.SaveFailed)) == len(engine.logged(e.SaveIssued))


@transfers_sync_and_async
def test_a_report_that_comes_twice(make_engine: Any) -> None:
    """The second is recorded and changes nothing."""
    engine = small(make_engine)
    take = engine.worker._worker_side.take_reports
    earlier: list[Any] = []

    def again() -> Any:
        reports = take()
        if reports is not None:
            earlier.append(reports)
            return reports
        return earlier.pop() if earlier else None

    engine.worker._worker_side.take_reports = again
    engine.add_crowd()
    serve(engine)
    assert {violation.rule for violation in engine.logged(e.InvariantViolated)} == {"COMPLETION_ONCE"}
    assert engine.logged(e.RequestQuarantined) == []


@pytest.mark.parametrize("num_failures", [1, 10_000])
@pytest.mark.parametrize(("load_mode", "async_scheduling"), [("sync", False), ("async", False), ("async", True)])
@pytest.mark.parametrize("save_mode", ["sync", "async"])
def test_jobs_that_cannot_be_handed_out(
    make_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    num_failures: int,
    async_scheduling: bool,
    load_mode: str,
    save_mode: str,
) -> None:
    """They are reported as failed in the same step: blocks that a load was to fill, its request, and every save."""
    engine = small(
        make_engine,
        replays=False,
        async_scheduling=async_scheduling,
        load_mode=load_mode,
        save_mode=save_mode,
        max_silent_steps=1000,
    )
    if save_mode == "async":
        delay(engine)
    original, lost = scheduler_side.step_jobs, []

    def fail_with_a_load(ready: Any, *more: Any) -> Any:
        if any(isinstance(job, e.LoadIssued) for job in ready.jobs) and len(lost) < num_failures:
            lost.append([job.job_id for job in ready.jobs])
            raise RuntimeError(BROKEN)
        return original(ready, *more)

    monkeypatch.setattr(scheduler_side, "step_jobs", fail_with_a_load)
    engine.add_crowd()
    serve(engine)
    assert lost
    assert [failed.hook for failed in engine.logged(e.HookFailed)] == ["build_connector_meta"] * len(lost)
    settled = engine.logged(e.LoadFailed, e.SaveFailed)
    assert {failed.job_id for failed in settled} >= {job_id for job_ids in lost for job_id in job_ids}
    assert {failed.error for failed in engine.logged(e.LoadFailed)} == {"not handed out: build_connector_meta failed"}
    withheld = {job_id for report in engine.logged(e.TransferReported) if report.withheld for job_id in report.job_ids}
    assert withheld == {job_id for job_ids in lost for job_id in job_ids}
    assert not engine.logged(e.InvariantViolated)
    engine.check_released()


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("disabled", [False, True])
def test_no_step_can_be_handed_out_any_more(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, enable_prefix_caching: bool, disabled: bool
) -> None:
    """However long that lasts, copies under way are waited for and requests are served, also without a ledger."""
    engine = small(
        make_engine, replays=False, enable_prefix_caching=enable_prefix_caching, load_mode="async", save_mode="async"
    )
    delay(engine)
    engine.add_crowd()
    preempt(engine)
    if disabled:
        engine.connector.scheduler_side.journal._stop_deciding()

    def fail(*_: Any) -> Any:
        raise RuntimeError(BROKEN)

    monkeypatch.setattr(scheduler_side, "step_jobs", fail)
    serve(engine)


def test_what_is_copied_out_of_blocks_that_a_step_took_without_waiting_is_not_offered(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker was told to wait, so that the copy may have read what others computed."""
    engine = small(make_engine, replays=False, num_blocks=14, save_mode="async", load_mode="sync")
    (copies,) = slow_down(engine, "save")
    lost: list[int] = []

    def fail_with_a_fence(original: Callable[..., Any]) -> Callable[..., Any]:
        def build(ready: Any, *more: Any) -> Any:
            fences = [awaited.job_id for awaited in ready.awaited if awaited.before_forward]
            if fences and lost in ([], fences):
                lost[:] = fences
                raise RuntimeError(BROKEN)
            return original(ready, *more)

        return build

    for name in ("step_jobs", "no_copies"):
        monkeypatch.setattr(scheduler_side, name, fail_with_a_fence(getattr(scheduler_side, name)))
    engine.add_crowd()
    preempt(engine)
    assert lost
    for _ in range(3):
        engine.step()
    assert not any(copy.was_waited_for for copy in copies.started if copy.what == "save" and not copy.is_over)
    given_up = {failed.job_id: failed.quiet for failed in engine.logged(e.SaveFailed)}
    assert {job_id: given_up.get(job_id) for job_id in lost} == dict.fromkeys(lost, False)
    delay(engine)
    for copy in copies.pending():
        copy.finish()
    serve(engine)


# --- what is owed ----------------------------------------------------------------------------------


def fail_to_append(engine: Any) -> None:
    """Three frames with jobs cannot be written at once."""
    store = engine.connector.scheduler_side.ledger._sink
    append, refused = store.append, []

    def appending(*arguments: Any, **options: Any) -> Any:
        if engine.projections.owed.state.unsent and len(refused) < 3:
            refused.append(1)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return append(*arguments, **options)

    store.append = appending


def fail_to_ask(engine: Any) -> None:
    """What is owed cannot be asked for, once, when something is."""
    journal = engine.connector.scheduler_side.journal
    journal.ready = raise_once(journal.ready, lambda: bool(engine.projections.owed.is_owing))


POINTS: dict[str, Callable[[Any], None]] = {
    "what is owed cannot be asked for": fail_to_ask,
    "that it was handed over cannot be folded": lambda engine: fail_in_a_fold(engine, e.EffectsDelivered),
    "a save cannot be folded": lambda engine: fail_in_a_fold(engine, e.SaveIssued),
    "a load cannot be folded": lambda engine: fail_in_a_fold(engine, e.LoadIssued),
    "a report cannot be folded": lambda engine: fail_in_a_fold(engine, e.TransferReported),
    "a frame cannot be written": fail_to_append,
}


@transfers_sync_and_async
@pytest.mark.parametrize("point", POINTS)
def test_no_job_is_lost_or_handed_out_twice(make_engine: Any, point: str) -> None:
    """Whatever fails: each job that is recorded goes to the workers once, or is reported as withheld."""
    engine = small(make_engine, replays=False)
    side = engine.connector.scheduler_side
    build, given = side.build_connector_meta, []

    def watch(scheduler_output: Any) -> Any:
        jobs = build(scheduler_output)
        copies = (jobs.saves_before_forward, jobs.loads, jobs.saves, jobs.async_loads, jobs.async_saves)
        given.extend(job.job_id for kind in copies for job in kind)
        return jobs

    side.build_connector_meta = watch
    engine.add_crowd()
    preempt(engine)
    POINTS[point](engine)
    serve(engine)
    issued = {job.job_id for job in engine.logged(e.LoadIssued, e.SaveIssued, e.TailSaveIssued)}
    withheld = {job_id for report in engine.logged(e.TransferReported) if report.withheld for job_id in report.job_ids}
    assert len(given) == len(set(given))
    assert set(given) | withheld == issued
    assert not set(given) & withheld
    delivered = [job_id for event in engine.logged(e.EffectsDelivered) for job_id in event.job_ids]
    assert sorted(delivered) == sorted(given)
    owed = engine.projections.owed
    assert [owed.is_owing, owed.is_waiting, owed.is_freeing] == [False, False, False]
