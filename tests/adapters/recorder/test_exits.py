"""What a recorded connector raises reaches vLLM unchanged, whatever its class; what the recorder raises does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sim.connectors import NamedConnector
from sim.recorded import events_of

from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

WITNESS = NamedConnector(name="Witness", module="sim.witness")


class OfSomebody(BaseException):
    """No `Exception`, as some libraries have them."""


RAISED = pytest.mark.parametrize("raised", [SystemExit(3), OfSomebody()], ids=["SystemExit", "somebody's own"])


@RAISED
@pytest.mark.parametrize("hook", ["get_num_new_matched_tokens", "build_connector_meta", "request_finished_all_groups"])
def test_what_the_connector_raises_is_recorded_and_reaches_vllm(
    record: Callable[..., tuple[Any, Any]],
    on_hook: Callable[[Callable[[str], None]], None],
    hook: str,
    raised: BaseException,
) -> None:
    """The very exception; the log names the hook."""

    def raise_in(name: str) -> None:
        if name == hook:
            raise raised

    engine, recording = record(WITNESS)
    on_hook(raise_in)
    engine.add("a", range(40), 4)
    with pytest.raises(type(raised)) as found:
        engine.run()
    assert found.value is raised
    on_hook(lambda _name: None)
    (failed,) = [event for _, event in events_of(recording) if isinstance(event, e.HookFailed)]
    assert failed.hook == hook
    assert failed.error.startswith(f"{type(raised).__name__} in ")


@RAISED
def test_a_recorder_that_fails_ends_and_the_connector_goes_on(
    record: Callable[..., tuple[Any, Any]], raised: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own failure is nobody's business but its own."""

    def fails(*_arguments: Any) -> Any:
        raise raised

    engine, recording = record(WITNESS)
    monkeypatch.setattr(recording._transfers, "built", fails)
    engine.add("a", range(40), 4)
    engine.run()
    assert len(engine.outputs["a"]) == 4
    assert recording.log.is_ended
