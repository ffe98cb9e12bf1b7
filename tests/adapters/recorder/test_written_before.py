"""The call is in the log before the wrapped connector has it; who fails then, and what becomes of the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sim.connectors import NamedConnector
from sim.recorded import audited, events_of

from kvledger.adapters.recorder.log import RecorderLog
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

Record = Callable[..., tuple[Any, Any]]
WITNESS = NamedConnector(name="Witness", module="sim.witness")
QUESTIONS = {
    "on_new_request": "request.arrived",
    "get_num_new_matched_tokens": "lookup.requested",
    "update_state_after_alloc": "blocks.allocated",
    "build_connector_meta": "step.scheduled",
    "update_connector_output": "workers_reported",
    "request_finished_all_groups": "request.finished",
    "reset_cache": "cache.reset",
}
"""Hook -> the observation that stands for its call; an event of the recorder's by its name there."""
OF_ONE_REQUEST = {hook for hook in QUESTIONS if "request" in hook or hook.startswith(("get", "update_state"))}


def named(event: e.Event) -> str:
    """As in `QUESTIONS`."""
    return event.name if isinstance(event, e.ExtensionObserved | e.ExtensionNoted) else event.id


def observed_last(recording: Any) -> str:
    """The newest observation in the store."""
    return named([event for _, event in events_of(recording) if not event.is_decision][-1])


def use(engine: Any) -> None:
    """Every hook of the scheduler's side, the reset when nobody runs."""
    engine.add("a", range(20), 3)
    engine.run()
    engine.scheduler.reset_prefix_cache(reset_connector=True)


def test_each_call_is_in_the_log_before_the_connector_has_it(record: Record, on_hook: Any) -> None:
    """Read by the connector itself, in each of its hooks."""
    engine, recording = record(WITNESS)
    seen: dict[str, set[str]] = {}
    on_hook(lambda hook: seen.setdefault(hook, set()).add(observed_last(recording)))
    use(engine)
    assert seen == {hook: {question} for hook, question in QUESTIONS.items()}
    assert audited(recording).is_sound


class Broken(RuntimeError):
    """What the connector raises."""


@pytest.mark.parametrize("hook", QUESTIONS)
def test_what_the_connector_raises_reaches_vllm_and_the_log_says_where(record: Record, on_hook: Any, hook: str) -> None:
    """The very exception, and behind the call that it broke `hook.failed`."""
    engine, recording = record(WITNESS)
    error = Broken("of the connector")

    def fail(called: str) -> None:
        if called == hook:
            raise error

    on_hook(fail)
    with pytest.raises(Broken) as caught:
        use(engine)
    assert caught.value is error
    events = [event for _, event in events_of(recording) if not event.is_decision]
    failed = events[-1]
    assert isinstance(failed, e.HookFailed)
    assert (failed.hook, failed.request_id) == (hook, "a" if hook in OF_ONE_REQUEST else "")
    assert named(events[-2]) == QUESTIONS[hook]
    on_hook(lambda _hook: None)


@pytest.mark.parametrize("number", range(1, 26, 3))
def test_where_the_recorder_fails_each_call_is_forwarded_and_people_are_told_once(
    record: Record, on_hook: Any, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever event it is that cannot be recorded: the connector and the engine notice nothing."""
    calls: list[list[str]] = []
    outputs = []
    for is_broken in (False, True):
        engine, recording = record(WITNESS)
        calls.append([])
        on_hook(calls[-1].append)
        if is_broken:
            _break(recording.log, number, monkeypatch)
        use(engine)
        outputs.append(engine.outputs)
    assert calls[0] == calls[1]
    assert outputs[0] == outputs[1]
    assert recording.log.is_ended
    told = [line for line in caplog.records if "recorder has stopped" in line.getMessage()]
    assert len(told) == 1
    texts = [event.text for _, event in events_of(recording) if isinstance(event, e.LogNote)]
    assert texts[-1].startswith("recording stopped in")


def _break(log: RecorderLog, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the observation of that number raise."""
    observe, left = log.observe, iter(range(number, 0, -1))

    def fail(event: e.Event) -> Any:
        if next(left, 0) == 1:
            message = "of the recorder"
            raise ArithmeticError(message)
        return observe(event)

    monkeypatch.setattr(log, "observe", fail)
