"""A store opens regular files of its directory and nothing else, also while somebody exchanges them."""

from __future__ import annotations

import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from planted_files import CONTENT, FOREIGN, KINDS, plant

from kvledger.storage.events import (
    Durability,
    LogError,
    Maintenance,
    SegmentEventStore,
    is_being_written,
    read_log,
    retire,
    retire_logs,
)
from kvledger.storage.events.files import (
    RefusedFile,
    append_line,
    directories_in,
    links_in,
    make_directory,
    open_for_reading,
    opened_directory,
    write_file,
)
from kvledger.storage.events.retirements import read_retirements

pytestmark = pytest.mark.timeout(300)  # ends what waits for a pipe


def _closed(directory: Path, num_events: int = 40) -> Path:
    store = SegmentEventStore.create(directory, {"n": 1}, segment_bytes=600)
    for number in range(num_events):
        store.append(b"%060d" % number, 1)
    store.close()
    return directory


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["writer.lock", "log.end", "retired.jsonl", "00000000000000000001.unfinished"])
def test_a_log_is_begun_without_writing_into_what_is_in_its_directory_already(
    tmp_path: Path, name: str, kind: str
) -> None:
    """What a crash may have left is removed first. Otherwise the error names the file, and there is no log."""
    directory = tmp_path / "log"
    directory.mkdir()
    planted = plant(directory / name, kind, tmp_path / "victim")
    is_replaced = kind == "hard link" and name in {"writer.lock", "retired.jsonl"}  # or only locked
    if is_replaced or (name.endswith(".unfinished") and kind != "directory"):
        store = SegmentEventStore.create(directory, {"n": 1})
        store.append(b"an event", 1)
        store.close()
        assert [frame.payload for frame in read_log(directory)] == [b"an event"]
    else:
        with pytest.raises(OSError, match=re.escape(str(directory / name))):
            SegmentEventStore.create(directory, {"n": 1})
        assert list(directory.glob("*.kvlog")) == []
    planted.check_untouched()


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_regular_file_is_refused_with_its_name_a_reason_and_a_remedy(tmp_path: Path, kind: str) -> None:
    """Nothing is opened; a log with such a lock file counts as one that is not written."""
    planted = plant(tmp_path / "writer.lock", kind, tmp_path / "victim")
    with pytest.raises(RefusedFile, match=r"writer\.lock: is a .*; remove "):
        open_for_reading(planted.path)
    with pytest.raises(RefusedFile, match=r"writer\.lock: is a .*; remove "):
        append_line(planted.path, b"a line")
    assert not is_being_written(tmp_path)
    planted.check_untouched()


def test_a_file_with_a_second_name_is_read_and_not_written(tmp_path: Path) -> None:
    """Backups made of hard links can be read."""
    planted = plant(tmp_path / "retired.jsonl", "hard link", tmp_path / "victim")
    os.close(open_for_reading(planted.path))
    with pytest.raises(RefusedFile, match=r"has 2 names .*; copy the log directory"):
        append_line(planted.path, b"a line")
    planted.check_untouched()
    write_file(planted.path, b"new", durable=False)
    planted.check_untouched()
    assert planted.path.read_bytes() == b"new"


@contextmanager
def _exchanged(path: Path, others: list[Path]) -> Iterator[None]:
    """What is at `path` changes all the time."""
    is_over = threading.Event()

    def exchange() -> None:
        while not is_over.is_set():
            for other in others:
                spare = path.with_name("spare")
                spare.unlink(missing_ok=True)
                if other.is_symlink():
                    spare.symlink_to(other.readlink())
                else:
                    spare.write_bytes(other.read_bytes())
                spare.rename(path)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_file_that_is_exchanged_for_a_link_at_any_moment_is_not_followed(tmp_path: Path) -> None:
    """A look before opening is not enough: the link may come after it."""
    victim, plain, link = tmp_path / "victim", tmp_path / "plain", tmp_path / "link"
    victim.write_bytes(CONTENT)
    plain.write_bytes(b"a line\n")
    link.symlink_to(victim)
    directory = tmp_path / "log"
    directory.mkdir()
    with _exchanged(directory / "retired.jsonl", [plain, link]):
        for _ in range(2000):
            with suppress(OSError):
                append_line(directory / "retired.jsonl", b"written")
            with suppress(OSError), os.fdopen(open_for_reading(directory / "retired.jsonl"), "rb") as file:
                assert b"precious" not in file.read()
    assert victim.read_bytes() == CONTENT


def test_a_directory_that_is_exchanged_after_it_was_found_keeps_its_files(tmp_path: Path) -> None:
    """Files are deleted in the directory that was looked at, whatever its name leads to by now."""
    found, other = _closed(tmp_path / "found"), _closed(tmp_path / "other")
    status = found.lstat()
    found.rename(tmp_path / "moved")
    for replace in (lambda: found.symlink_to(other), lambda: shutil.copytree(other, found)):
        replace()
        with (
            pytest.raises(OSError, match=r"Not a directory|Too many levels|was replaced"),
            opened_directory(found, status),
        ):
            pytest.fail("it was opened")
        found.unlink() if found.is_symlink() else shutil.rmtree(found)


def test_a_linked_directory_is_no_log_of_its_directory(tmp_path: Path) -> None:
    """Neither counted nor deleted, and reported; a link to a neighbour is the neighbour."""
    elsewhere = _closed(tmp_path / "mine" / "log")
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    box = tmp_path / "box"
    _closed(box / "a")
    (box / "x").symlink_to(elsewhere)
    (box / "latest").symlink_to("a")
    assert [path.name for path in directories_in(box)] == ["a"]
    assert [path.name for path in links_in(box)] == ["x"]
    errors: list[Exception] = []
    assert retire_logs(box, max_bytes=0, on_trouble=errors.append)
    (error,) = errors
    assert str(error).startswith(f"{box / 'x'}: is a symbolic link, which kvledger does not follow; remove the link")
    assert not (box / "a").exists()
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before


def test_links_and_what_they_lead_to_do_not_count_towards_the_size_of_logs(tmp_path: Path) -> None:
    """A link to a large file made retention delete every segment of the others."""
    logs = tmp_path / "logs"
    kept = _closed(logs / "a")
    large = tmp_path / "large"
    large.touch()
    os.truncate(large, 1 << 40)
    planted = _closed(logs / "b", 1)
    (planted / f"{9:020d}.snapshot").symlink_to(large)
    (planted / f"{9:020d}.kvlog").symlink_to(large)
    assert retire_logs(logs, max_bytes=1 << 30) == []
    assert list(read_log(kept))


def test_a_log_that_is_named_through_a_link_is_retired(tmp_path: Path) -> None:
    """The path that is given may be a link."""
    log = _closed(tmp_path / "log")
    (tmp_path / "link").symlink_to(log)
    assert retire(tmp_path / "link", max_bytes=0)
    assert len(list(log.glob("*.kvlog"))) == 1


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
@pytest.mark.parametrize("durability", list(Durability))
def test_directories_of_logs_are_0755_and_files_0644_at_most(
    tmp_path: Path, umask: int, durability: Durability
) -> None:
    """With umask 0 they were 0777, and every local user could replace a log."""
    before = os.umask(umask)
    try:
        store = SegmentEventStore.create(tmp_path / "a" / "b" / "log", {"n": 1}, durability, segment_bytes=600)
        for number in range(20):
            store.append(b"%060d" % number, 1)
        store.close()
        retire(store.directory, max_bytes=1000)
        make_directory(tmp_path / "private" / "inner", durable=False, mode=0o700)
    finally:
        os.umask(before)
    directories = [tmp_path / "a", tmp_path / "a" / "b", store.directory]
    assert {stat.S_IMODE(path.stat().st_mode) for path in directories} == {0o755 & ~umask}
    assert {stat.S_IMODE(path.stat().st_mode) for path in store.directory.iterdir()} == {0o644 & ~umask}
    private = [tmp_path / "private", tmp_path / "private" / "inner"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o700 & ~umask}


def test_a_file_that_cannot_be_deleted_is_named_with_its_path(tmp_path: Path) -> None:
    """What stands in the way is to be found."""
    log = _closed(tmp_path / "logs" / "a")
    in_the_way = log / "00000000000000000001.unfinished"
    in_the_way.mkdir()
    errors: list[OSError] = []
    retire_logs(tmp_path / "logs", max_bytes=0, on_trouble=errors.append)  # type: ignore[arg-type]
    (error,) = errors
    assert error.filename == str(in_the_way)
    assert in_the_way.is_dir()


def _copied_with_hard_links(log: Path, target: Path) -> dict[str, bytes]:
    """What `cp -al` does; returns what the files hold."""
    target.mkdir(parents=True)
    for path in log.iterdir():
        (target / path.name).hardlink_to(path)
    return {path.name: path.read_bytes() for path in log.iterdir()}


def test_a_log_keeps_to_its_limit_after_it_was_copied_with_hard_links(tmp_path: Path) -> None:
    """Incident: after `cp -al` of a `log_dir` nothing was retired there any more, and logs grew without limit."""
    errors: list[OSError | LogError] = []
    store = SegmentEventStore.create(
        tmp_path / "logs" / "log", {"n": 1}, segment_bytes=600, maintenance=Maintenance(2400, on_trouble=errors.append)
    )
    for number in range(40):
        store.append(b"%060d" % number, 1)
    before = _copied_with_hard_links(store.directory, tmp_path / "backup" / "log")
    for number in range(40):
        store.append(b"%060d" % number, 1)
    store.close()
    assert errors == []
    assert sum(path.stat().st_size for path in store.directory.glob("*.kvlog")) <= 3000
    assert (tmp_path / "backup" / "log" / "retired.jsonl").read_bytes() == before["retired.jsonl"]
    assert len(read_retirements(store.directory)) > len(before["retired.jsonl"].splitlines())


def test_a_closed_log_is_retired_after_it_was_copied_with_hard_links_and_the_copy_stays(tmp_path: Path) -> None:
    """Alone and among others; the record goes on where it was."""
    logs = tmp_path / "logs"
    log = _closed(logs / "log")
    assert retire(log, max_bytes=4000)
    before = _copied_with_hard_links(log, tmp_path / "backup" / "log")
    num_retired = len(read_retirements(log))
    found = retire(log, max_bytes=2000)
    assert read_retirements(log)[num_retired:] == found != []
    assert retire_logs(logs, max_bytes=0)
    assert not log.exists()
    assert {path.name: path.read_bytes() for path in (tmp_path / "backup" / "log").iterdir()} == before


def test_a_record_with_hard_links_is_replaced_by_one_that_holds_nothing_foreign(tmp_path: Path) -> None:
    """A hard link to a file that is private to its owner made a readable copy of that."""
    log = _closed(tmp_path / "log")
    planted = plant(log / "retired.jsonl", "hard link", tmp_path / "victim")
    found = retire(log, max_bytes=0)
    assert read_retirements(log) == found != []
    assert b"precious" not in planted.path.read_bytes()
    planted.check_untouched()
