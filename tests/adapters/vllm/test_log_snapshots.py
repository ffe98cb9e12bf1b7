"""The connector's log without its beginning: begun from a snapshot, it is folded, decided again and audited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Walk

from kvledger.adapters.cli.main import main
from kvledger.adapters.logs.log import open_log
from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.adapters.vllm.event_log import open_event_log
from kvledger.adapters.vllm.journal import Journal
from kvledger.lifecycle import Core, fold
from kvledger.storage.events import retire


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Let a journal write what a walk saw, into many segments: each begins with a header of 10 kB."""
    walk = Walk(5, chunk_size=8, block_size=16)
    walk.run(150)
    settings = ConnectorSettings.from_extra_config({"log_dir": str(tmp_path / "logs"), "segment_bytes": 16_384})
    opened = open_event_log(Core.standard(), settings, walk.driver.configuration)
    journal = Journal(Core.standard(), walk.driver.configuration, opened)
    for event in walk.driver.observed:
        if not event.is_decision:
            journal.observe(event)
            journal.commit()
    opened.store.close()
    (directory,) = (tmp_path / "logs").iterdir()
    assert len(list(directory.glob("*.kvlog"))) > 5
    return directory


def _verify(log: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    main(["verify", str(log), "--json"])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [record for record in records if record["type"] == "violation"], records[-1]


def _size(log: Path) -> int:
    return sum(path.stat().st_size for path in log.iterdir())


def test_each_segment_but_the_first_has_a_snapshot(log: Path) -> None:
    """So that whatever is retired, what stays can be begun."""
    segments = sorted(path.stem for path in log.glob("*.kvlog"))
    assert sorted(path.stem for path in log.glob("*.snapshot")) == segments[1:]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_what_is_left_of_a_retired_log_is_verified_from_a_snapshot(
    log: Path, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """The findings behind the snapshot are those of the whole log; the state at the end is the same."""
    expected, whole = _verify(log, capsys)
    stored = open_log(log)
    state = fold(Core.standard(), stored.trusted_events(), stored.configuration).snapshot()
    assert retire(log, max_bytes=int(_size(log) * share))
    stored = open_log(log)
    start = stored.start()
    assert start is not None
    first = stored.start_sequence + 1
    assert first > 1
    assert fold(Core.standard(), stored.trusted_events(), stored.configuration, start=start).snapshot() == state
    found, verdict = _verify(log, capsys)
    assert found == [violation for violation in expected if violation["sequence"] >= first]
    assert (verdict["num_damage"], verdict["num_divergences"]) == (0, 0)
    assert verdict["num_events_checked"] == whole["num_events_checked"] - first + 1
    assert any(f"checked from event {first} on, from a snapshot" in remark for remark in verdict["remarks"])
    assert any("were retired by size" in remark for remark in verdict["remarks"])


def test_a_damaged_snapshot_is_passed_over_for_the_next_one(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong with it is said in a remark; with none left, rules cannot be checked, and that is said."""
    retire(log, max_bytes=int(_size(log) * 0.6))
    snapshots = sorted(log.glob("*.snapshot"))
    snapshots[0].write_bytes(snapshots[0].read_bytes()[:-1])
    _, verdict = _verify(log, capsys)
    assert any(f"{snapshots[0].name}: damaged" in remark for remark in verdict["remarks"])
    assert any("from a snapshot" in remark for remark in verdict["remarks"])
    for snapshot in snapshots:
        snapshot.unlink()
    _, verdict = _verify(log, capsys)
    assert verdict["num_events_checked"] == 0
    assert any("neither rules nor decisions could be checked" in remark for remark in verdict["remarks"])


def test_replay_goes_on_from_a_snapshot(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The state at the end of what is left is that of the whole log."""
    main(["replay", str(log), "--json"])
    whole = json.loads(capsys.readouterr().out.splitlines()[0])
    retire(log, max_bytes=int(_size(log) * 0.5))
    assert main(["replay", str(log), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[0]) == whole
    assert "from a snapshot" in err
