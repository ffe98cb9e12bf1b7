"""The index of a large log: the same answers as without it, and nothing lost when it goes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lifecycle_driver import Driver, play_seed
from log_torture import reopened
from stored_logs import write_log

from kvledger.adapters.tools.logs import index as index_module
from kvledger.adapters.tools.logs import index_builder, index_file
from kvledger.adapters.tools.logs.index import build_index, index_path, open_index
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.snapshots import write_snapshots
from kvledger.adapters.tools.reasons import Accounts
from kvledger.adapters.tools.reasons.memory import Tail
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events
from kvledger.lifecycle.reader import stored as stored_states
from kvledger.storage.events import retire
from kvledger.storage.events.segment_file import segment_paths


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every log, however small, gets an index."""
    monkeypatch.setattr(index_module, "INDEX_FROM_BYTES", 0)
    monkeypatch.setattr(index_module, "BATCHES_PER_PLACE", 3)
    monkeypatch.setattr(index_builder, "BATCHES_PER_PLACE", 3)


def walked(directory: Path, seed: int) -> tuple[Path, Driver]:
    """The log of a random walk, in small segments, with everything that can happen to a request."""
    print(f"seed {seed}")
    driver = play_seed(seed, 70, chunk_size=16, block_size=16)
    return write_log(directory, driver.observed, driver.configuration, segment_bytes=16_000), driver


def answers(run: Any, log: Path, request_ids: list[str]) -> list[Any]:
    """What `show` tells of a log in every way."""
    moments = ["2us", "40us", "0s", "1h"]
    return [
        run("show", log),
        run("show", "--json", log),
        run("show", "--json", "--since", 200, log),
        *(run("show", "--json", log, request_id) for request_id in request_ids),
        *(run("show", "--json", log, request_ids[0], "--since", since) for since in moments),
        *(run("show", "--json", log, request_ids[0], "--until", until) for until in moments),
        run("show", log, "nobody"),
    ]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_an_index_changes_no_answer(run: Any, tmp_path: Path, request: Any, seed: int) -> None:
    """Of the whole log, of every request in it, between any two moments."""
    log, driver = walked(tmp_path / "log", seed)
    ids = list(dict.fromkeys(event.request_id for event in driver.observed if hasattr(event, "request_id")))
    request_ids = [request_id for request_id in ids if request_id]
    without = answers(run, log, request_ids)
    request.getfixturevalue("indexed")
    assert answers(run, log, request_ids) == without
    assert index_path(open_log(log)).exists()


def test_steps_that_name_no_request_are_shown_up_to_the_end_of_a_log(run: Any, tmp_path: Path, request: Any) -> None:
    """A request that still decodes is in them."""
    driver = Driver()
    driver.start("a", (), 17, (1, 2))
    for num_tokens in range(18, 22):
        driver.step(*([("a", 17, 1, 18)] if num_tokens == 18 else []))
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    without = run("show", log, "a")
    assert "decoded 4 tokens in 4 steps (17 → 21)" in without.out
    request.getfixturevalue("indexed")
    assert run("show", log, "a") == without


@pytest.mark.usefixtures("indexed")
def test_a_deleted_index_is_built_again(run: Any, log: Path, cache: Path) -> None:
    """It may go at any time."""
    first = run("show", log, "chat-17")
    shutil.rmtree(cache)
    assert run("show", log, "chat-17") == first


@pytest.mark.parametrize("contents", [b"", b"no database", b"SQLite format 3\x00" + bytes(200)])
@pytest.mark.usefixtures("indexed")
def test_what_is_no_index_is_replaced(run: Any, log: Path, contents: bytes) -> None:
    """A file cut short, or somebody else's."""
    without = run("show", log, "chat-17").out
    path = index_path(open_log(log))
    path.write_bytes(contents)
    assert run("show", log, "chat-17").out == without
    assert open_index(open_log(log)) is not None


@pytest.mark.usefixtures("indexed")
def test_an_index_of_a_log_that_has_grown_is_not_used(story: Driver, tmp_path: Path) -> None:
    """What was appended since would be missing."""
    half = len(story.observed) // 2
    before = write_log(tmp_path / "log", story.observed[:half], story.configuration)
    build_index(open_log(before)).close()
    (segment,) = segment_paths(before)
    segment.write_bytes(segment.read_bytes() + b"\xf5K")
    assert open_index(open_log(before)) is None


@pytest.mark.usefixtures("indexed")
def test_a_request_that_has_ended_is_shown_from_an_earlier_index(run: Any, story: Driver, tmp_path: Path) -> None:
    """A log that is being written outgrows its index at every step; one that lives on needs a new index."""
    log = write_log(tmp_path / "log", story.observed, story.configuration)
    shown = {name: run("show", log, name).out for name in ("chat-17", "chat-9")}
    before = index_path(open_log(log)).stat().st_mtime_ns
    store = reopened(log)
    later = e.RequestArrived("late", 99, 7, 10**9)
    store.append(encode_events([later]), 1)
    store.close()
    ended = run("show", log, "chat-17")
    assert ended.out == shown["chat-17"]
    assert f"described up to event {len(story.observed)}" in ended.err
    assert index_path(open_log(log)).stat().st_mtime_ns == before
    assert run("show", log, "chat-9").out.splitlines()[2:] == shown["chat-9"].splitlines()[2:], (
        "but for its time so far"
    )
    assert index_path(open_log(log)).stat().st_mtime_ns > before
    assert "arrived with 7 prompt tokens" in run("show", log, "late").out


def lines(answered: list[Any]) -> list[list[str]]:
    """What was printed, but for what is missing before a log's first event: an index does not say that."""
    return [[line for line in each.out.splitlines() if '"what":"lost"' not in line] for each in answered]


def tokens_needed(run: Any, log: Path, request_ids: list[str]) -> list[list[int]]:
    """Of each life of each request. Which reasons they have may differ: an index knows chunks from before."""
    totals = (run("why", "--json", log, request_id).objects("total") for request_id in request_ids)
    return [[total["num_tokens_needed"] for total in its] for its in totals]


@pytest.mark.parametrize("seed", [4, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(7, 14))])
def test_an_index_goes_on_where_the_oldest_segments_were_retired(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any, seed: int
) -> None:
    """Each retirement made the index of a log at its limit worthless, and the whole log was read again."""
    log, driver = walked(tmp_path / "log", seed)
    write_snapshots(open_log(log))
    request.getfixturevalue("indexed")
    build_index(open_log(log)).close()
    kept = segment_paths(log)[len(segment_paths(log)) // 2]
    assert retire(log, max_bytes=sum(file.stat().st_size for file in log.glob("0*") if file.name >= kept.name))
    request_ids = list(dict.fromkeys(event.request_id for event in driver.all_of(e.RequestArrived)))
    for num_appended in (0, 1):
        append(log, [e.LogNote("later", 1)] * num_appended)
        opened = open_log(log)
        if num_appended:
            assert open_index(opened) is None
            build_index(opened).close()
        assert opened.num_events == num_appended, "what the index knows is not read again"
        index = open_index(open_log(log))
        assert index is not None
        index.close()
        with_index, needed = answers(run, log, request_ids), tokens_needed(run, log, request_ids)
        with monkeypatch.context() as patched:
            patched.setattr(index_module, "INDEX_FROM_BYTES", 1 << 40)
            assert lines(answers(run, log, request_ids)) == lines(with_index)
            assert tokens_needed(run, log, request_ids) == needed


@pytest.mark.usefixtures("indexed")
def test_an_index_of_another_format_is_not_used(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version builds its own."""
    build_index(open_log(log)).close()
    monkeypatch.setattr(index_file, "INDEX_FORMAT", index_file.INDEX_FORMAT + 1)
    assert open_index(open_log(log)) is None


@pytest.mark.usefixtures("indexed")
def test_an_index_that_other_code_has_made_is_not_used(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in the reasons that was mended would live on in it: their source was no part of its fingerprint."""
    build_index(open_log(log)).close()
    monkeypatch.setattr(index_file, "hash_of_package", lambda name: f"the source of {name} tomorrow")
    assert open_index(open_log(log)) is None


@pytest.mark.usefixtures("indexed")
def test_where_no_index_can_be_kept_the_log_is_read(
    run: Any, log: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A cache folder that cannot be made costs time, not the answer."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = run("show", log, "chat-17")
    assert result.exit_code == 0
    assert result.out.startswith("chat-17-b6")
    assert "no index can be kept" in result.err


def test_a_damaged_log_is_read_instead(run: Any, tmp_path: Path, request: Any) -> None:
    """Missing events are shown at their place."""
    log, driver = walked(tmp_path / "log", 1)
    middle = segment_paths(log)[1]
    contents = bytearray(middle.read_bytes())
    contents[len(contents) // 2] ^= 1
    middle.write_bytes(contents)
    request_ids = [driver.observed[0].request_id]  # type: ignore[attr-defined]
    without = answers(run, log, request_ids)
    request.getfixturevalue("indexed")
    assert answers(run, log, request_ids) == without


@pytest.mark.usefixtures("indexed")
def test_single_events_are_found_at_once(tmp_path: Path) -> None:
    """By number, from any segment; a number that is not in the log is left out."""
    log, driver = walked(tmp_path / "log", 2)
    index = build_index(open_log(log))
    last = len(driver.observed)
    found = [(sequence, event) for sequence, event, _ in index.named([1, 2, 77, last, last + 1])]
    assert found == [(sequence, driver.observed[sequence - 1]) for sequence in (1, 2, 77, last)]
    index.close()


@pytest.mark.usefixtures("indexed")
def test_an_index_is_private_and_leaves_no_scraps(log: Path, cache: Path) -> None:
    """Request ids may be confidential; an interrupted build leaves nothing behind."""
    path = index_path(open_log(log))
    build_index(open_log(log)).close()
    assert path.stat().st_mode & 0o077 == 0
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with pytest.raises(sqlite3.OperationalError), sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        connection.execute("DELETE FROM lives")
    assert os.fspath(path).startswith(os.fspath(cache))


def append(log: Path, events: list[e.Event]) -> None:
    """Write more events into a log that was closed."""
    store = reopened(log)
    for event in events:
        store.append(encode_events([event]), 1)
    store.close()


def rows_of(log: Path) -> dict[str, list[Any]]:
    """Everything in a log's index by which it answers."""
    with contextlib.closing(sqlite3.connect(index_path(open_log(log)))) as connection:
        tables = {
            "lives": "SELECT * FROM lives ORDER BY ordinal",
            "stories": "SELECT request_id, story, is_over FROM stories ORDER BY rowid",
            "places": "SELECT * FROM places ORDER BY first_sequence",
            "log": "SELECT * FROM log",
        }
        return {name: connection.execute(query).fetchall() for name, query in tables.items()}


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))])
@pytest.mark.usefixtures("indexed")
def test_an_index_that_was_continued_is_the_one_that_is_built_at_once(tmp_path: Path, seed: int) -> None:
    """Whatever was under way at the cuts: requests, lookups, loads, saves, preemptions."""
    rng = random.Random(seed)
    _, driver = walked(tmp_path / "whole", seed)
    cuts = sorted(rng.sample(range(1, len(driver.observed)), 4))
    print("cuts", cuts)
    log = write_log(tmp_path / "log", driver.observed[: cuts[0]], driver.configuration, segment_bytes=16_000)
    build_index(open_log(log)).close()
    for start, end in pairwise([*cuts, len(driver.observed)]):
        append(log, list(driver.observed[start:end]))
        grown = open_log(log)
        build_index(grown).close()
        assert grown.num_events == end - start, "the log was read from its beginning"
    continued = rows_of(log)
    index_path(open_log(log)).unlink()
    build_index(open_log(log)).close()
    assert continued == rows_of(log)


@pytest.mark.usefixtures("indexed")
def test_a_torn_tail_is_read_again_when_it_is_whole(story: Driver, tmp_path: Path) -> None:
    """A frame that is being written while the index is built is not left out of the next one."""
    log = write_log(tmp_path / "log", story.observed[:20], story.configuration)
    append(log, list(story.observed[20:40]))
    (segment,) = segment_paths(log)
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-5])
    index = build_index(open_log(log))
    assert [damage.kind for damage in index.contents.damage] == ["torn_tail"]
    index.close()
    segment.write_bytes(whole)
    grown = open_log(log)
    index = build_index(grown)
    assert (index.contents.last_sequence, index.contents.damage, grown.num_events) == (40, (), 1)
    index.close()


@pytest.mark.usefixtures("indexed")
def test_an_index_is_not_continued_into_another_history(story: Driver, tmp_path: Path) -> None:
    """A log that was set back and written on has the same name and more bytes; its chain tells."""
    log = write_log(tmp_path / "log", story.observed[:20], story.configuration)
    (segment,) = segment_paths(log)
    before = segment.read_bytes()
    append(log, [e.LogNote("what was indexed", 1)])
    build_index(open_log(log)).close()
    segment.write_bytes(before)
    append(log, [e.LogNote("what is there now", 1), *story.observed[20:40]])
    rewritten = open_log(log)
    build_index(rewritten).close()
    assert rewritten.num_events == 41


def forged(stored: bytes, forge: Callable[[Any], object]) -> bytes:
    """What an index remembers, in parts changed."""
    memory = msgspec.msgpack.decode(zlib.decompress(stored))
    forge(memory)
    return zlib.compress(msgspec.msgpack.encode(memory))


def forged_account(stored: bytes, forge: Callable[[Any], object]) -> bytes:
    """The same with changes in the account of one request."""

    def forge_reader(memory: Any) -> None:
        reader = msgspec.msgpack.decode(memory["reader"])
        forge(reader["visitors"][Accounts.__qualname__]["state"]["accounts"]["chat-17-b6"])
        memory["reader"] = msgspec.msgpack.encode(reader)

    return forged(stored, forge_reader)


def forget_admissions(account: Any) -> None:
    """A request is admitted, and its story has never heard of it."""
    account["admission"], account["history"]["admissions"] = account["history"]["admissions"][0], []


FORGERIES: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda _: b"",
    "not compressed": lambda _: b"no memory",
    "no memory": lambda _: zlib.compress(b"no memory"),
    "too deep": lambda _: zlib.compress(b"\x91" * 100_000),
    "of other things": lambda stored: forged(stored, lambda memory: memory.update(harm="done")),
    "with another part": lambda stored: forged_account(stored, lambda account: account.update(sums=[])),
    "without a reader": lambda stored: forged(stored, lambda memory: memory.update(reader=b"")),
    "against itself": lambda stored: forged_account(stored, forget_admissions),
}


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.usefixtures("indexed")
def test_a_forged_memory_costs_a_pass_and_nothing_else(story: Driver, tmp_path: Path, forgery: str) -> None:
    """Nothing is made of what an index remembers but values of its own types."""
    log = write_log(tmp_path / "log", story.observed[:40], story.configuration)
    build_index(open_log(log)).close()
    with contextlib.closing(sqlite3.connect(index_path(open_log(log)))) as connection, connection:
        ((stored,),) = connection.execute("SELECT stored FROM memory")
        connection.execute("UPDATE memory SET stored = ?", (FORGERIES[forgery](stored),))
    append(log, list(story.observed[40:]))
    grown = open_log(log)
    build_index(grown).close()
    assert grown.num_events == len(story.observed)
    built = rows_of(log)
    index_path(open_log(log)).unlink()
    build_index(open_log(log)).close()
    assert built == rows_of(log)


@pytest.mark.usefixtures("indexed")
def test_a_memory_of_another_layout_is_not_used(story: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One field deep inside of it has other values in this version: what was written before meant something else."""
    log = write_log(tmp_path / "log", story.observed[:40], story.configuration)
    build_index(open_log(log)).close()
    append(log, list(story.observed[40:]))
    monkeypatch.setitem(Tail.__annotations__, "end_token", "int | None")
    stored_states.layout_of.cache_clear()  # in one process a layout never changes
    grown = open_log(log)
    build_index(grown).close()
    stored_states.layout_of.cache_clear()
    assert grown.num_events == len(story.observed), "the log was read from its beginning"
