"""What vLLM acts upon is in the log before vLLM is told: a process killed right after a hook leaves call and answer."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import killed_on_failure

from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.tools.logs.log import open_log
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


def engine(**options: Any) -> SimulatedEngine:
    """One with room for half of what it will be asked."""
    options = {"num_blocks": 14, "chunk_size": 8, "host_bytes": 1 << 20, "enable_prefix_caching": False, **options}
    return SimulatedEngine(**options)


def crowd(made: SimulatedEngine) -> None:
    """Four requests that do not fit, so that some are preempted and come back."""
    for number in range(4):
        made.add(str(number), range(100 * number, 100 * number + 40), 40)


def serve(made: SimulatedEngine) -> None:
    """To the end, with a reset in the middle."""
    crowd(made)
    for _ in range(90):
        made.step()
    made.scheduler.reset_prefix_cache(reset_connector=True)
    made.run()


def jobs_of(step: Any) -> list[int]:
    """The numbers of all jobs that go to the workers."""
    jobs = (*step.saves_before_forward, *step.loads, *step.saves, *step.async_loads, *step.async_saves)
    return [job.job_id for job in jobs]


def told(hook: str, arguments: tuple[Any, ...], answer: Any) -> dict[str, Any]:
    """A call and its answer, as plain values."""
    if hook == "build_connector_meta":
        return {"num_tokens": arguments[0].total_num_scheduled_tokens, "jobs": jobs_of(answer)}
    if hook == "update_connector_output":
        worker_meta = arguments[0].kv_connector_worker_meta
        return {"jobs": [job_id for report in worker_meta.reports for job_id in report.job_ids] if worker_meta else []}
    if hook == "reset_cache":
        return {"answer": answer}
    call = {"request_id": arguments[0].request_id, "answer": answer}
    if hook == "get_num_new_matched_tokens":
        return {**call, "computed": arguments[1]}
    return {**call, "external": arguments[2]} if hook == "update_state_after_alloc" else call


def killed_after(hook: str, occurrence: int, log_dir: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Serve in a process of its own that is killed when the hook has returned so often; the call that it was."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            made = engine(log_dir=str(log_dir), **options)
            original, left = getattr(made.connector, hook), [occurrence]

            def call(*arguments: Any) -> Any:
                answer = original(*arguments)
                left[0] -= 1
                if not left[0]:
                    os.write(write_end, json.dumps(told(hook, arguments, answer)).encode())
                    os.kill(os.getpid(), signal.SIGKILL)
                return answer

            setattr(made.connector, hook, call)
            serve(made)
        finally:
            os._exit(1)
    os.close(write_end)
    with killed_on_failure(child), os.fdopen(read_end) as pipe:
        text = pipe.read()
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the hook is not called so often"
    return dict(json.loads(text))


def last(events: list[e.Event], *classes: type[Any], request_id: str | None = None) -> Any:
    """The last event of these classes, of one request or of all."""
    return next(
        event
        for event in reversed(events)
        if isinstance(event, classes) and request_id in {None, getattr(event, "request_id", None)}
    )


def check_arrival(events: list[e.Event], call: dict[str, Any]) -> None:
    """`on_new_request`."""
    assert last(events, e.RequestArrived).request_id == call["request_id"]


def check_lookup(events: list[e.Event], call: dict[str, Any]) -> None:
    """A lookup that was repeated stands there once, with the same answer."""
    decided = last(events, e.LookupAnswered, e.LookupDeferred, request_id=call["request_id"])
    assert decided.num_computed_tokens == call["computed"]
    if isinstance(decided, e.LookupDeferred):
        assert call["answer"] == [None, False]
    else:
        assert [decided.num_external_tokens, decided.is_async] == call["answer"]


def check_allocation(events: list[e.Event], call: dict[str, Any]) -> None:
    """With the load that it leads to."""
    allocated = last(events, e.BlocksAllocated)
    assert (allocated.request_id, allocated.num_external_tokens) == (call["request_id"], call["external"])
    if call["external"]:
        assert last(events, e.LoadIssued).num_tokens == call["external"]


def check_step(events: list[e.Event], call: dict[str, Any]) -> None:
    """Every job that went to the workers is there."""
    assert last(events, e.StepScheduled).num_scheduled_tokens == call["num_tokens"]
    issued = {event.job_id for event in events if isinstance(event, e.LoadIssued | e.SaveIssued | e.TailSaveIssued)}
    assert set(call["jobs"]) <= issued


def check_output(events: list[e.Event], call: dict[str, Any]) -> None:
    """Every report."""
    reported = {job_id for event in events if isinstance(event, e.TransferReported) for job_id in event.job_ids}
    assert set(call["jobs"]) <= reported


def check_end(events: list[e.Event], call: dict[str, Any]) -> None:
    """Blocks that are kept are held."""
    request_id = call["request_id"]
    assert last(events, e.RequestFinished).request_id == request_id
    held = any(isinstance(event, e.BlocksHeld) and event.request_id == request_id for event in events)
    assert call["answer"][0] is held


def check_reset(events: list[e.Event], call: dict[str, Any]) -> None:
    """`reset_cache`."""
    assert call["answer"] is True
    assert last(events, e.CacheReset)


CHECKS: dict[str, tuple[tuple[int, ...], Callable[[list[e.Event], dict[str, Any]], None]]] = {
    "on_new_request": ((1, 4), check_arrival),
    "get_num_new_matched_tokens": ((1, 3, 6, 20), check_lookup),
    "update_state_after_alloc": ((1, 4, 5), check_allocation),
    "build_connector_meta": ((1, 20, 60), check_step),
    "update_connector_output": ((2, 40), check_output),
    "request_finished_all_groups": ((1, 4), check_end),
    "reset_cache": ((1,), check_reset),
}


@pytest.mark.parametrize(
    ("hook", "occurrence"), [(hook, number) for hook, (numbers, _) in CHECKS.items() for number in numbers]
)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_process_that_is_killed_after_a_hook_leaves_the_call_and_its_answer(
    hook: str, occurrence: int, mode: str, tmp_path: Path
) -> None:
    """Nothing of the log is flushed, closed or waited for: the process is gone with its next instruction."""
    call = killed_after(hook, occurrence, tmp_path, {"load_mode": mode, "save_mode": mode})
    (directory,) = tmp_path.iterdir()
    log = open_log(directory)
    events = [event for _, event in log.events()]
    CHECKS[hook][1](events, call)


def test_each_hook_writes_one_frame_at_most_and_a_repeated_lookup_none(tmp_path: Path) -> None:
    """A request that waits is asked about in every step; what it is answered is written when it changes."""
    made = engine(log_dir=str(tmp_path), load_mode="sync", save_mode="sync")
    segments = made.connector.scheduler_side.log.store._store
    num_written: dict[str, list[int]] = {}
    append, num_frames = segments.append, [0]

    def counted(*arguments: Any, **options: Any) -> Any:
        num_frames[0] += 1
        return append(*arguments, **options)

    segments.append = counted
    for hook in CHECKS:
        original = getattr(made.connector, hook)

        def call(*arguments: Any, hook: str = hook, original: Any = original) -> Any:
            before = num_frames[0]
            answer = original(*arguments)
            num_written.setdefault(hook, []).append(num_frames[0] - before)
            return answer

        setattr(made.connector, hook, call)
    serve(made)
    made.shutdown()
    assert all(set(frames) <= {0, 1} for frames in num_written.values())
    lookups = num_written["get_num_new_matched_tokens"]
    assert lookups.count(0) > len(lookups) // 2


def test_while_the_log_raises_nothing_is_promised_and_what_is_owed_is_delivered(tmp_path: Path) -> None:
    """From the first preemption on every append raises; outputs are right, and later the log has everything."""
    made = engine(log_dir=str(tmp_path), load_mode="async", save_mode="async")
    side = made.connector.scheduler_side
    sink, answers = side.ledger._sink, []
    original = made.connector.get_num_new_matched_tokens
    made.connector.get_num_new_matched_tokens = lambda *call: answers.append(original(*call)) or answers[-1]

    def refuse(*_arguments: Any, **_options: Any) -> int:
        message = "no log today"
        raise OSError(message)

    crowd(made)
    while not made.num_preemptions:
        made.step()
    append, sink.append = sink.append, refuse
    answers.clear()
    made.run()
    assert answers
    assert set(answers) == {(0, False)}
    assert not made.scheduler.requests
    sink.append = append
    side.ledger.commit()
    made.shutdown()
    events = [event for _, event in open_log(next(tmp_path.iterdir())).events()]
    assert {event.request_id for event in events if isinstance(event, e.RequestReleased)} == set("0123")
