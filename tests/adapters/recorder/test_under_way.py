"""Which call a connector hangs in, or its engine died in: told from the log alone, while it hangs and afterwards."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import started
from sim.connectors import NamedConnector
from sim.recorded import events_of

from kvledger.adapters.recorded.extension import Recorder
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.logs.under_way import last_under_way
from kvledger.lifecycle import Core

pytestmark = pytest.mark.scheduler

Record = Callable[..., tuple[Any, Any]]
WITNESS = NamedConnector(name="Witness", module="sim.witness")
CALLS = {
    "on_new_request": "in on_new_request of request a",
    "get_num_new_matched_tokens": "in get_num_new_matched_tokens of request a",
    "update_state_after_alloc": "in update_state_after_alloc of request a",
    "build_connector_meta": "in build_connector_meta",
    "update_connector_output": "in update_connector_output",
    "request_finished_all_groups": "in request_finished of request a",
    "reset_cache": "in reset_cache",
    "shutdown": "in shutdown",
}
"""Hook -> what is said of a log that ends in it."""


def use(engine: Any) -> None:
    """Every hook of the scheduler's side, the reset when nobody runs."""
    engine.add("a", range(20), 3)
    engine.run()
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.scheduler.connector.shutdown()


def test_each_call_is_under_way_until_it_has_returned(record: Record, on_hook: Any) -> None:
    """As the log stands when the connector is called, and when vLLM goes on."""
    core = Core.standard().extended(Recorder())
    engine, recording = record(WITNESS)

    def what() -> str | None:
        call = last_under_way(core, events_of(recording))
        return None if call is None else call.what

    seen: dict[str, set[str | None]] = {}
    on_hook(lambda hook: seen.setdefault(hook, set()).add(what()))
    add, schedule = engine.scheduler.add_request, engine.scheduler.schedule
    after: list[str | None] = []
    engine.scheduler.add_request = lambda request: (add(request), after.append(what()))
    engine.scheduler.schedule = lambda *options: (schedule(*options), after.append(what()))[0]
    use(engine)
    assert seen == {hook: {what} for hook, what in CALLS.items()}
    assert len(after) > 3
    assert set(after) == {None}


@pytest.mark.parametrize("command", ["show", "stats", "verify"])
def test_a_log_whose_engine_was_killed_in_a_call_says_which(
    record: Record, on_hook: Any, tmp_path: Path, said: Any, command: str
) -> None:
    """The log as it lay there at that moment, which is what a killed process leaves."""
    engine, recording = record(WITNESS, log_dir=str(tmp_path / "logs"))

    def leave(hook: str) -> None:
        if hook == "get_num_new_matched_tokens":
            shutil.copytree(recording.log.log.directory, tmp_path / "left")

    on_hook(leave)
    use(engine)
    exit_code, out = said(command, tmp_path / "left", "--json")
    assert exit_code == 0
    (end,) = (line for line in map(json.loads, out.splitlines()) if line["type"] == "end")
    assert end["end"] == "cut_off"
    assert end["under_way"]["what"] == CALLS["get_num_new_matched_tokens"]
    _, text = said(command, tmp_path / "left")
    event = end["under_way"]["sequence"]
    assert f"{CALLS['get_num_new_matched_tokens']} since event {event} (" in text
    assert "the log does not contain the end of this call" in text
    _, whole = said(command, recording.log.log.directory)
    assert "since event" not in whole


def test_who_follows_the_log_is_told_while_the_connector_hangs(record: Record, on_hook: Any, tmp_path: Path) -> None:
    """A second process, once for the call; how the log ends comes last."""
    engine, recording = record(WITNESS, log_dir=str(tmp_path))
    is_told = threading.Event()
    on_hook(lambda hook: is_told.wait() if hook == "update_state_after_alloc" else None)
    serving = threading.Thread(target=use, args=(engine,))
    serving.start()
    command = [
        sys.executable,
        "-m",
        main.__module__,
        "show",
        "--follow",
        "--since",
        "1",
        "--json",
        recording.log.log.directory,
    ]
    try:
        with started(command, stdout=subprocess.PIPE, text=True) as follower:
            assert follower.stdout is not None
            lines = map(json.loads, follower.stdout)
            call = next(line for line in lines if line["type"] == "under_way")
            is_told.set()
            later = list(lines)
    finally:
        is_told.set()
        serving.join()
    assert call["what"] == CALLS["update_state_after_alloc"]
    assert not [line for line in later if line["type"] == "under_way"]
    assert (later[-1]["type"], later[-1]["end"], later[-1]["under_way"]) == ("end", "closed", None)
