"""VLLM's own connectors, and kvledger's, unmodified: what is known of each is what the report says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from sim.broken_copies import break_copies
from sim.versions import mended_in_0_33

from kvledger.adapters.lab.conformance.runs import findings, played, runs, unassigned
from kvledger.adapters.lab.conformance.subject import Subject

pytestmark = pytest.mark.scheduler

OFFLOADING = {"cpu_bytes_to_use": 100 * 4096}
EXAMPLE = {"shared_storage_path": "{run_dir}"}
LEDGER = {"log_dir": None, "host_bytes": 1 << 20, "chunk_size": 16}


def broken(name: str, extra_config: dict[str, Any], folder: Path, *names: str, seeds: range = range(0)) -> set[str]:
    """The obligations that the connector breaks in these runs; in all where none is named."""
    subject = Subject.named(name, extra_config)
    outcomes = [played(run, subject, folder) for run in runs(seeds) if not names or run.name in names]
    assert unassigned(outcomes) == []
    return {finding.obligation.name for finding in findings(outcomes) if finding.verdict == "broken"}


@mended_in_0_33
def test_the_session_of_offloading_connector_is_found(tmp_path: Path) -> None:
    """In the log, and where its KV is read; `tests/adapters/recorder/test_session_defect.py` has it alone."""
    scenario = "next turn of a session"
    assert broken("OffloadingConnector", OFFLOADING, tmp_path, scenario, "a plain prompt") == {
        "loaded-kv-is-right",
        "table-is-the-requests",
        "session-table-is-replaced",
    }


def test_copies_of_blocks_that_two_requests_share_stand_where_they_stand(tmp_path: Path) -> None:
    """ExampleConnector names no request, so the blocks say for whom a copy is, part by part."""
    assert broken("ExampleConnector", EXAMPLE, tmp_path, "two with one prefix") == set()


def lose_copies(_scheduler: Any, worker: Any) -> None:
    """KVLedgerConnector's next load fails, as where the host's memory is gone."""
    break_copies(SimpleNamespace(worker=worker), "load", 1)


def lose_files(scheduler: Any, _worker: Any) -> None:
    """Of ExampleConnector."""
    shutil.rmtree(scheduler._storage_path)


@pytest.mark.parametrize(
    ("name", "extra_config", "lose", "known"),
    [
        ("kvledger.adapters.vllm:KVLedgerConnector", LEDGER, lose_copies, set()),
        ("ExampleConnector", EXAMPLE, lose_files, {"hooks-do-not-raise", "failed-loads-are-reported"}),
    ],
)
def test_what_becomes_of_loads_that_fail_is_judged(
    name: str, extra_config: dict[str, Any], lose: Callable[[Any, Any], None], known: set[str], tmp_path: Path
) -> None:
    """Ours says which blocks it could not fill; ExampleConnector raises from `start_load_kv`."""
    subject = attrs.evolve(Subject.named(name, extra_config), lose=lose)
    outcomes = [played(run, subject, tmp_path) for run in runs(range(0)) if run.scenario == "what is stored is lost"]
    found = {finding.obligation.name: finding.verdict for finding in findings(outcomes)}
    assert {name for name, verdict in found.items() if verdict == "broken"} == known
    assert found["failed-loads-are-reported"] != "not judged"


SESSION = {"loaded-kv-is-right", "table-is-the-requests", "session-table-is-replaced"}
RESETS = {"hooks-do-not-raise", "reset-at-any-time"}
KNOWN = {
    "kvledger.adapters.vllm:KVLedgerConnector": (LEDGER, set()),
    "SimpleCPUOffloadConnector": ({"cpu_bytes_to_use": 100 * 512}, set()),
    "OffloadingConnector": (OFFLOADING, SESSION | RESETS),
}


@pytest.mark.long
@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_of_a_connector_is_what_is_found(name: str, tmp_path: Path) -> None:
    """Over all scenarios and some worlds."""
    extra_config, known = KNOWN[name]
    assert broken(name, extra_config, tmp_path, seeds=range(20)) == known
