"""The recorder goes on if the connector answers with numbers that vLLM's contract does not allow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from sim.connectors import NamedConnector, Recorded
from sim.neighbour import Neighbour
from sim.recorded import audited, events_of, said_in

from kvledger.adapters.recorded.payloads import LookupReturned
from kvledger.lifecycle import events as e
from kvledger.lifecycle.ranges import MAX_INT64

pytestmark = pytest.mark.scheduler

Record = Callable[..., tuple[Any, Any]]
NEIGHBOUR = NamedConnector(name="Neighbour", module="sim.neighbour", options={"num_tokens": 48})


def broken_rules(recording: Any) -> set[str]:
    """Check that the recording is complete, and return the rules that its log breaks."""
    for _, event in events_of(recording):
        assert not isinstance(event, e.ExtensionStopped), event
        assert not isinstance(event, e.LogNote) or "stopped" not in event.text
    return {violation.rule for violation in audited(recording).violations}


def test_a_negative_answer_to_a_preempted_request_does_not_stop_the_recorder(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: the recorder issued a load of -16 tokens into no block, which the core refuses from an extension."""

    def fewer(_self: Neighbour, _request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return (-16 if num_computed_tokens >= 32 else 0), False

    monkeypatch.setattr(Neighbour, "get_num_new_matched_tokens", fewer)
    engine, recording = record(setup=Recorded(inner=NEIGHBOUR), num_blocks=17)
    for number in range(4):
        engine.add(f"r{number}", range(100 * number, 100 * number + 49 + number), 60)
    engine.run()
    events = [event for _, event in events_of(recording)]
    preempted = {event.request_id for event in events if isinstance(event, e.RequestPreempted)}
    claims = [event for event in events if isinstance(event, e.BlocksAllocated) and event.num_external_tokens < 0]
    assert preempted & {claim.request_id for claim in claims}
    assert broken_rules(recording) == {"LAST_TOKEN", "TOKEN_CONSERVATION"}
    assert isinstance(events[-1], e.ExtensionNoted)


@pytest.mark.parametrize("answer", [1 << 40, MAX_INT64, 1 << 70, -(1 << 20)])
def test_an_answer_of_any_size_is_in_the_log(answer: int, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that no event can hold becomes the nearest one. vLLM asserts that the answer is not too large."""
    monkeypatch.setattr(Neighbour, "get_num_new_matched_tokens", lambda *_: (answer, False))
    engine, recording = record(setup=Recorded(inner=NEIGHBOUR))
    engine.add("theirs", range(64), 5)
    with suppress(Exception):
        engine.run()
    (first, *_) = said_in(recording, LookupReturned)
    assert first.num_external_tokens == max(-MAX_INT64, min(MAX_INT64, answer))
    assert "LAST_TOKEN" in broken_rules(recording)


def test_an_integer_of_numpy_is_recorded_as_an_integer(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an answer is added to the counts of vLLM, so the counts of later steps are integers of numpy, too."""
    answer_of = Neighbour.get_num_new_matched_tokens

    def numpys(neighbour: Neighbour, request: Any, num_computed_tokens: int) -> tuple[Any, bool]:
        num_tokens, is_async = answer_of(neighbour, request, num_computed_tokens)
        return np.int64(num_tokens), is_async

    monkeypatch.setattr(Neighbour, "get_num_new_matched_tokens", numpys)
    engine, recording = record(setup=Recorded(inner=NEIGHBOUR), num_blocks=17)
    for number in range(4):
        engine.add(f"theirs{number}", range(100 * number, 100 * number + 59 + number), 60)
    engine.run()
    assert 48 in {answer.num_external_tokens for answer in said_in(recording, LookupReturned)}
    steps = [event for _, event in events_of(recording) if isinstance(event, e.StepScheduled)]
    assert 48 in {computed for step in steps for _, computed, *_ in step.advanced}
    assert not broken_rules(recording)
