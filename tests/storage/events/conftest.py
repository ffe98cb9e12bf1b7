"""Real faults for event stores: an ordinary user's rights, and a file system that takes no more bytes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from log_torture.stored import compressed_copy

from kvledger.storage.events import Frame, SegmentEventStore
from kvledger.storage.events.segment_file import segment_paths

_NOBODY = 65534


@pytest.fixture
def random_seed() -> int:
    """Return a random seed; a failing test shows the KVLEDGER_TEST_SEED that repeats it."""
    seed = int(os.environ.get("KVLEDGER_TEST_SEED", random.randrange(1 << 32)))
    print(f"KVLEDGER_TEST_SEED={seed}")
    return seed


@pytest.fixture
def chance(random_seed: int) -> random.Random:
    """Return a source of randomness that `random_seed` repeats."""
    return random.Random(random_seed)


@pytest.fixture
def file_size_limit() -> Callable[[int], AbstractContextManager[None]]:
    """Return a context in which the kernel refuses to let any file grow over a number of bytes (EFBIG)."""

    @contextlib.contextmanager
    def limit(num_bytes: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))  # Python ignores SIGXFSZ from its start
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit


@pytest.fixture
def read_only_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which the working directory, `tmp_path`, takes no new file, also when root runs the tests."""
    monkeypatch.chdir(tmp_path)  # the directories above may be closed to other users

    @contextlib.contextmanager
    def read_only() -> Iterator[None]:
        is_root = os.geteuid() == 0
        files = [path for path in tmp_path.iterdir() if path.is_file()]
        for file in files:
            file.chmod(0o444)  # to be no more the owner's than the directory is
        tmp_path.chmod(0o555)
        if is_root:
            os.seteuid(_NOBODY)
        try:
            yield
        finally:
            if is_root:
                os.seteuid(0)
            tmp_path.chmod(0o755)
            for file in files:
                file.chmod(0o644)

    return read_only


@pytest.fixture
def two_segment_log(tmp_path: Path) -> tuple[Path, list[Frame]]:
    """Write three frames, two in the first segment and one in the second; return the directory and the frames."""
    directory = tmp_path / "log"
    store = SegmentEventStore.create(directory, {"block_size": 16}, segment_bytes=405)
    for payload, num_events in ((b"first", 1), (b"second frame", 3), (b"third", 2)):
        store.append(payload, num_events)
    store.close()
    frames = list(store.read())
    segments = sorted(path.name for path in directory.glob("*.kvlog"))
    assert segments == ["00000000000000000001.kvlog", "00000000000000000005.kvlog"]
    return directory, frames


@pytest.fixture(scope="session")
def small_process() -> Iterator[Executor]:
    """A process in which nothing is loaded but stored logs, so that its forks cost little."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a log of two segments; the first one has frames for three blocks."""
    log, chance = tmp_path_factory.mktemp("logs") / "log", random.Random(5)
    store = SegmentEventStore.create(log, {"block_size": 16}, segment_bytes=600_000)
    for number in range(60):
        store.append(chance.randbytes(20) * chance.randrange(400, 800), 1 + number % 3)
    store.close()
    assert len(segment_paths(log)) == 2
    return log


@pytest.fixture
def compressed(raw: Path, tmp_path: Path) -> Path:
    """Copy the log `raw` and compress its first segment."""
    return compressed_copy(raw, tmp_path / "compressed")
