"""The connector's log without its beginning: begun from a snapshot, it is folded, decided again and audited."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from lifecycle_driver import play_seed

from kvledger.adapters.core import composed_core
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.exit_codes import CommandFailed
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.snapshots import write_snapshots
from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.adapters.vllm.event_log import open_event_log
from kvledger.adapters.vllm.journal import Journal
from kvledger.adapters.vllm.messages import messages
from kvledger.adapters.vllm.snapshots import SnapshotProcess
from kvledger.lifecycle import Core, fold
from kvledger.storage.events import MemoryEventStore, SegmentEventStore, retire, segments_without_snapshot


def _written(tmp_path: Path, core: Core) -> Path:
    """Let a journal write what a walk saw, into many segments: each begins with a header of 10 kB."""
    driver = play_seed(5, 150, chunk_size=8, block_size=16)
    opened = open_event_log(core, ConnectorSettings(log_dir=None), driver.configuration)
    directory = tmp_path / "log"
    assert isinstance(opened.store, MemoryEventStore)
    header = {key: value for key, value in opened.store.header.items() if key != "log_id"}
    store = SegmentEventStore.create(directory, header, segment_bytes=16_384)
    journal = Journal(core, driver.configuration, attrs.evolve(opened, store=store))
    for event in driver.observed:
        if not event.is_decision:
            journal.observe(event)
            journal.commit()
    store.close()
    assert len(list(directory.glob("*.kvlog"))) > 5
    return directory


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """One with its snapshots."""
    directory = _written(tmp_path, Core.standard())
    assert write_snapshots(open_log(directory)) > 4
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
    projections = start.projections(stored.core, stored.configuration)
    assert fold(stored.core, stored.trusted_events(), stored.configuration, start=projections).snapshot() == state
    found, verdict = _verify(log, capsys)
    for violation in (*expected, *found):
        del violation["finding"]  # may begin in front of the snapshot
    assert found == [violation for violation in expected if violation["sequence"] >= first]
    assert (verdict["num_damage"], verdict["num_divergences"]) == (0, 0)
    assert verdict["num_events_checked"] == whole["num_events_checked"] - first + 1
    assert any(f"checked from event {first} on, beginning from a snapshot" in remark for remark in verdict["remarks"])
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


def test_a_state_goes_on_from_a_snapshot(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The state at the end of what is left is that of the whole log."""
    main(["show", str(log), "--json", "--at", "1000000"])
    whole = json.loads(capsys.readouterr().out.splitlines()[0])
    retire(log, max_bytes=int(_size(log) * 0.5))
    assert main(["show", str(log), "--json", "--at", "1000000"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[0]) == whole
    assert "from a snapshot" in err


def _snapshots(log: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in log.glob("*.snapshot")}


def test_a_process_of_its_own_makes_the_snapshots_of_a_log(log: Path) -> None:
    """The same bytes as here. It is told how the log was begun, and leaves alone what is there."""
    expected = _snapshots(log)
    for name in sorted(expected)[1:]:
        (log / name).unlink()
    first = log / min(expected)
    written_ns = first.stat().st_mtime_ns
    SnapshotProcess(Core.standard()).make(log)
    assert _snapshots(log) == expected
    assert first.stat().st_mtime_ns == written_ns


def test_it_folds_with_the_engines_own_handlers_and_extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are imported from where the engine imported them, and the log is read with them."""
    examples = Path(__file__).parents[3] / "docs" / "examples"
    monkeypatch.syspath_prepend(examples)
    monkeypatch.syspath_prepend(examples / "starvation_guard")
    names = ("save_when_preempted:SaveWhenPreempted",), ("starvation_guard:StarvationGuard",)
    core = composed_core(*names)
    log = _written(tmp_path, core)
    SnapshotProcess(core).make(log)
    assert segments_without_snapshot(log) == []
    retire(log, max_bytes=int(_size(log) * 0.5))
    stored = open_log(log, core)
    assert stored.start() is not None, stored.start_remarks


PLANTED = "import pathlib; pathlib.Path(__file__).with_name('ran').touch(); raise SystemExit('planted')"


def plant(folder: Path) -> None:
    """Put modules there that hide those which every Python process and every command imports."""
    for name in ("argparse", "json", "sitecustomize", "usercustomize", "kvledger", "msgspec"):
        (folder / f"{name}.py").write_text(PLANTED)


@pytest.mark.parametrize("first", [(), ("",), (".",), None], ids=["script", "-c", "relative", "-m"])
def test_no_module_of_the_servers_working_directory_runs_in_the_process(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: tuple[str, ...] | None
) -> None:
    """Incident: a server ran in a folder that others could write to, and the process imported their argparse."""
    folder = tmp_path / "shared"
    folder.mkdir()
    plant(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*((str(folder),) if first is None else first), *sys.path])
    for path in log.glob("*.snapshot"):
        path.unlink()
    SnapshotProcess(Core.standard()).make(log)
    assert not (folder / "ran").exists()
    assert segments_without_snapshot(log) == []


@pytest.mark.parametrize("is_named", [False, True], ids=["python -m", "PYTHONPATH"])
def test_handlers_of_the_servers_working_directory_are_found_and_hide_no_other_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    """As after `python -m vllm…` in the folder of a project: what the server imported, the process can import."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "own_handlers.py").write_text(
        "from kvledger.lifecycle.handlers import Preempted\n\n\nclass Own(Preempted):\n    pass\n"
    )
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    core = composed_core(("own_handlers:Own",), ())
    if is_named:
        monkeypatch.setenv("PYTHONPATH", str(folder))
    else:
        (folder / "argparse.py").write_text(PLANTED)
    log = _written(tmp_path, core)
    SnapshotProcess(core).make(log)
    sys.modules.pop("own_handlers")
    assert segments_without_snapshot(log) == []
    assert not (folder / "ran").exists()


def test_the_next_snapshot_is_made_from_the_last(log: Path) -> None:
    """What was folded once is not read again: it may be retired by then."""
    expected = _snapshots(log)
    newest = max(expected)
    (log / newest).unlink()
    retire(log, max_bytes=int(_size(log) * 0.5))
    assert write_snapshots(open_log(log)) == 1
    assert _snapshots(log)[newest] == expected[newest]


def test_behind_events_that_are_missing_no_snapshot_is_made(log: Path) -> None:
    """The state there is not known; what lies before has its own, and the process says why, and raises nothing."""
    expected = _snapshots(log)
    for name in expected:
        (log / name).unlink()
    segments = sorted(log.glob("*.kvlog"))
    segments[2].unlink()
    with pytest.raises(CommandFailed, match="missing or damaged"):
        write_snapshots(open_log(log))
    assert _snapshots(log) == {f"{segments[1].stem}.snapshot": expected[f"{segments[1].stem}.snapshot"]}


def test_a_process_that_fails_is_a_message_and_nothing_else(log: Path, told: pytest.LogCaptureFixture) -> None:
    """Nothing depends on a snapshot, least of all the engine."""
    for path in sorted(log.glob("*.kvlog"))[1:3]:
        path.with_suffix(".snapshot").unlink()
    min(log.glob("*.kvlog")).unlink()
    SnapshotProcess(Core.standard()).make(log)
    assert "snapshots could not be made; the log is not affected" in told.text
    assert "missing or damaged" in told.text


def test_a_process_that_was_stopped_makes_nothing_any_more(log: Path) -> None:
    """As when the engine shuts down."""
    newest = max(log.glob("*.snapshot"))
    newest.unlink()
    process = SnapshotProcess(Core.standard())
    process.stop()
    process.make(log)
    assert not newest.exists()


def test_what_the_connector_tells_operators_shows_no_credentials(told: pytest.LogCaptureFixture) -> None:
    """Errors of libraries quote addresses, and vLLM's log goes far."""
    messages.warning("it failed", error="cannot reach redis://user:p/hunter2@host:6379/0?token=hunter2")
    assert "cannot reach redis://host:6379/0" in told.text
    assert "hunter2" not in told.text
