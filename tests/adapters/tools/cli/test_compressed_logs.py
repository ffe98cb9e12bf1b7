"""Every command says of a compressed log what it says of the raw one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from log_torture import reopened
from log_torture.stored import compress_closed, compressed_copy, is_compressed
from stored_logs import serve_many, write_log

from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.adapters.tools.logs import index as index_module
from kvledger.adapters.tools.logs.index import build_index, open_index
from kvledger.adapters.tools.logs.index_builder import earlier_contents
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.snapshots import write_snapshots
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events
from kvledger.storage.events import read_log
from kvledger.storage.events.segment_bytes import num_written_bytes
from kvledger.storage.events.segment_file import segment_paths

_REQUEST = "r777"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of several segments, each but the first with a snapshot."""
    driver = serve_many(800)
    log = write_log(
        tmp_path_factory.mktemp("raw") / "log", driver.observed, driver.configuration, segment_bytes=100_000
    )
    write_snapshots(open_log(log))
    assert len(segment_paths(log)) > 3
    return log


@pytest.fixture
def compressed(raw: Path, tmp_path: Path) -> Path:
    """The same, compressed as its writer does."""
    log = compressed_copy(raw, tmp_path / "log")
    assert sum(map(is_compressed, segment_paths(log))) == len(segment_paths(log)) - 1
    return log


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify",),
        ("verify", "--json"),
        ("verify", "--jobs", "2"),
        ("show",),
        ("show", "--json"),
        ("show", "--json", "--since", "900"),
        ("stats", "--json"),
        ("show", "--at", "900"),
        ("why", _REQUEST),
        ("why", "--json", _REQUEST),
        ("show", _REQUEST),
        ("show", "--follow", "--json"),
        ("export", "--perfetto"),
    ],
)
def test_a_command_says_the_same_of_both_forms(
    run: Any, raw: Path, compressed: Path, arguments: tuple[str, ...]
) -> None:
    """Also the sizes and places that it prints: those of the bytes that were written."""
    command, *rest = arguments
    of_raw, of_compressed = run(command, raw, *rest), run(command, compressed, *rest)
    assert of_compressed.exit_code == of_raw.exit_code == 0, of_compressed.err
    assert of_compressed.out.replace(str(compressed), "LOG") == of_raw.out.replace(str(raw), "LOG")


@pytest.mark.parametrize("arguments", [("show", "--json", _REQUEST), ("why", _REQUEST)])
def test_an_index_says_the_same_of_both_forms(
    run: Any, raw: Path, compressed: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """It reads from the places that it noted, in the middle of blocks."""
    without = run(arguments[0], raw, *arguments[1:])
    monkeypatch.setattr(index_module, "INDEX_FROM_BYTES", 0)
    for _ in ("built", "used"):
        assert run(arguments[0], compressed, *arguments[1:]).out == without.out


def test_an_index_outlives_the_compression_of_its_segments(raw: Path, tmp_path: Path) -> None:
    """Also of a segment that was the last one when the index was made: it is continued, not built anew."""
    log = tmp_path / "log"
    shutil.copytree(raw, log)
    build_index(open_log(log)).close()
    compress_closed(log)
    index = open_index(open_log(log))
    assert index is not None
    index.close()
    store = reopened(log, segment_bytes=1)
    for number in range(2):
        store.append(encode_events([e.RequestArrived(f"late-{number}", 900 + number, 7, 10**9)]), 1)
    store.close()
    compress_closed(log)
    assert sum(map(is_compressed, segment_paths(log))) == len(segment_paths(raw))
    assert open_index(open_log(log)) is None
    assert earlier_contents(open_log(log)) is not None


def test_files_count_as_they_are_and_progress_as_they_were_written(run: Any, raw: Path, compressed: Path) -> None:
    """`ls` and `retire` print the bytes of files."""
    stored = sum(path.stat().st_size for path in segment_paths(compressed))
    written = sum(path.stat().st_size for path in segment_paths(raw))
    assert stored < 0.8 * written
    (listed,) = (json.loads(line) for line in run("ls", "--json", compressed.parent).out.splitlines())
    assert listed["num_bytes"] == stored
    assert open_log(compressed).total_bytes() == sum(map(num_written_bytes, segment_paths(compressed))) == written
    first = segment_paths(compressed)[0].stat().st_size
    (retired, *_) = (
        json.loads(line) for line in run("retire", "--json", compressed, "--max-bytes", stored - 1).out.splitlines()
    )
    assert retired["num_bytes"] == first
    assert run("verify", compressed).exit_code == 0


def test_a_damaged_block_is_named_with_its_place(run: Any, compressed: Path) -> None:
    """One flipped bit costs one block, the kind says that it is one, and the exit code is that of damage."""
    segment = segment_paths(compressed)[1]
    data = bytearray(segment.read_bytes())
    data[-100] ^= 1
    segment.write_bytes(data)
    result = run("verify", compressed)
    assert result.exit_code == ExitCode.DAMAGED
    assert f"corrupt_block in {segment.name}" in result.out
    assert "does not match" in result.out
    reader = read_log(compressed)
    lost = [one.next_sequence for one in reader]
    assert len(reader.damage) == 1
    assert lost
