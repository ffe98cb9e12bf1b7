"""Exported traces in Perfetto's own UI and engine, which know best what they can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from headless_browser import Page
from perfetto_ui import open_in_perfetto
from trace_importer import read_trace

from kvledger.adapters.tools.logs.sources import find_logs

pytestmark = pytest.mark.xdist_group("browser")

RECOVERY = ["preempted", "load", "running"]
"""The states that the arrows of a request join that comes back by an asynchronous load."""


@pytest.mark.scheduler
def test_perfetto_opens_a_trace_without_a_complaint(
    run: Any, worlds: dict[int, Path], page: Page, perfetto_wheel: Path, tmp_path: Path
) -> None:
    """No import error, and as many slices, arrows and counter values as the importer of the other tests finds."""
    path = tmp_path / "trace.json"
    for log in [log for directory in worlds.values() for log in find_logs(directory)]:
        assert run("export", log, "--perfetto", "-o", path).exit_code == 0
        expected = read_trace(path)
        if any([found.name for found in flow.slices][:3] == RECOVERY for flow in expected.flows):
            break
        path.unlink()
    else:
        pytest.fail("in no world a preempted request recovers by a load that runs asynchronously")
    with open_in_perfetto(perfetto_wheel, path, page) as perfetto:
        complaints = "select name, value from stats where severity != 'info' and value > 0"
        assert perfetto.query(complaints) == []
        num_slices = len(expected.slices) + len(expected.instants) + len(expected.copies)
        assert perfetto.query("select count(*) from slice") == [[num_slices]]
        assert perfetto.query("select count(*) from slice where dur < 0") == [[0]]
        num_steps_of_arrows = sum(len(flow.slices) - 1 for flow in expected.flows)
        assert perfetto.query("select count(*) from flow") == [[num_steps_of_arrows]]
        num_values = sum(len(values) for values in expected.counters.values())
        assert perfetto.query("select count(*) from counter") == [[num_values]]
        names = perfetto.query(
            "select distinct t.name from slice s join thread_track k on s.track_id = k.id "
            "join thread t using (utid) join process p using (upid) where p.name = 'requests'"
        )
        tracks = {found.track for found in expected.slices if found.process == "requests"}
        assert {name for (name,) in names} == tracks
        arrows = perfetto.query(
            "select a.name, b.name from flow f join slice a on f.slice_out = a.id "
            "join slice b on f.slice_in = b.id group by 1, 2"
        )
        assert ["preempted", "load"] in arrows
        assert ["load", "running"] in arrows
