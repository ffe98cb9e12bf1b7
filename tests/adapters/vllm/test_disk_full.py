"""The connector's log on a disk that is really full, or closed to it: serving goes on, and `verify` tells the loss."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import play_seed
from log_torture.mounts import fill, run_on_small_disk
from log_torture.verdict import assert_readable

from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.adapters.vllm.event_log import OpenedLog, open_event_log
from kvledger.lifecycle import ConfigurationError, Core, Ledger, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.storage.events import MAX_EXCESS_SEGMENTS

_SEED = 11


def _observations() -> tuple[LedgerConfiguration, list[e.Event]]:
    """What hooks saw in a walk of a few hundred steps."""
    driver = play_seed(_SEED, 200, chunk_size=8, block_size=16)
    decided = tuple(Core.standard().decisions)
    return driver.configuration, [event for event in driver.observed if not isinstance(event, decided)]


def _open(log_dir: Path, configuration: LedgerConfiguration, troubles: list[OSError]) -> OpenedLog:
    settings = ConnectorSettings.from_extra_config({"log_dir": str(log_dir), "segment_bytes": 16384})
    log = open_event_log(Core.standard(), settings, configuration)
    store: Any = log.store
    tell = store._on_trouble

    def note(error: OSError, num_events: int) -> None:
        troubles.append(error)
        tell(error, num_events)

    store._on_trouble = note
    return log


def _observe(ledger: Ledger, observations: Iterable[e.Event]) -> None:
    for event in observations:
        ledger.observe(event)
        ledger.commit()


# A walk plays doubled reports, too, so that some rules are broken in each of these logs.


def _verify(log: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, Any]]]:
    exit_code = main(["verify", str(log), "--json"])
    return exit_code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_disk_that_is_full_while_serving_costs_events_that_verify_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real file system runs full for a third of the run, longer than the backlog lasts, and across a rollover.

    Nothing is raised; all events are decided upon; afterwards the log goes on, and `verify` shows how many are lost,
    where, and why.
    """
    configuration, observations = _observations()
    third = len(observations) // 3
    disk, kept, figures = tmp_path / "disk", tmp_path / "kept", tmp_path / "figures.json"

    def serve() -> None:
        troubles: list[OSError] = []
        log = _open(disk / "logs", configuration, troubles)
        store: Any = log.store
        store._max_backlog_bytes = 3000
        ledger = Ledger(Core.standard(), configuration, store)
        _observe(ledger, observations[:third])
        ballast = fill(disk)
        _observe(ledger, observations[third : 2 * third])
        num_waiting = store.num_events_backlogged
        ballast.unlink()
        _observe(ledger, observations[2 * third :])
        store.close()
        shutil.copytree(disk / "logs", kept)
        told = {"lost": store.num_events_lost, "waiting": num_waiting, "next": ledger.next_sequence}
        figures.write_text(json.dumps({**told, "reasons": sorted({str(error) for error in troubles})}))

    run_on_small_disk(disk, 1 << 20, serve)
    told = json.loads(figures.read_text())
    assert told["lost"] > 100
    assert told["waiting"] > 0
    assert told["reasons"] == ["[Errno 28] No space left on device"]
    exit_code, records = _verify(kept, capsys)
    assert exit_code == 2
    damage = [record for record in records if record["type"] == "damage"]
    assert {record["kind"] for record in damage} == {"lost_events"}
    assert sum(int(record["detail"].split()[0]) for record in damage) == told["lost"]
    assert all("while writing failed: [Errno 28] No space left on device" in record["detail"] for record in damage)
    verdict = records[-1]
    assert verdict["num_events"] + told["lost"] == told["next"] - 1
    (directory,) = kept.iterdir()
    assert len(list(directory.glob("*.kvlog"))) > 3
    assert not list(directory.glob("*.unfinished"))


def test_a_full_disk_is_no_reason_to_refuse_a_start_and_is_named_before_it(tmp_path: Path) -> None:
    """With the directory, the reason and the remedy; nothing is left where there was room."""

    def look() -> None:
        settings = ConnectorSettings.from_extra_config({"log_dir": str(tmp_path / "disk" / "new" / "logs")})
        assert settings.refuse_log_dir() == ""
        assert not list((tmp_path / "disk").iterdir())
        fill(tmp_path / "disk")
        warning = settings.refuse_log_dir()
        assert re.search(r"the disk of log_dir '.*/new/logs' is full \(No space left on device\): at start", warning)
        assert "lower max_log_bytes, or delete other files" in warning

    run_on_small_disk(tmp_path / "disk", 1 << 16, look)


def test_all_logs_of_a_directory_keep_to_their_size_while_one_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier starts go first, then the oldest segments of one's own; what is left is undamaged."""
    configuration, observations = _observations()
    extra_config = {"log_dir": str(tmp_path), "segment_bytes": 16384, "max_log_bytes": 3 * 16384}

    def segment_bytes() -> int:
        num_bytes = 0
        for folder, _, names in os.walk(tmp_path):  # which passes over folders that go while it walks
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # retired since it was listed
                    num_bytes += Path(folder, name).stat().st_size if name.endswith(".kvlog") else 0
        return num_bytes

    sizes = []
    for _ in range(3):
        settings = ConnectorSettings.from_extra_config(extra_config)
        log = open_event_log(Core.standard(), settings, configuration)
        ledger = Ledger(Core.standard(), configuration, log.store)
        for event in observations:
            _observe(ledger, [event])
            sizes.append(segment_bytes())
        log.store.close()
    assert 3 * 16384 < max(sizes) <= (3 + MAX_EXCESS_SEGMENTS) * 16384
    left = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    for path in left:
        _, records = _verify(path, capsys)
        assert records[-1]["num_damage"] == 0
        assert_readable(path)
    assert any("were retired by size" in remark for remark in records[-1]["remarks"])


def test_segments_that_are_hardly_more_than_headers_are_refused_with_the_figures(tmp_path: Path) -> None:
    """Each would hold a frame or two; the smallest that is allowed has half of the room that its header takes."""
    with pytest.raises(ConfigurationError, match=r"segment_bytes: .*header of about 11 kB; write '16KiB' or more"):
        ConnectorSettings.from_extra_config({"segment_bytes": 16383})
    _open(tmp_path, _observations()[0], []).store.close()
    (segment,) = tmp_path.glob("*/*.kvlog")
    assert 10_000 < segment.stat().st_size < 11_500


@pytest.mark.parametrize("max_log_bytes", ["1MiB", "64MiB", "191MiB"])
def test_a_size_that_is_too_small_for_a_reader_is_refused_with_the_figures(max_log_bytes: str) -> None:
    """A server whose `max_log_bytes` equaled one segment left logs that nobody could check."""
    reason = r"max_log_bytes: .*a log needs 3 segments of 64MiB to be readable: .*write '192MiB' or more, or lower"
    with pytest.raises(ConfigurationError, match=reason):
        ConnectorSettings.from_extra_config({"max_log_bytes": max_log_bytes})
    assert ConnectorSettings.from_extra_config({"max_log_bytes": "192MiB"})


def test_a_size_that_is_too_small_for_the_logs_of_all_engines_is_refused_with_the_figures() -> None:
    """Data-parallel engines share a `log_dir`, and a recorder's workers write logs of their own."""
    settings = ConnectorSettings.from_extra_config({"max_log_bytes": "1GiB"})
    settings.refuse_few_segments(5)
    with pytest.raises(
        ConfigurationError,
        match=r"max_log_bytes: '1GiB': is too small: this server writes 8 logs at once, and each needs 3 segments of "
        r"64MiB to be readable; write '1536MiB' or more, or lower segment_bytes",
    ):
        settings.refuse_few_segments(8)
